"""Whole runs in several processes: the first RL step agrees with one process, repeats and resumes to the bit in its layout,
and checkpoints, with the optimizer's state, go from any layout to any other."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import OptimizerConfig
from moe_rl import checkpoint
from moe_rl.checkpoint import Progress
from parallel.runtime import Runtime
from tests.distributed.layouts import LAYOUTS, assert_close, name
from tests.distributed.passes import Case, built
from tests.distributed.ranks import run_on_ranks, train_on_ranks
from tests.distributed.runs import Runs, differing, read, tensors
from tests.distributed.updates import update

pytestmark = pytest.mark.distributed

# Each from the same checkpoint, in one step whose minibatches drift apart
REPLAYS = {
    "r2": ["replay.mode=r2", "model.recompute=full"],
    "r3": ["replay.mode=r3"],
    "filtered": ["replay.mode=filtered", "replay.source=r3", "replay.keep_share=0.9", "algorithm.name=gspo"],
}
STEP, STILL, LONG = "step", "still", "long"
# Old and new policy an update apart, then two: four minibatches of one sequence, where a second rank has nothing to do
SPARSE = ["rollout.prompts=1", "algorithm.epochs=2", "algorithm.microbatch_tokens=8"]


# The first stage of two has no layer that routes; fresh weights, which are the same in every layout
DENSE = ["model.dense_layers=[0,1]", "replay.mode=r3", "algorithm.minibatches=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All runs of this file, in two starts of processes. They begin from one checkpoint, which one process made."""
    found = Runs(tmp_path_factory.mktemp("runs"))
    start = f"checkpoint.load={found.folder / 'base'}"
    configs: dict[int, list[Any]] = {1: [found.config("base", "sft.steps=3", "run.steps=0")], 2: []}
    for layout, (world, settings) in LAYOUTS.items():
        here = configs[world]
        here.append(found.config(name(layout, STEP), start, *settings, "run.steps=1"))
        here += [found.config(name(layout, mode), start, *settings, *extra, "run.steps=1") for mode, extra in REPLAYS.items()]
        if layout in ("one", "EP2", "PP2 virtual"):
            here.append(found.config(name(layout, "sparse"), start, *settings, *SPARSE, "run.steps=1"))
        if layout in ("one", "PP2", "TP2"):
            here.append(found.config(name(layout, "dense"), *settings, *DENSE, "run.steps=1"))
        if layout in ("EP2", "TP2", "PP2"):
            here.append(found.config(name(layout, STILL), start, *settings, "optimizer.lr=0", "algorithm.epochs=2"))
    # to step 3, and in two parts; the second goes on in the first one's directory, from its checkpoint
    linear = ["optimizer.schedule=linear", "optimizer.decay_updates=12", "checkpoint.every=1", "checkpoint.keep=9"]
    penalty = ["algorithm.kl_coefficient=0.1", "algorithm.kl_target=0.001", "algorithm.kl_horizon=50"]
    for layout in ("EP2", "PP2 virtual"):
        shared = [start, *LAYOUTS[layout][1], *linear, *(penalty if layout == "EP2" else [])]
        configs[2] += [
            found.config(name(layout, LONG), *shared, "run.steps=3"),
            found.config(name(layout, "parts"), *shared, "run.steps=1"),
            found.config(name(layout, "parts"), *shared, "run.steps=3"),
        ]
    for world, here in configs.items():
        train_on_ranks(world, here)
    return found


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one"])
def test_the_first_step_is_that_of_one_process(runs: Runs, layout: str) -> None:
    ours, wanted = runs.steps(name(layout, STEP)), runs.steps(name("one", STEP))
    assert ours[0] == wanted[0]  # the evaluation before
    assert_close(ours[1], wanted[1])
    assert wanted[1]["drift/update/flip_rate/mean"] > 0.02 and wanted[1]["optimizer/grad_norm"] > 0.1


@pytest.mark.parametrize("mode", REPLAYS)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one"])
def test_replay_is_that_of_one_process(runs: Runs, layout: str, mode: str) -> None:
    ours, wanted = runs.steps(name(layout, mode))[1], runs.steps(name("one", mode))[1]
    assert_close(ours, wanted)
    rate = "drift/update/local/expert_change_rate/mean/minibatch_"
    assert wanted[f"{rate}0"] == 0 and wanted[f"{rate}3"] > 0.01  # by itself a router would choose otherwise
    used = wanted["drift/update/expert_change_rate/mean"]
    assert used > 0 if mode == "filtered" else used == 0
    assert (wanted["replay/refused_fraction/mean"] > 0) == (mode == "filtered")
    assert wanted["replay/unknown_fraction/mean"] == wanted["drift/engine/flip_rate/mean"] == 0
    assert wanted["replay/forced_gap"] > 1e-3


@pytest.mark.parametrize("layout", ["EP2", "PP2 virtual"])
def test_a_rank_without_a_sequence_in_a_minibatch_changes_nothing(runs: Runs, layout: str) -> None:
    assert_close(runs.steps(name(layout, "sparse"))[1], runs.steps(name("one", "sparse"))[1])


