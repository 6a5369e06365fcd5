"""The whole loop through the real trainer, in this process: repeatable, resumable, and still at learning rate 0."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_rl import config
from moe_rl.trainer import train
from parallel.errors import UsageError

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
TINY = [
    "parallel.expert=1",
    "model.layers=2",
    "model.hidden=32",
    "model.head_dim=8",
    "model.ffn=48",
    "model.moe_ffn=32",
    "sft.steps=0",
    "rollout.prompts=4",
    "rollout.responses=4",
    "rollout.max_response_tokens=6",
    "task.name=jsonl",
    "task.options={}",
    "task.eval_size=8",
    "task.scorer=tests.distributed.rewards:share_of_even",
    "eval.problems=8",
    "eval.every=0",
    "checkpoint.every=0",
    "optimizer.lr=1e-3",
    "optimizer.warmup_updates=0",
    "optimizer.schedule=constant",
    "optimizer.min_lr=0",
]
Train = Callable[..., list[dict[str, float]]]


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"prompt": f"{i}:", "answer": "even"}) + "\n" for i in range(64)))
    return [*TINY, f"task.train_path={problems}", f"run.dir={tmp_path}"]


@pytest.fixture
def run(tmp_path: Path, settings: list[str]) -> Train:
    def run(name: str, *overrides: str) -> list[dict[str, float]]:
        """Trains and returns the steps without their times."""
        train(config.load(ROOT / "configs" / "quickstart.yaml", [*settings, f"run.name={name}", *overrides]))
        return steps(tmp_path / name)

    return run


def steps(directory: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def saved(directory: Path, step: int) -> dict[str, Any]:
    """Every tensor of a checkpoint by name."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target = directory / f"{step}.pt"
    dcp_to_torch_save(directory / "checkpoints" / f"step_{step:06d}", target)
    return torch.load(target, weights_only=False)


def assert_same_state(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys() and len(a) > 20
    for key, value in a.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, b[key]), key


def test_two_runs_with_one_seed_are_alike_and_with_another_are_not(run: Train) -> None:
    first, second, other = run("a", "run.steps=2"), run("b", "run.steps=2"), run("c", "run.steps=2", "run.seed=1")
    assert first == second
    assert first != other


@pytest.mark.parametrize("kl", [False, True])
def test_a_continued_run_equals_one_that_was_not_stopped(run: Train, tmp_path: Path, kl: bool) -> None:
    extra = ["algorithm.name=grpo", "algorithm.kl_coefficient=0.1", "algorithm.kl_target=0.001", "algorithm.kl_horizon=50"]
    instruments = ["drift.probe_every=1", "drift.trace_every=1"]
    shared = ["checkpoint.every=2", *instruments, *(extra if kl else [])]
    whole = run("whole", "run.steps=4", *shared)
    run("parts", "run.steps=2", *shared)
    parts = run("parts", "run.steps=4", *shared)
    assert whole == parts
    assert_same_state(saved(tmp_path / "whole", 4), saved(tmp_path / "parts", 4))
    if kl:
        assert whole[1]["kl/ref"] < whole[-1]["kl/ref"]  # the reference stays where the run began
        assert whole[1]["kl/coefficient"] != whole[-1]["kl/coefficient"]


def test_a_run_whose_probe_set_is_gone_says_so_before_its_first_step(run: Train, tmp_path: Path) -> None:
    lines = run("lost", "run.steps=1", "drift.probe_every=5")
    (tmp_path / "lost" / "probe.npz").unlink()
    with pytest.raises(UsageError, match=r"lost/probe\.npz: is gone; drift\.probe_every=5 compares with it"):
        run("lost", "run.steps=2", "drift.probe_every=5")
    assert steps(tmp_path / "lost") == lines


def test_a_killed_run_continues_to_the_same_end(run: Train, tmp_path: Path, settings: list[str]) -> None:
    steps = ["run.steps=6", "checkpoint.every=2"]
    whole = run("whole", *steps)
    command = [sys.executable, "-m", "moe_rl.cli", "train", "configs/quickstart.yaml", *settings, "run.name=killed", *steps]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        first = tmp_path / "killed" / "checkpoints" / "step_000002"
        deadline = time.monotonic() + 120
        while not first.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    assert first.exists()
    assert run("killed", *steps) == whole


def test_learning_rate_zero_changes_nothing(run: Train, tmp_path: Path) -> None:
    lines = run("still", "optimizer.lr=0", "run.steps=3", "algorithm.epochs=2", "checkpoint.every=1", "checkpoint.keep=9")[1:]
    for line in lines:
        assert line["ratio/mean"] == line["ratio/max"] == 1
        still = ("expert_change_rate", "flip_rate", "router_kl", "gate_shift")
        drift = {
            k: v
            for k, v in line.items()
            if k.startswith("drift/update/") and k.split("/")[-2 if "minibatch" not in k else -3] in still
        }
        assert len(drift) > 2 * 4 * (1 + 8) and not any(drift.values())  # two layers, mean and worst; in sum and in 8 updates
        assert line["optimizer/grad_norm"] > 0
    first, last = saved(tmp_path / "still", 1), saved(tmp_path / "still", 3)
    weights = [key for key in first if not key.startswith(("optimizer", "random", "common"))]
    assert len(weights) > 20
    for key in weights:
        if isinstance(first[key], torch.Tensor):
            assert torch.equal(first[key], last[key]), key


def test_routing_drifts_from_the_second_minibatch_on(run: Train) -> None:
    """Case 31: at the first, old and new policy are the same weights in the same batch shape."""
    for line in run("drift", "run.steps=2", "optimizer.lr=3e-3")[1:]:
        assert line["drift/update/expert_change_rate/mean/minibatch_0"] == 0
        assert line["drift/update/expert_change_rate/mean/minibatch_3"] > 0
        assert line["drift/update/flip_rate/mean"] >= line["drift/update/expert_change_rate/mean"] > 0


def test_another_run_of_that_name_is_moved_aside(run: Train, tmp_path: Path) -> None:
    first = run("name", "run.steps=1")
    second = run("name", "run.steps=1", "run.seed=5")
    assert first != second
    assert steps(tmp_path / "name.1") == first


def test_a_model_without_a_router_trains_as_a_baseline(run: Train) -> None:
    """Nothing routes, so there is nothing to measure or to replay."""
    line = run("dense", "run.steps=1", "model.dense_layers=[0,1]", "replay.mode=r2", "drift.probe_every=1")[1]
    assert line["optimizer/grad_norm"] > 0
    assert not [key for key in line if key.startswith("drift/") and not key.endswith("any_layer_flip_rate")]
