"""Every layout does what one process does: loss, gradients, log-probabilities, routes and the weights after an update.

Tolerances, float32. What differs is the order of sums in float32: over 410 combinations of the layouts and models below with
seeds 0-5, gradients differed by at most 2.4e-6 (norm of the difference over norm, the worst tensor of each), gradient norms by
2.7e-7, log-probabilities by 1.9e-6, weights after an update of up to 1e-3 by 1.9e-6; no route differed, and first weights
never by a bit. A layout that leaves out, doubles or misplaces anything is off by 1e-3 and more.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.passes import Case, passes
from tests.distributed.ranks import run_on_ranks

pytestmark = pytest.mark.distributed

Result = dict[str, Any]
WHOLE, CUT = 10_000, 40  # microbatch budgets: everything at once, and 5 to 8 microbatches a process

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "TP2": (2, dict(tensor=2)),
    "PP2": (2, dict(pipeline=2)),
    "PP2 virtual": (2, dict(pipeline=2, virtual_pipeline=2)),
    "EP2": (2, dict(expert=2)),
    "DP2": (2, {}),
    "ETP2 allgather": (2, dict(expert_tensor=2, dispatcher="allgather")),
    "EP2 allgather": (2, dict(expert=2, dispatcher="allgather")),
    "TP2 EP2": (2, dict(tensor=2, expert=2)),
    "TP2 EP2 DP2": (4, dict(tensor=2, expert=2)),
    "PP2 EP2": (4, dict(pipeline=2, expert=2)),
    "PP2 virtual EP2": (4, dict(pipeline=2, virtual_pipeline=2, expert=2)),
    "EP4": (4, dict(expert=4)),
    "TP2 PP2 EP2 allgather": (4, dict(tensor=2, pipeline=2, expert=2, dispatcher="allgather")),
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a dense layer": dict(dense_layers=[1]),
    "recompute": dict(recompute="full"),
    "expert bias": dict(router_score="sigmoid", load_balancing="expert_bias", expert_bias_rate=0.05, router_scale=2.5),
    "groups": dict(router_score="sigmoid", router_groups=4, router_group_topk=2),
    "pre-softmax": dict(router_pre_softmax=True, router_scale=1.7),
    "shared expert": dict(shared_ffn=32),
    "tied": dict(tie_embeddings=True),
    "odd vocabulary": dict(vocab_size=67),  # 128 rows: the second tensor rank has 3 real ones
    "small vocabulary": dict(vocab_size=20),  # 64 rows: the second tensor rank has padding alone
    "everything": dict(
        dense_layers=[0, 2],
        router_score="sigmoid",
        load_balancing="expert_bias",
        expert_bias_rate=0.05,
        router_scale=1.5,
        router_groups=2,
        router_group_topk=1,
        shared_ffn=32,
        tie_embeddings=True,
        vocab_size=101,
        recompute="full",
    ),
    "aux loss": dict(load_balancing="aux_loss", aux_loss_coefficient=1.0),
    "global aux loss": dict(load_balancing="global_aux_loss", aux_loss_coefficient=1.0),
    "bfloat16": dict(dtype="bfloat16"),
}
FULL = ["plain", "everything"]  # these in every layout
SOME = ["TP2", "PP2 virtual", "EP2"]  # the others in these
AUX = {"aux loss": CUT, "global aux loss": WHOLE}
LAYOUT_NAMES = [name for name in LAYOUTS if name != "1"]

Key = tuple[str, str, int, int]  # layout, model, budget, shares


def data_size(layout: str) -> int:
    return LAYOUTS[layout][0] // Case(layout=LAYOUTS[layout][1]).parallel.model_parallel


# Half of the layouts cut their microbatches: what they are compared with is computed whole.
EXACT: list[Key] = [(name, model, (WHOLE, CUT)[i % 2], 1) for model in FULL for i, name in enumerate(LAYOUT_NAMES)]
EXACT += [(name, model, CUT, 1) for model in MODELS if model not in (*FULL, *AUX, "bfloat16") for name in SOME]
EXACT += [("1", "plain", CUT, 1), ("1", "everything", 1, 1), ("EP2", "plain", 24, 1), ("PP2 virtual", "plain", 1, 1)]
AUXILIARY: list[Key] = [
    (name, model, budget, 1) for model, budget in AUX.items() for name in [*SOME, "DP2", "TP2 EP2 DP2", "PP2 virtual EP2"]
]
ROUNDED: list[Key] = [(name, "bfloat16", WHOLE, 1) for name in SOME]


def reference_of(key: Key) -> Key:
    """What one process computes for it. An auxiliary loss is a sum over microbatches of something that is not linear in
    them, so that only the same microbatches have the same gradient: as `shares` data-parallel ranks would cut them. The
    global one looks at what all ranks compute at once, which is what one process does in one microbatch."""
    layout, model, budget, _ = key
    return ("1", model, budget, data_size(layout)) if model == "aux loss" else ("1", model, WHOLE, 1)


@pytest.fixture(scope="module")
def results() -> dict[Key, Result]:
    """One start a world size: each costs seconds."""
    compared = [*EXACT, *AUXILIARY, *ROUNDED]
    keys = list(dict.fromkeys([*compared, *map(reference_of, compared)]))
    found: dict[Key, Result] = {}
    for world in (1, 2, 4):
        here = [key for key in keys if LAYOUTS[key[0]][0] == world]
        cases = [Case(LAYOUTS[name][1], MODELS[model], budget, 0, shares) for name, model, budget, shares in here]
        found |= zip(here, run_on_ranks(passes, world, cases)[0], strict=True)
    return found


def difference(ours: Tensor, wanted: Tensor) -> float:
    """Relative, by norm; where nothing is wanted, nothing may be."""
    norm = float(wanted.norm())
    return float((ours - wanted).norm()) / norm if norm > 0 else float(ours.norm())


def worst(ours: dict[Any, Tensor], wanted: dict[Any, Tensor]) -> tuple[float, Any]:
    assert ours.keys() == wanted.keys()
    return max((difference(ours[key], wanted[key]), key) for key in wanted)


def farthest(ours: dict[Any, Tensor], wanted: dict[Any, Tensor]) -> float:
    assert ours.keys() == wanted.keys()
    return max(float((ours[key] - wanted[key]).abs().max()) for key in wanted)


def assert_agree(ours: Result, wanted: Result) -> None:
    assert ours["routes"].keys() == wanted["routes"].keys()
    assert all(torch.equal(ours["routes"][key], rows) for key, rows in wanted["routes"].items())
    assert farthest(ours["logprobs"], wanted["logprobs"]) < 1e-5
    assert ours["loss"] == pytest.approx(wanted["loss"], rel=2e-6, abs=2e-6)
    gap, name = worst(ours["gradients"], wanted["gradients"])
    assert gap < 1e-5, f"gradient of {name}"
    assert ours["norm"] == pytest.approx(wanted["norm"], rel=2e-6)
    assert farthest(ours["after"], wanted["after"]) < 1e-5
    assert farthest(wanted["after"], wanted["initial"]) > 5e-4  # there was an update


@pytest.mark.parametrize("key", EXACT, ids=lambda key: f"{key[1]}-{key[0]}-{key[2]}")
def test_a_layout_computes_what_one_process_computes(results: dict[Key, Result], key: Key) -> None:
    wanted = results[reference_of(key)]
    assert_agree(results[key], wanted)
    assert min(int(rows.min()) for rows in wanted["routes"].values()) >= 0  # every token of every layer was seen


def test_first_weights_are_the_same_to_the_bit_in_every_layout(results: dict[Key, Result]) -> None:
    for key, ours in results.items():
        wanted = results[reference_of(key)]["initial"]
        assert ours["initial"].keys() == wanted.keys()
        assert all(torch.equal(ours["initial"][name], wanted[name]) for name in wanted), key
    plain = results["1", "plain", WHOLE, 1]["initial"]
    assert sum(tensor.numel() for tensor in plain.values()) == 2 * 320 * 64 + 64 + 4 * 86_688  # worked out by hand
    drawn = [tensor for tensor in plain.values() if tensor.ndim > 1]
    assert len({tensor.sum().item() for tensor in drawn}) == len(drawn)  # no two tensors have a seed in common


@pytest.mark.parametrize("model", ["expert bias", "everything"])
def test_expert_biases_move_alike(results: dict[Key, Result], model: str) -> None:
    """Counts of tokens are integers, and the step is by the sign alone: equal to the bit. Filler must not be counted."""
    wanted = results["1", model, WHOLE, 1]["after"]
    biases = [name for name in wanted if name.endswith("expert_bias")]
    assert len(biases) == (4 if model == "expert bias" else 2)
    step = torch.tensor(0.05)
    assert all(torch.equal(wanted[name].abs(), step * wanted[name].sign().abs()) and wanted[name].any() for name in biases)
    for key in EXACT:
        if key[1] == model:
            assert all(torch.equal(results[key]["after"][name], wanted[name]) for name in biases), key


@pytest.mark.parametrize("model", AUX)
def test_an_auxiliary_loss_reaches_the_gradient_and_nothing_else(results: dict[Key, Result], model: str) -> None:
    """Case 22. The routers' gradients change by more than they had; the forward pass by not a bit."""
    off, on = results["1", "plain", WHOLE, 1], results["1", model, (WHOLE if model == "global aux loss" else CUT), 1]
    cut = off if model == "global aux loss" else results["1", "plain", CUT, 1]
    assert all(torch.equal(on["logprobs"][i], cut["logprobs"][i]) for i in off["logprobs"])
    assert on["loss"] == cut["loss"]
    routers = [name for name in off["gradients"] if "router" in name]
    assert len(routers) == 4
    assert all(difference(on["gradients"][name], off["gradients"][name]) > 0.3 for name in routers)


