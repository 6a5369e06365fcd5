"""What an evaluation leaves: names that nobody has, files that are whole or absent, and the table."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe_rl.config import RunConfig, load
from moe_rl.estimates import Estimate, Outcome, Tally
from moe_rl.evaluation_files import Evaluated, EvaluationFiles, figures, name_of, read_pass_at_1, table
from moe_rl.types import Problem, Response, Rollout
from parallel.errors import UsageError

STEP = Path("runs/one/checkpoints/step_000150")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text("run: {name: one}\nmodel: {preset: tiny_moe}\neval: {samples: 2, temperature: 0.7}\n")
    return lambda *overrides: load("one.yaml", overrides)


def answered(*passed: bool) -> tuple[list[Rollout], list[Outcome]]:
    """Two responses to each problem."""
    rollouts = [
        Rollout(
            i, Problem(f"p{i // 2}", f"{i // 2}+1=", str(i // 2 + 1)), [5], Response([6, 2], [0.0, 0.0], "stop"), f"r{i}", p
        )
        for i, p in enumerate(passed)
    ]
    return rollouts, [Outcome(float(p), p, 2, "eos") for p in passed]


def test_one_line_a_response_in_order(tmp_path: Path) -> None:
    with EvaluationFiles(tmp_path / "eval", "step_000001-sums") as output:
        output.add(*answered(True, False), 2)
        assert (tmp_path / "eval" / "step_000001-sums.jsonl.part").read_text().count("\n") == 2  # what is there is written
        rollouts, outcomes = answered(False, False, False, True)
        rollouts[3].text = "half a pair \ud800, é"
        output.add(rollouts[2:], outcomes[2:], 2)
        output.finish({"a": 1})
    lines = [json.loads(line) for line in output.responses.read_text().splitlines()]
    assert lines[0] == {
        "problem": "p0",
        "prompt": "0+1=",
        "answer": "1",
        "sample": 0,
        "response": "r0",
        "reward": 1.0,
        "passed": True,
        "tokens": 2,
        "stopped": "eos",
    }
    assert [(line["problem"], line["sample"], line["passed"]) for line in lines] == [
        ("p0", 0, True),
        ("p0", 1, False),
        ("p1", 0, False),
        ("p1", 1, True),
    ]
    assert "half a pair" in lines[3]["response"] and lines[3]["response"].endswith("é")
    assert json.loads(output.figures.read_text()) == {"a": 1}
    names = {path.name for path in (tmp_path / "eval").iterdir()}
    assert names == {"step_000001-sums.json", "step_000001-sums.jsonl"}


def test_nothing_is_written_over_and_a_broken_one_never_looks_whole(tmp_path: Path) -> None:
    def evaluate(fails: bool = False) -> str:
        with EvaluationFiles(tmp_path, "x") as output:
            output.add(*answered(True, True), 2)
            if fails:
                raise KeyboardInterrupt
            output.finish({})
        return output.name

    assert evaluate() == "x"
    with pytest.raises(KeyboardInterrupt):
        evaluate(fails=True)
    assert {path.name for path in tmp_path.iterdir()} == {"x.json", "x.jsonl", "x.2.jsonl.part"}
    first = (tmp_path / "x.jsonl").read_bytes()
    assert evaluate() == "x.3"  # the part of the broken one stays to be looked at
    assert (tmp_path / "x.jsonl").read_bytes() == first
    with EvaluationFiles(tmp_path, "x") as one, EvaluationFiles(tmp_path, "x") as other:  # two at the same time
        assert (one.name, other.name) == ("x.4", "x.5")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="run.dir and run.name: .*file cannot be written: File exists"):
        EvaluationFiles(tmp_path / "file", "x")


@pytest.mark.parametrize(
    ("weights", "overrides", "wanted"),
    [
        (STEP, [], "step_000150-addition"),
        (Path("runs/other/checkpoints/step_000150"), [], "other-step_000150-addition"),
        (STEP.parent / "warm_start" / STEP.name, [], "warm_start-step_000150-addition"),
        (Path("runs/other/checkpoints/warm_start/step_000150"), [], "other-warm_start-step_000150-addition"),
        (Path("models/OLMoE 1B"), ["task.name=my_task:build"], "OLMoE_1B-my_task_build"),
        (
            STEP,
            ["task.name=jsonl", "task.train_path=data/a.jsonl", "task.eval_path=data/gsm8k.test.jsonl"],
            "step_000150-gsm8k.test",
        ),
        (STEP, ["task.name=jsonl", "task.train_path=data/a.jsonl"], "step_000150-a"),
        (STEP, ["task.name=reasoning_gym:gcd"], "step_000150-reasoning_gym_gcd"),
    ],
)
def test_names(config: Any, weights: Path, overrides: list[str], wanted: str) -> None:
    assert name_of(weights, config(*overrides)) == wanted


def tally(*problems: tuple[bool, bool]) -> Tally:
    found = Tally(2, [2])
    for passed in problems:
        found.add([Outcome(float(p), p, 3 + p, "eos" if p else "length") for p in passed])
    return found


def test_figures_and_table(config: Any) -> None:
    estimates = tally((True, False), (False, False)).estimates()
    one: RunConfig = config()
    evaluated = Evaluated(STEP, 2, 5)
    written = figures(one, evaluated, estimates, 1.5)
    assert json.loads(json.dumps(written, allow_nan=False))["figures"]["pass_at_1"] == {"value": 0.25, "stderr": 0.25}
    assert written["settings"]["eval"]["samples"] == 2
    assert (written["weights"], written["problems"], written["heldout_problems"], written["samples"]) == (str(STEP), 2, 5, 2)
    text = table(one, evaluated, estimates)
    rows = {cells[0]: cells[1:] for line in text.splitlines() if len(cells := [c for c in line.strip().split("  ") if c]) > 1}
    assert text.startswith(f"weights: {STEP}\n2 of 5 held-out problems of addition, 2 responses each, temperature 0.7\n")
    assert [cell.strip() for cell in rows["pass@1"]] == ["0.2500", "+- 0.2500"]
    assert [cell.strip() for cell in rows["pass@2"]] == ["0.5000", "+- 0.5000"]
    assert [cell.strip() for cell in rows["response tokens, mean"]] == ["3.2", "+- 0.2"]
    assert [cell.strip() for cell in rows["response tokens, longest"]] == ["4"]
    assert [cell.strip() for cell in rows["share cut at 16 tokens"]] == ["0.7500", "+- 0.2500"]
    assert "n/a" not in text and "failed" not in text and text.isascii()
    assert max(map(len, text.splitlines())) <= 80


def test_of_one_problem_the_standard_error_is_not_available(config: Any) -> None:
    estimates = tally((True, False)).estimates()
    text = table(config("eval.temperature=0"), Evaluated(STEP, 1, 1), estimates)
    assert "1 of 1 held-out problems of addition, 2 responses each, greedy" in text
    assert "+-" not in text and text.count("n/a") == 7  # 6 means and the line that says why
    assert figures(config(), Evaluated(STEP, 1, 1), estimates, 0.0)["figures"]["pass_at_1"] == {"value": 0.5, "stderr": None}


def test_a_report_reads_what_is_whole(tmp_path: Path, config: Any) -> None:
    run = tmp_path / "runs" / "one"
    assert read_pass_at_1(run) == {}
    with EvaluationFiles(run / "eval", "good") as output:
        output.finish(figures(config(), Evaluated(STEP, 2, 5), tally((True, False), (False, False)).estimates(), 0.0))
    for name, text in {
        "list": "[]",
        "cut": '{"figures": {"pass_at_1"',
        "other": '{"figures": {}}',
        "word": '{"figures": {"pass_at_1": 3}}',
    }.items():
        (run / "eval" / f"{name}.json").write_text(text)
    assert read_pass_at_1(run) == {"good": Estimate(0.25, 0.25)}
