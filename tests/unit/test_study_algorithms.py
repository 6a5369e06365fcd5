"""The comparison of algorithms: which runs it makes, and its table, from runs as they are left."""

import importlib.util
import json
import sys
from pathlib import Path

from moe_rl.algorithms.table import ALGORITHMS
from moe_rl.study import algorithms

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_algorithms.py"


def run(path: Path, before: float, after: float, rewards: list[float], cpu: float) -> Path:
    path.mkdir()
    lines = [{"step": 0, "eval/pass_at_1": before}]
    lines += [{"step": i, "reward/mean": reward} for i, reward in enumerate(rewards, start=1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "summary.json").write_text(json.dumps({"step": len(rewards), "eval/pass_at_1": after}))
    (path / "costs.json").write_text(json.dumps({"cpu_seconds": cpu}))
    return path


def test_a_row_by_hand(tmp_path: Path) -> None:
    # Gains 0.2 and 0.4; CPU time 30 / 20 and 40 / 40. The best mean of five rewards is (0 + 0 + 0 + 1 + 1) / 5, then 0.5.
    directories = {
        ("grpo", 1e-4, 0): run(tmp_path / "a", 0.3, 0.4, [0.1] * 5, 20),
        ("grpo", 1e-4, 1): run(tmp_path / "b", 0.5, 0.6, [0.1] * 5, 40),
        ("ppo", 1e-4, 0): run(tmp_path / "c", 0.3, 0.5, [0, 0, 0, 1, 1, 0], 30),
        ("ppo", 1e-4, 1): run(tmp_path / "d", 0.5, 0.9, [0.5] * 5, 40),
    }
    lines = algorithms.table(directories).splitlines()
    assert lines[2] == "| grpo | 0.0001 | 2 | 0.400 | 0.500 | 0.400 - 0.600 | +0.100 | 0.100 | 1.00 |"
    assert lines[3] == "| ppo | 0.0001 | 2 | 0.400 | 0.700 | 0.500 - 0.900 | +0.300 | 0.450 | 1.25 |"
    assert {line.count("|") for line in lines} == {10}


def test_runs_that_did_not_end_are_left_out_and_counted(tmp_path: Path) -> None:
    directories = {
        ("ppo", 1e-4, 0): run(tmp_path / "c", 0.3, 0.5, [0.1] * 3, 30),
        ("ppo", 1e-4, 1): tmp_path / "nowhere",
        ("sapo", 1e-4, 0): tmp_path / "nowhere",
    }
    lines = algorithms.table(directories).splitlines()
    assert lines[2] == "| ppo | 0.0001 | 1 of 2 | 0.300 | 0.500 | 0.500 - 0.500 | +0.200 | 0.100 | - |"
    assert lines[3].startswith("| sapo | 0.0001 | 0 of 1 | -") and lines[3].count("|") == 10


def test_every_algorithm_is_compared_from_the_warm_start_of_its_seed() -> None:
    spec = importlib.util.spec_from_file_location("compare_algorithms", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["compare_algorithms"] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    runs = {method: script.Point(method, 5e-5, 1).settings() for method in script.METHODS}
    assert {found.algorithm.name for found in runs.values()} == set(ALGORITHMS)
    assert len({found.run.name for found in runs.values()}) == len(runs) > len(ALGORITHMS)
    for found in runs.values():
        assert (found.run.seed, found.optimizer.lr, found.sft.steps) == (1, 5e-5, 0)
        assert str(found.checkpoint.load) == "runs/algorithms/base-s1"
