"""The rules as they are set by default, on runs that were recorded as docs/stability_watch.md says: the keys that rules read,
to five digits."""

from pathlib import Path
from statistics import fmean

import pytest

from moe_rl.drift.scoring import Collapse, Lines, outcomes, replay
from moe_rl.drift.watch_config import WatchSection
from moe_rl.tracking import read_steps

RECORDED = Path(__file__).parent / "recorded"
COLLAPSED = {"grpo_3e-4_s0": 27, "grpo_5e-4_s1": 19, "grpo_3e-4_s2": 22}
CALM = ("calm_gspo_s0", "calm_grpo_s2")


def recorded(name: str) -> Lines:
    return read_steps(RECORDED / f"{name}.jsonl")


@pytest.mark.parametrize("name", CALM)
def test_a_calm_run_raises_nothing(name: str) -> None:
    lines = recorded(name)
    assert Collapse().step(lines) is None
    assert lines[-1]["reward/mean"] > lines[0]["reward/mean"]
    assert replay(WatchSection(), lines) == []


@pytest.mark.parametrize(("name", "collapse"), COLLAPSED.items())
def test_alarms_come_before_the_reward_is_gone(name: str, collapse: int) -> None:
    lines = recorded(name)
    assert Collapse().step(lines) == collapse
    leads = {found.rule: found.lead or 0 for found in outcomes(WatchSection(), {name: lines})}
    assert leads["ratio_tail"] >= 6
    assert leads["expert_change_level"] >= 5
    assert leads["reward"] >= 1
    rewards = [line["reward/mean"] for line in lines]  # line i is step i + 1
    alarm = collapse - leads["ratio_tail"]
    assert fmean(rewards[alarm - 5 : alarm]) > 0.8 * fmean(rewards[:5]), "most of the reward is still there"