@pytest.mark.parametrize("key", AUXILIARY, ids=lambda key: f"{key[1]}-{key[0]}")
def test_auxiliary_losses_agree_on_the_same_microbatches(results: dict[Key, Result], key: Key) -> None:
    assert_agree(results[key], results[reference_of(key)])


def test_an_auxiliary_loss_depends_on_how_microbatches_are_cut(results: dict[Key, Result]) -> None:
    """By construction (a product of two means over the microbatch): what cannot agree, and why AUXILIARY has `shares`."""
    one, two = (results["1", "aux loss", CUT, shares]["gradients"] for shares in (1, 2))
    assert worst(one, two)[0] > 0.01


@pytest.mark.parametrize("key", ROUNDED, ids=lambda key: key[0])
def test_bfloat16_agrees_as_far_as_its_rounding_allows(results: dict[Key, Result], key: Key) -> None:
    """Pipeline stages and experts elsewhere change no product, only the sums of gradients over ranks; tensor parallelism
    adds halves that were rounded, and near-tied routers flip. Over seeds 0-5: at most 1.3% of choices, 0.02 in the mean
    log-probability, 0.12 in the whole gradient, 0.005 in its norm; without tensor parallelism 0, 0, 0.003 and 8e-5."""
    ours, wanted = results[key], results[reference_of(key)]
    rounds = key[0] == "TP2"
    entries = sum(rows.numel() for rows in wanted["routes"].values())
    flips = sum(int((ours["routes"][place] != rows).sum()) for place, rows in wanted["routes"].items())
    assert flips <= (0.04 * entries if rounds else 0)
    logprobs = torch.cat([(ours["logprobs"][i] - values).abs() for i, values in wanted["logprobs"].items()])
    assert logprobs.mean() < (0.05 if rounds else 1e-3)
    whole = [torch.cat([side["gradients"][name].flatten() for name in wanted["gradients"]]) for side in (ours, wanted)]
    assert difference(*whole) < (0.3 if rounds else 0.01)
    assert ours["norm"] == pytest.approx(wanted["norm"], rel=0.02 if rounds else 1e-3)
