"""When a recorded run collapsed, and how far ahead each rule said so: worked out by hand."""

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from moe_rl.drift.scoring import Collapse, Outcome, Score, lead_table, outcomes, replay, scores, sweep, table
from moe_rl.drift.watch_config import WatchSection
from moe_rl.drift.watch_rules import RULES

Lines = list[dict[str, Any]]
# ratio_mean alone, which needs no warm-up; quiet after one step
SECTION = WatchSection.model_validate(
    {"quiet": 1} | {name: {"action": "off"} for name in RULES if name not in ("ratio_mean", "ratio_tail")}
)


def run(rewards: Sequence[float | None], alarmed: Sequence[int] = ()) -> Lines:
    """A line a step from 1 on. alarmed: steps at which ratio/mean is far from 1."""
    return [
        {"step": step, "reward/mean": reward, "ratio/mean": 2.0 if step in alarmed else 1.0}
        for step, reward in enumerate(rewards, start=1)
    ]


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([0.8, 0.8, 0.8, 0.4, 0.2, 0.2], 5),  # levels of two 0.8 0.8 0.6 0.3 0.2: below 0.4 from the fifth step on
        ([0.8, 0.8, 0.0, 0.8, 0.0, 0.0], 6),  # 0.8 0.4 0.4 0.4 0: half is not below half
        ([0.8, 0.8, 0.0, 0.0, 0.8, 0.8], None),  # came back
        ([0.8, 0.8, 0.0, 0.0, 0.8, 0.0, 0.0], 7),  # came back, and fell again
        ([0.8, 0.8, None, 0.0, None, 0.0], 6),  # levels at the steps that have a reward: 0.8, 0.4, 0
        ([0.8, 0.8, 0.8], None),
        ([0.8, 0.0, 0.0], 3),  # the best is the first level, 0.4
        ([0.05, 0.05, 0.0, 0.0], None),  # never had anything
        ([], None),
        ([0.8], None),
    ],
)
def test_when_a_run_collapsed(rewards: list[float | None], step: int | None) -> None:
    lines = [{"step": 0, "eval/pass_at_1": 0.5}, *run(rewards)]
    assert Collapse(window=2, least=2).step(lines) == step


def test_early_levels_are_of_the_steps_so_far() -> None:
    # of at most 4, from the second on: 0.75, 0.75, 0.5625, 0.375 (half), 0.1875, 0: below half from step 6 on
    assert Collapse(window=4, least=2).step(run([0.75, 0.75, 0.75, 0.0, 0.0, 0.0, 0.0])) == 6


COLLAPSE = Collapse(window=2, least=2, horizon=3)
FALLS = [0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.0, 0.0, 0.0]  # levels: 0.4 at step 7, 0 at step 8: collapsed at 8


def outcome(lines: Lines) -> Outcome:
    return next(found for found in outcomes(SECTION, {"run": lines}, COLLAPSE) if found.rule == "ratio_mean")


@pytest.mark.parametrize(
    ("alarmed", "lead", "false"),
    [
        ([5], 3, ()),  # as far ahead as the horizon reaches
        ([4], None, (4,)),  # too far ahead to be about it
        ([2, 7], 1, (2,)),
        ([6, 8], 2, ()),  # the first one counts
        ([8], 0, ()),
        ([9], -1, ()),
        ([], None, ()),
        ([4, 5, 6], None, (4,)),  # one alarm that goes on: it was raised at 4
    ],
)
def test_lead_and_false_alarms_of_a_run_that_collapsed(alarmed: list[int], lead: int | None, false: tuple[int, ...]) -> None:
    # steps 1 to 4 are more than the horizon of 3 before step 8
    assert outcome(run(FALLS, alarmed)) == Outcome("run", "ratio_mean", 8, lead, false, calm=4)


def test_every_alarm_of_a_calm_run_is_false() -> None:
    lines = [{"step": 0, "eval/pass_at_1": 0.5}, *run([0.8] * 6, [2, 4, 5])]
    assert outcome(lines) == Outcome("run", "ratio_mean", None, None, (2, 4), calm=6)


def test_scores_over_runs() -> None:
    runs = {
        "three ahead": run(FALLS, [5]),
        "two ahead": run(FALLS, [1, 6]),
        "late": run(FALLS, [9]),
        "missed": run(FALLS, [4]),
        "calm": run([0.8] * 9, [2, 4]),
        "silent": run([0.8] * 5),
    }
    found = outcomes(SECTION, runs, COLLAPSE)
    mean, tail = scores(found)
    # leads 3, 2, -1; false: 1 and 1 in runs that collapse, 2 in the calm one, of 4 x 4 + 9 + 5 calm steps
    assert mean == Score("ratio_mean", 2, 1, 1, 2, 4, 100 * 4 / 30, 1)
    assert tail == Score("ratio_tail", 0, 0, 4, None, 0, 0.0, 0)
    assert table([mean, tail]).split("\n")[2:] == [
        "| ratio_mean | 2 | 1 | 1 | 2 | 4 | 13.33 | 1 |",
        "| ratio_tail | 0 | 0 | 4 | - | 0 | 0.00 | 0 |",
    ]
    assert lead_table(found).split("\n") == [
        "| rule | three ahead (collapse at 8) | two ahead (collapse at 8) | late (collapse at 8) | missed (collapse at 8) "
        "| calm (calm) | silent (calm) |",
        "|---|---|---|---|---|---|---|",
        "| ratio_mean | 3 | 2, 1 false | -1 | -, 1 false | 2 false | silent |",
        "| ratio_tail | - | - | - | - | silent | silent |",
    ]


def test_no_calm_step_gives_no_rate() -> None:
    (score, _) = scores(outcomes(SECTION, {"run": run(FALLS, [5])}, Collapse(window=2, least=2, horizon=8)))
    assert (score.hits, score.false_rate) == (1, None)
    assert table([score]).endswith("| ratio_mean | 1 | 0 | 0 | 3 | 0 | - | 0 |")


def test_thresholds_are_tried_without_training() -> None:
    lines = run(FALLS)
    for line, mean in zip(lines, [1.0, 1.25, 1.0, 1.0, 1.25, 1.5, 1.0, 2.0, 1.0], strict=True):
        line["ratio/mean"] = mean
    found = sweep(SECTION, "ratio_mean", [0.2, 0.3, 0.6, 1.5], {"run": lines}, COLLAPSE)
    assert {threshold: (score.hits, score.lead, score.false) for threshold, score in found.items()} == {
        0.2: (1, 3, 1),
        0.3: (1, 2, 0),
        0.6: (1, 0, 0),
        1.5: (0, None, 0),
    }
    assert list(sweep(SECTION, "reward", [0.5], {"run": lines}, COLLAPSE)) == [0.5]  # also one that is off
    with pytest.raises(ValidationError, match="less than 1"):
        sweep(SECTION, "reward", [1.5], {"run": lines}, COLLAPSE)


def test_the_replay_raises_what_the_run_did() -> None:
    alarms = replay(SECTION, [{"step": 0, "eval/pass_at_1": 0.5}, *run(FALLS, [2, 3, 6])])
    assert [(alarm.rule, alarm.step, alarm.value) for alarm in alarms] == [("ratio_mean", 2, 1.0), ("ratio_mean", 6, 1.0)]
