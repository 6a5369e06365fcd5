"""The same seed, batch and model give the same numbers in every layout.

Tolerances: float32 sums taken in another order. Measured over several seeds, layouts and budgets: log-probabilities differ by
up to 1.5e-6, the loss by 1.2e-7, the gradient norm by 1e-7 relative, a parameter's gradient by 1.5e-6 of its norm. Allowed
here: ten times that. The first step of Adam divides a gradient by its own size, so a near-zero entry may move by up to
lr = 1e-3 either way: weights after it are compared through their gradients instead.
"""

from typing import Any

import pytest
import torch

from tests.distributed.passes import Case, passes
from tests.distributed.ranks import run_on_ranks

pytestmark = pytest.mark.distributed

Layout = dict[str, Any]
LAYOUTS: dict[int, list[Layout]] = {
    2: [
        {},
        {"tensor": 2},
        {"pipeline": 2},
        {"pipeline": 2, "virtual_pipeline": 2},
        {"expert": 2},
        {"expert": 2, "dispatcher": "allgather"},
        {"expert_tensor": 2, "dispatcher": "allgather"},
        {"tensor": 2, "expert": 2},
    ],
    4: [
        {"tensor": 2, "expert": 2},
        {"pipeline": 2, "expert": 2},
        {"pipeline": 2, "virtual_pipeline": 2, "expert": 2},
        {"expert": 4},
        {"tensor": 2, "pipeline": 2, "expert": 2, "dispatcher": "allgather"},
    ],
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense layer between": {"dense_layers": [1], "tie_embeddings": True, "vocab_size": 131},
    "sigmoid, bias, groups": {
        "router_score": "sigmoid",
        "load_balancing": "expert_bias",
        "router_groups": 4,
        "router_group_topk": 2,
        "router_scale": 2.5,
        "topk": 2,
        "shared_ffn": 32,
    },
    "pre-softmax": {"router_pre_softmax": True, "topk": 3},
}


def cases(layouts: list[Layout]) -> list[Case]:
    """Every layout with the plain model, and each other model in one layout or two, every second case under replay of random
    routes; seeds differ."""
    plain = [Case(layout=layout, budget=30, seed=i, replay=i % 2 == 1) for i, layout in enumerate(layouts)]
    names = list(MODELS)[1:]
    others = [
        Case(
            layout=layout,
            model=MODELS[names[i % len(names)]] | {"recompute": "full"},
            budget=40,
            seed=10 + i,
            replay=i % 2 == 0,
        )
        for i, layout in enumerate(layouts)
    ]
    return plain + others


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_agrees_with_one_process(ranks: int) -> None:
    split = cases(LAYOUTS[ranks])
    whole = [
        Case(model={k: v for k, v in case.model.items() if k != "recompute"}, seed=case.seed, replay=case.replay)
        for case in split
    ]
    expected = run_on_ranks(passes, 1, whole)[0]
    for case, alone, got in zip(split, expected, run_on_ranks(passes, ranks, split)[0], strict=True):
        compare(str(case), alone, got)


def compare(name: str, alone: dict[str, Any], got: dict[str, Any]) -> None:
    assert got["loss"] == pytest.approx(alone["loss"], abs=1e-5), name
    assert got["norm"] == pytest.approx(alone["norm"], rel=1e-5), name
    assert got["logprobs"].keys() == alone["logprobs"].keys() and got["routes"].keys() == alone["routes"].keys(), name
    for i, logprobs in alone["logprobs"].items():
        torch.testing.assert_close(got["logprobs"][i], logprobs, rtol=0, atol=1.5e-5, msg=lambda m: f"{name}: {m}")
    for key, routes in alone["routes"].items():
        assert torch.equal(got["routes"][key], routes), (name, key)
    assert got["gradients"].keys() == alone["gradients"].keys() and len(alone["gradients"]) > 100, name
    for key, gradient in alone["gradients"].items():
        error = (got["gradients"][key] - gradient).norm()
        assert error <= 1.5e-5 * gradient.norm() + 1e-8, (name, key, error, gradient.norm())
    for key, weights in alone["after"].items():
        assert (got["after"][key] - weights).abs().max() <= 2.1e-3, (name, key)  # 2 x lr: see above


def test_microbatches_and_recompute_change_nothing() -> None:
    alone, cut, again = run_on_ranks(
        passes, 1, [Case(seed=5), Case(seed=5, budget=25), Case(seed=5, model={"recompute": "full"})]
    )[0]
    compare("budget 25", alone, cut)
    assert again["norm"] == alone["norm"]
    for key, gradient in alone["gradients"].items():
        assert torch.equal(again["gradients"][key], gradient), key


def test_auxiliary_loss_gives_the_router_a_gradient_and_leaves_log_probabilities() -> None:
    """Case 22. How large it is depends on how microbatches are cut: Megatron takes it over one at a time."""
    model = {"load_balancing": "aux_loss", "aux_loss_coefficient": 1.0}
    alone, aux = run_on_ranks(passes, 1, [Case(seed=2), Case(seed=2, model=model)])[0]
    for i, logprobs in alone["logprobs"].items():
        assert torch.equal(aux["logprobs"][i], logprobs)
    changed = [k for k in alone["gradients"] if not torch.equal(aux["gradients"][k], alone["gradients"][k])]
    assert all(f"decoder.layers.{layer}.mlp.router.weight" in changed for layer in range(4))
    assert "output_layer.weight" not in changed  # it lies behind every router


def test_filler_alone_has_no_auxiliary_loss() -> None:
    """Some ranks need more microbatches than others, whose spare ones hold filler: Megatron would take a mean of nothing."""
    cases = [
        Case(layout={"expert": 2}, model={"load_balancing": balancing}, seed=seed, budget=23)
        for balancing in ("aux_loss", "global_aux_loss")
        for seed in range(3)
    ]
    for case, got in zip(cases, run_on_ranks(passes, 2, cases)[0], strict=True):
        assert torch.tensor(got["norm"]).isfinite(), case
