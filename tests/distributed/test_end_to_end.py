"""The command that a user types, at a small size: warm start, RL with two processes that share experts, table, files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = [
    "sft.steps=4",
    "sft.stop_at=null",
    "sft.batch=16",
    "run.steps=2",
    "rollout.prompts=4",
    "rollout.responses=4",
    "eval.problems=16",
    "eval.every=1",
    "task.train_size=64",
    "task.eval_size=32",
    "task.options={partial_credit: true}",  # so that an untrained model's rewards differ
    "checkpoint.every=1",
    "tracking.rollouts_every=1",
]


def moe_rl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moe_rl.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.distributed
@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_quickstart_small(tmp_path: Path, algorithm: str) -> None:
    quickstart = ["configs/quickstart.yaml", f"run.dir={tmp_path}", f"algorithm.name={algorithm}", *SMALL]
    done = moe_rl("train", *quickstart)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "quickstart"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert len((run / "sft.jsonl").read_text().splitlines()) == 4
    for line in steps[1:]:
        first = [key for key in line if key.startswith("drift/update/") and key.endswith("/minibatch_0")]
        assert len(first) == 2 * (4 + 2)  # two rates, four layers, their mean and the worst
        assert all(line[key] == 0 for key in first), "old and new policy are the same weights there"
        assert line["ratio/max"] >= 1
        assert line["rollout/logprob_gap_max"] < 1e-4
        assert 0 <= line["reward/mean"] <= 1
    assert "held-out pass@1" in done.stdout
    assert str(run) in done.stdout
    assert (run / "checkpoints" / "step_000002" / "metadata.json").exists()
    responses = [json.loads(line) for line in (run / "rollouts" / "step_000002.jsonl").read_text().splitlines()]
    assert [r["index"] for r in responses] == list(range(16))
    assert sum(r["reward"] for r in responses) / 16 == pytest.approx(steps[2]["reward/mean"])

    again = moe_rl("train", *quickstart)  # finished: says so and changes nothing
    assert again.returncode == 0, again.stderr
    assert [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] == steps

    evaluated = moe_rl(
        "eval", *quickstart, f"checkpoint.load={run}", "parallel.expert=1", "eval.samples=2", "eval.temperature=1"
    )
    assert evaluated.returncode == 0, evaluated.stderr
    assert "pass@2" in evaluated.stdout
    figures, *others = (run / "eval").glob("*.json")
    assert (figures.name, others) == ("step_000002-reversal.json", [])