@pytest.mark.parametrize("layout", ["PP2", "TP2"])
def test_a_stage_without_routers_changes_nothing(runs: Runs, layout: str) -> None:
    """Case 1."""
    wanted = runs.steps(name("one", "dense"))[1]
    assert_close(runs.steps(name(layout, "dense"))[1], wanted)
    layers = {key.split("/")[-1] for key in wanted if key.startswith("drift/probe/router_shift/layer")}
    assert layers == {"layer_02", "layer_03"}


@pytest.mark.parametrize("layout", ["EP2", "TP2", "PP2"])
def test_at_learning_rate_zero_nothing_moves(runs: Runs, layout: str) -> None:
    """Two epochs of four minibatches, two steps, from weights that were loaded."""
    for line in runs.steps(name(layout, STILL))[1:]:
        assert line["ratio/mean"] == line["ratio/max"] == 1
        rates = [k for k in line if re.match("drift/update/.*(expert_change_rate|flip_rate|router_kl|gate_shift)", k)]
        assert len(rates) > 2 * 6 * 9 and not any(line[key] for key in rates)
        assert line["optimizer/grad_norm"] > 0
    ours, loaded = (tensors(runs.saved(run, step)) for run, step in ((name(layout, STILL), 2), ("base", 0)))
    weights = [key for key in loaded if not key.startswith(("optimizer.", "random"))]
    assert len(weights) > 30 and all(torch.equal(ours[key], loaded[key]) for key in weights)


@pytest.mark.parametrize("layout", ["EP2", "PP2 virtual"])
def test_a_continued_run_is_one_that_was_not_stopped(runs: Runs, layout: str) -> None:
    """Schedule, optimizer, weights, and with EP2 the reference and the adaptive coefficient."""
    whole, parts = name(layout, LONG), name(layout, "parts")
    assert len(runs.steps(whole)) == 4 and runs.steps(whole) == runs.steps(parts)
    assert runs.steps(whole)[1]["optimizer/lr"] > runs.steps(whole)[3]["optimizer/lr"] > 0
    for step in (2, 3):
        ours, wanted = runs.saved(parts, step), runs.saved(whole, step)
        assert len(tensors(wanted)) > 150 and not differing(ours, wanted)
    assert len({runs.steps(whole)[step].get("kl/coefficient", step) for step in (1, 2, 3)}) == 3


# What a checkpoint has to carry: biases, a weight that two stages share, experts, a dense layer; all moments
STATE: dict[str, Any] = dict(dense_layers=[1], router_score="sigmoid", load_balancing="expert_bias", tie_embeddings=True)
SCHEDULE = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_updates=5, weight_decay=0.1)
PASSED: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [
        {},
        dict(expert=2),
        dict(tensor=2),
        dict(pipeline=2),
        dict(pipeline=2, virtual_pipeline=2),
        dict(expert_tensor=2, dispatcher="allgather"),
    ],
    4: [dict(tensor=2, expert=2), dict(tensor=2, pipeline=2, expert=2, dispatcher="allgather"), dict(expert=4)],
}


def trained(runtime: Runtime, target: Path) -> None:
    with built(Case(model=STATE), runtime) as model:
        optimizer = model.optimizer(SCHEDULE, 50)
        for i in range(3):
            update(model, optimizer, i)
        checkpoint.save(target, Progress(7, 3, 3, 0.5), model, optimizer, keep=1)


def passed_on(runtime: Runtime, folder: Path) -> list[tuple[Progress, float]]:
    """From layout to layout: each loads, into a model of other weights, what the one before saved, and saves it again."""
    seen, source = [], folder / "0" / "step_000007"
    for i, layout in enumerate(PASSED[runtime.world_size]):
        with built(Case(layout, STATE, seed=9 + i), runtime) as model:
            optimizer = model.optimizer(SCHEDULE, 50)
            seen.append((checkpoint.load(source, model, optimizer), optimizer.lr))
            source = checkpoint.save(folder / f"{runtime.world_size}-{i}", seen[-1][0], model, optimizer, keep=1)
    return seen


def test_a_checkpoint_goes_through_every_layout_unchanged(tmp_path: Path) -> None:
    run_on_ranks(trained, 1, tmp_path / "0")
    wanted = read(tmp_path / "0" / "step_000007")
    kept = {key: tensor for key, tensor in tensors(wanted).items() if not key.startswith("random")}
    moments = [key for key in kept if key.startswith("optimizer.state.exp_avg")]
    assert len(moments) > 60 and all(kept[key].any() for key in moments)
    for world, layouts in PASSED.items():
        seen = run_on_ranks(passed_on, world, tmp_path)[0]
        assert seen == [(Progress(7, 3, 3, 0.5), pytest.approx(6e-3))] * len(layouts)  # 3 of 5 updates of warm-up
        for i, layout in enumerate(layouts):
            assert not differing(kept, drop_random(read(tmp_path / f"{world}-{i}" / "step_000007"))), (world, layout)


def drop_random(state: dict[str, Any]) -> dict[str, Any]:
    """Random states belong to ranks."""
    return {key: value for key, value in state.items() if not key.startswith("random")}
