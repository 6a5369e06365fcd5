"""Two starts of one run: the second is refused while the first lives; the first ends once another has its directory."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.runs import Runs

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]


def test_one_start_of_a_run_writes_in_its_directory(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    settings = [*runs.shared, "run.name=twice", "run.steps=500", "model.layers=2", "rollout.max_response_tokens=2"]
    command = [sys.executable, "-m", "moe_rl.cli", "train", str(runs.yaml), *settings]
    directory, pipes = tmp_path / "twice", {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first:
        while not (directory / "metrics.jsonl").exists():
            assert first.poll() is None
            time.sleep(0.05)
        # under other settings too, where the run that lives would be moved aside
        second = subprocess.run([*command, "optimizer.lr=1e-4"], **pipes, timeout=120)
        assert second.returncode == 2
        works = f"process {first.pid} on "
        assert (
            second.stderr.startswith(f"moe-rl: error: {directory}: {works}") and "works in it; end that first" in second.stderr
        )
        assert first.poll() is None and not (tmp_path / "twice.1").exists()

        owner = json.loads((directory / "owner.json").read_text())
        (directory / "owner.json").write_text(json.dumps(owner | {"host": "node7", "process": 1, "token": "another"}))
        _, words = first.communicate(timeout=60)
        assert first.returncode == 2
        assert words.splitlines()[-1].startswith(f"moe-rl: error: {directory}: process 1 on node7 has taken it over")
    steps = runs.steps("twice")
    assert 1 < len(steps) < 500
