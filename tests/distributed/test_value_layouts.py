"""The value model gives the same numbers in every layout, beside a policy that it leaves alone, and through checkpoints.

Tolerances: as in test_parity, float32 sums taken in another order. Measured over layouts of 2 and 4 ranks, models and seeds:
values (up to 3) differ by up to 1.9e-6, the loss by 2.4e-7, the gradient norm by 1.4e-7 relative, a parameter's gradient by
2.6e-6 of its norm, a weight after an update of lr 1e-3 by 8e-7. Allowed: about ten times that.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import OptimizerConfig
from models.optimizer import Optimizer
from models.value import ValueModel
from moe_rl import checkpoint
from moe_rl.checkpoint import CriticState, Progress
from parallel.groups import process_groups
from parallel.runtime import Runtime
from tests.distributed.passes import Case, built, gather_global
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import differing, read, tensors
from tests.distributed.test_parity import MODELS, compare
from tests.distributed.value_passes import both, passes, set_head, update_policy, update_values

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2": (2, {}),
    "EP2": (2, {"expert": 2}),
    "TP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "PP2 virtual": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "TP2 EP2": (2, {"tensor": 2, "expert": 2}),
    "TP2 EP2, twice": (4, {"tensor": 2, "expert": 2}),
    "TP2 PP2 EP2": (4, {"tensor": 2, "pipeline": 2, "expert": 2, "dispatcher": "allgather"}),
}


def cases() -> dict[str, tuple[int, Case]]:
    """Every layout with two models in turn, so that each has a tied policy or one with an expert bias in it somewhere."""
    models = list(MODELS.values())
    out = {}
    for i, (name, (world, layout)) in enumerate(LAYOUTS.items()):
        for turn in range(2):
            model = models[(i + 2 * turn + 1) % len(models)] | ({"recompute": "full"} if turn else {})
            out[f"{name}, {turn}"] = world, Case(layout=layout, model=model, budget=30 + 10 * turn, seed=i + 10 * turn)
    return out


def test_every_layout_agrees_with_one_process() -> None:
    """Values, the loss, every gradient, their norm and the weights after an update; the trunk is the policy's to the bit."""
    split = cases()
    whole = [
        Case(model={k: v for k, v in case.model.items() if k != "recompute"}, seed=case.seed) for _, case in split.values()
    ]
    expected = dict(zip(split, run_on_ranks(passes, 1, whole)[0], strict=True))
    for world in (2, 4):
        here = {name: case for name, (ranks, case) in split.items() if ranks == world}
        for name, got in zip(here, run_on_ranks(passes, world, list(here.values()))[0], strict=True):
            alone = expected[name]
            compare(name, alone, got)
            for key, weights in alone["after"].items():
                assert (got["after"][key] - weights).abs().max() <= 1e-5, (name, key)
            assert alone["gradients"]["value_head.weight"].norm() > 0.1, name
            trunk = got["initial"].keys() - {"value_head.weight"}
            assert trunk == got["policy"].keys() - {"output_layer.weight"}, name
            assert all(torch.equal(got["initial"][key], got["policy"][key]) for key in trunk), name


def apart_and_together(runtime: Runtime, layouts: list[dict[str, Any]]) -> list[str]:
    """What two updates of a model make of it where there is no other, and where another is built and updated too; what is not
    the same."""
    wrong = []
    settings, model = OptimizerConfig(lr=1e-2), MODELS["sigmoid, bias, groups"] | {"tie_embeddings": True}
    for i, layout in enumerate(layouts):
        case = Case(layout, model, seed=i)
        with built(case, runtime) as policy:
            alone = _updates(policy, policy.optimizer(settings, 10), update_policy)
        with process_groups(case.parallel) as groups:
            critic = ValueModel(case.config, groups, runtime.device, i + 50)
            values_alone = _updates(critic, critic.optimizer(settings, 10), update_values)
        with both(case, runtime) as (policy, critic):
            optimizer, other = policy.optimizer(settings, 10), critic.optimizer(settings, 10)
            norms: list[tuple[float, float]] = [
                (update_policy(policy, optimizer, seed), update_values(critic, other, seed)) for seed in range(2)
            ]
            for name, now, (norms_alone, then) in (("policy", policy, alone), ("critic", critic, values_alone)):
                ours = [pair[name == "critic"] for pair in norms]
                if ours != norms_alone or not _equal(gather_global(now, {}), then):
                    wrong.append(f"{layout}: {name}")
    return wrong


