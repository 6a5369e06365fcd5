"""What an alarm asks for, through the real trainer: a line, an end from which the run goes on to the same end, replay."""

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


def test_an_alarm_stops_and_the_run_goes_on_from_there(runs: Runs) -> None:
    whole = steps(runs, "whole", "run.steps=3", "drift.watch.ratio_mean.action=off")
    stop = ["run.steps=3", "drift.watch.ratio_mean.action=stop"]
    assert len(steps(runs, "stop", *stop)) == 2 and saved(runs, "stop") == ["step_000001"]
    assert "stopped after step 1; the same command goes on from here" in said(runs, "stop")
    again = steps(runs, "stop", *stop)  # it has fired, and is not quiet yet
    assert without_alarms(again) == whole and again[1]["alarm/ratio_mean"] == 1
    assert not differing(runs.saved("stop", 3), runs.saved("whole", 3))


def test_traces_and_the_log_say_from_when_on_an_alarm_has_switched_replay_on(runs: Runs) -> None:
    lines = steps(runs, "on", "drift.watch.ratio_mean.action=replay", "drift.trace_every=1", "drift.probe_every=1")
    for key in ("replay/forced_gap", "replay/stale_fraction/age_1", "drift/update/free/expert_change_rate/mean"):
        assert [key in line for line in lines] == [False, False, True]
    assert said(runs, "on").count("replay.mode=r2 from step 2 on") == 1
    folder = runs.folder / "on" / "traces"
    first, second = (traces.read(folder / f"step_00000{i}.parquet") for i in (1, 2))
    assert [first.header.replay, second.header.replay] == ["off", "r2"]
    for trace, version in ((first, 0), (second, 2)):  # two updates a step
        assert set(trace.columns["policy_version"].tolist()) == {version}
        assert set(trace.columns["update"].tolist()) == {0, 1}
