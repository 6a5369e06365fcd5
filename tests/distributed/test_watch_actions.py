"""What an alarm asks for, through the real trainer: a checkpoint, an end that can be gone on from, replay from there on."""

from pathlib import Path
from typing import Any

import pytest

from moe_rl.drift import traces
from moe_rl.trainer import train
from tests.distributed.runs import Runs, differing

pytestmark = pytest.mark.distributed

# With the second of two minibatches ratios leave 1 in the first step
ALARM = ["drift.watch.ratio_mean.threshold=1e-12", "algorithm.minibatches=2"]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def steps(runs: Runs, name: str, *overrides: str) -> list[dict[str, Any]]:
    train(runs.config(name, *ALARM, *overrides))
    return runs.steps(name)


def saved(runs: Runs, name: str) -> list[str]:
    return sorted(path.name for path in (runs.folder / name / "checkpoints").glob("step_*"))


def said(runs: Runs, name: str) -> str:
    return (runs.folder / name / "log.txt").read_text(encoding="utf-8")


def without_alarms(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if not key.startswith("alarm/")} for line in lines]


def test_a_logged_alarm_is_a_line_and_a_metric(runs: Runs) -> None:
    lines = steps(runs, "log", "run.steps=3")
    assert [line.get("alarm/ratio_mean") for line in lines] == [None, 1, None, None]
    assert said(runs, "log").count("(drift.watch.ratio_mean.threshold=1e-12)") == 1
    assert saved(runs, "log") == ["step_000003"]


def test_an_alarm_saves(runs: Runs) -> None:
    steps(runs, "save", "run.steps=3", "drift.watch.ratio_mean.action=save")
    assert saved(runs, "save") == ["step_000001", "step_000003"]


def test_an_alarm_stops_and_the_run_goes_on_from_there(runs: Runs) -> None:
    whole = steps(runs, "whole", "run.steps=3", "drift.watch.ratio_mean.action=off")
    stop = ["run.steps=3", "drift.watch.ratio_mean.action=stop"]
    assert len(steps(runs, "stop", *stop)) == 2 and saved(runs, "stop") == ["step_000001"]
    assert "stopped after step 1; the same command goes on from here" in said(runs, "stop")
    again = steps(runs, "stop", *stop)  # it has fired, and is not quiet yet
    assert without_alarms(again) == whole and again[1]["alarm/ratio_mean"] == 1
    assert not differing(runs.saved("stop", 3), runs.saved("whole", 3))


def test_an_alarm_switches_replay_on_and_a_continued_run_keeps_it(runs: Runs) -> None:
    settings = ["drift.watch.ratio_mean.action=replay", "checkpoint.every=1", "drift.trace_every=1", "drift.probe_every=1"]
    whole = steps(runs, "whole", "run.steps=3", *settings)
    replayed = ["replay/forced_gap", "replay/stale_fraction/age_1", "drift/update/local/expert_change_rate/mean"]
    for key in replayed:
        assert [key in line for line in whole] == [False, False, True, True]
    assert whole[1]["drift/update/expert_change_rate/worst"] > 0
    assert whole[2]["drift/update/expert_change_rate/worst"] == whole[3]["drift/update/expert_change_rate/worst"] == 0
    assert said(runs, "whole").count("replay.mode=r2 from step 2 on") == 1
    folder = runs.folder / "whole" / "traces"
    assert [traces.read(folder / f"step_00000{i}.parquet").header.replay for i in (1, 2, 3)] == ["off", "r2", "r2"]
    steps(runs, "parts", "run.steps=1", *settings)
    assert steps(runs, "parts", "run.steps=3", *settings) == whole
    assert not differing(runs.saved("parts", 3), runs.saved("whole", 3))