def _updates(model: Any, optimizer: Optimizer, update: Any) -> tuple[list[float], dict[Any, Any]]:
    return [update(model, optimizer, seed) for seed in range(2)], gather_global(model, {})


def _equal(ours: dict[Any, Any], wanted: dict[Any, Any]) -> bool:
    return ours.keys() == wanted.keys() and all((ours[key][1] == wanted[key][1]).all() for key in wanted)


def test_neither_model_changes_the_other() -> None:
    """To the bit: their updates in turn are those that each makes where there is no other."""
    layouts = [layout for world, layout in LAYOUTS.values() if world == 2]
    assert run_on_ranks(apart_and_together, 2, layouts) == [[], []]


STATE: dict[str, Any] = dict(dense_layers=[1], router_score="sigmoid", load_balancing="expert_bias", tie_embeddings=True)
SCHEDULE = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_updates=5, weight_decay=0.1)
PROGRESS = Progress(7, 3, 3, 0.5)


def trained(runtime: Runtime, folder: Path) -> tuple[list[float], dict[Any, Any]]:
    """Two updates of both with experts split, saved; what a third makes of the critic, and its norm."""
    with both(Case({"expert": 2}, STATE), runtime) as (policy, critic):
        set_head(critic, 0)  # one of 0 gives the trunk no gradient
        pair = CriticState(critic, critic.optimizer(SCHEDULE, 50))
        optimizer = policy.optimizer(SCHEDULE, 50)
        for i in range(2):
            update_policy(policy, optimizer, i)
            update_values(*pair, i)
        checkpoint.save(folder / "made", PROGRESS, policy, optimizer, keep=1, critic=pair)
        return [update_values(*pair, 2)], gather_global(critic, {})


def passed_on(runtime: Runtime, folder: Path, source: str, layouts: dict[str, dict[str, Any]]) -> list[Progress]:
    """From layout to layout: each loads, into models of other weights, what the one before saved, and saves it again."""
    seen = []
    for i, (name, layout) in enumerate(layouts.items()):
        with both(Case(layout, STATE, seed=9 + i), runtime) as (policy, critic):
            set_head(critic, i)
            pair = CriticState(critic, critic.optimizer(SCHEDULE, 50))
            optimizer = policy.optimizer(SCHEDULE, 50)
            seen.append(checkpoint.load(folder / source / "step_000007", policy, optimizer, pair))
            checkpoint.save(folder / name, seen[-1], policy, optimizer, keep=1, critic=pair)
            source = name
    return seen


def continued(runtime: Runtime, folder: Path, sources: list[str]) -> list[tuple[list[float], dict[Any, Any]]]:
    """The third update, of what is loaded from each source into models of other weights."""
    seen = []
    for source in sources:
        with both(Case({"expert": 2}, STATE, seed=5), runtime) as (policy, critic):
            set_head(critic, 5)
            pair = CriticState(critic, critic.optimizer(SCHEDULE, 50))
            checkpoint.load(folder / source / "step_000007", policy, policy.optimizer(SCHEDULE, 50), pair)
            seen.append(([update_values(*pair, 2)], gather_global(critic, {})))
    return seen


def test_a_critic_goes_through_layouts_unchanged_and_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    wanted = run_on_ranks(trained, 2, tmp_path)
    made = read(tmp_path / "made" / "step_000007" / "critic")
    moments = [key for key in tensors(made) if key.startswith("optimizer.state.exp_avg")]
    assert len(moments) > 60 and all(made[key].any() for key in moments)
    assert made["value_head.weight"].shape == (64,) and made["value_head.weight"].any() and "output_layer.weight" not in made

    split = {"tensor": {"tensor": 2}, "virtual": {"pipeline": 2, "virtual_pipeline": 2}, "expert": {"expert": 2}}
    assert run_on_ranks(passed_on, 2, tmp_path, "made", split)[0] == [PROGRESS] * 3
    assert run_on_ranks(passed_on, 1, tmp_path, "virtual", {"one": {}})[0] == [PROGRESS]
    for name in (*split, "one"):
        assert not differing(read(tmp_path / name / "step_000007" / "critic"), made), name
        policy = {k: v for k, v in read(tmp_path / name / "step_000007").items() if not k.startswith("random")}
        saved = {k: v for k, v in read(tmp_path / "made" / "step_000007").items() if not k.startswith("random")}
        assert not differing(policy, saved), name
    for ours, alone in zip(run_on_ranks(continued, 2, tmp_path, ["made", "expert"]), wanted, strict=True):
        assert all(norms == alone[0] and _equal(weights, alone[1]) for norms, weights in ours)
