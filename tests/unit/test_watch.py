"""The stability watch: every rule at the step worked out by hand, and what is common to them. Binary fractions, so that a value
on the threshold is on it."""

import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_rl import yaml_text
from moe_rl.config import DriftSection
from moe_rl.drift.watch import Alarm, Watch, alarm_metrics
from moe_rl.drift.watch_config import WatchSection
from moe_rl.drift.watch_rules import RULES, Line

ROOT = Path(__file__).parents[2]
CHANGE = "drift/update/expert_change_rate/mean/minibatch_{}"
LOCAL = "drift/update/local/expert_change_rate/mean/minibatch_{}"
NOISE = "drift/noise/expert_change_rate/mean"
LR = "optimizer/lr"


def section(rule: str = "reward", warmup: int = 2, quiet: int = 5, **settings: Any) -> WatchSection:
    return WatchSection.model_validate({"warmup": warmup, "quiet": quiet, rule: settings})


def silenced(watched: WatchSection) -> WatchSection:
    """Without the rule on the rate as it is, where that of its rise is under test."""
    return watched.model_copy(update={"expert_change_level": watched.expert_change_level.model_copy(update={"action": "off"})})


def lines(**columns: list[Any]) -> list[Line]:
    """A line a step from a list a key; `__` in a name stands for /."""
    return [
        dict(zip([name.replace("__", "/") for name in columns], row, strict=True))
        for row in zip(*columns.values(), strict=True)
    ]


def alarms(watched: WatchSection, rows: Sequence[Line]) -> list[Alarm]:
    watch = Watch(watched)
    return [alarm for step, row in enumerate(rows, start=1) for alarm in watch.look(step, row)]


def fired(watched: WatchSection, rows: Sequence[Line]) -> list[tuple[str, int, float]]:
    return [(alarm.rule, alarm.step, alarm.value) for alarm in alarms(watched, rows)]


def test_reward_falls_below_its_best() -> None:
    # levels from step 2: 0.5, 0.625, 0.6875, 0.6875, 0.5625, 0.4375: of the best 0.6875 at last 0.636...
    rows = lines(reward__mean=[0.25, 0.75, 0.875, 0.875, 0.25, 0.25, 0.375])
    assert fired(section(window=4, threshold=0.64), rows) == [("reward", 7, 0.4375 / 0.6875)]
    assert fired(section(window=4, threshold=0.63), rows) == []
    assert fired(section(window=4, threshold=0.64, floor=0.7), rows) == []


def test_reward_that_was_never_above_zero_is_nothing_to_lose() -> None:
    assert fired(section(window=2), lines(reward__mean=[0.0, 0.0, -1.0, -2.0])) == []


def test_reward_early_levels_count_from_the_end_of_the_warm_up() -> None:
    rows = lines(reward__mean=[1.0, 0.5, 0.5, 0.5, 0.0, 0.0])
    # warm-up of 3: levels 2/3 (step 3), 2.5/4 ... of at most 8 steps: 2/3, 0.625, 0.5, 2.5/6
    assert fired(section(warmup=3, window=8, threshold=0.75), rows) == [("reward", 6, pytest.approx(2.5 / 6 / (2 / 3)))]
    # warm-up of 1: the first step alone is the best, 1
    assert fired(section(warmup=1, window=8, threshold=0.75), rows)[0][:2] == ("reward", 3)


def test_signal_is_gone_while_the_reward_is_low() -> None:
    settings: dict[str, Any] = {"rule": "signal", "window": 3, "threshold": 0.125, "low_reward": 0.5}
    spread = [0.375, 0.0, 0.0, 0.0]  # means of three: 0.125 (not below), 0
    assert fired(section(**settings), lines(reward__mean=[0.25] * 4, reward__group_std=spread)) == [("signal", 4, 0.0)]
    assert fired(section(**settings), lines(reward__mean=[0.5] * 4, reward__group_std=spread)) == []
    # the mean over the window decides, not the last reward: (0 + 0 + 1) / 3 is low
    assert fired(section(**settings), lines(reward__mean=[0.0, 0.0, 0.0, 1.0], reward__group_std=spread)) == [
        ("signal", 4, 0.0)
    ]


@pytest.mark.parametrize(("mean", "fires"), [(1.125, False), (1.25, True), (0.875, False), (0.75, True)])
def test_ratio_mean_leaves_one(mean: float, fires: bool) -> None:
    rows = lines(ratio__mean=[1.0, mean])
    assert fired(section("ratio_mean", threshold=0.125), rows) == ([("ratio_mean", 2, 0.25)] if fires else [])


def test_ratio_tail_is_heavy_even_at_the_first_step() -> None:
    rows = lines(ratio__tail_fraction=[0.0625, 0.125])
    assert fired(section("ratio_tail", threshold=0.0625), rows) == [("ratio_tail", 2, 0.125)]
    assert fired(section("ratio_tail", threshold=0.05), rows) == [("ratio_tail", 1, 0.0625)]


def test_entropy_collapses_while_the_reward_is_low() -> None:
    settings: dict[str, Any] = {"rule": "entropy_low", "window": 2, "threshold": 0.25, "low_reward": 0.5}
    entropy = [1.0, 3.0, 0.5, 0.5, 0.25]  # start 2; levels 1.75, 0.5 (a quarter, not below), 0.375
    low = lines(entropy__mean=entropy, reward__mean=[0.25] * 5)
    assert fired(section(**settings), low) == [("entropy_low", 5, 0.1875)]
    assert fired(section(**settings), lines(entropy__mean=entropy, reward__mean=[0.5] * 5)) == []


def test_entropy_explodes() -> None:
    rows = lines(entropy__mean=[1.0, 3.0, 5.0, 4.0])  # start 2; levels 4 (twice, not above), 4.5
    assert fired(section("entropy_high", window=2, threshold=2.0), rows) == [("entropy_high", 4, 2.25)]


def test_gradient_norm_spikes_over_its_running_median() -> None:
    norms = [1.0, 2.0, 0.0, 3.0, 8.0, 12.0, 33.0]  # medians before: 2 (of 1 2 3; the 0 is left out), 3, 8
    rows = lines(optimizer__grad_norm_max=norms)
    assert fired(section("grad_norm", warmup=3, window=3, threshold=4.0), rows) == [("grad_norm", 7, 4.125)]
    assert fired(section("grad_norm", warmup=3, window=3, threshold=4.125), rows) == []
    assert fired(section("grad_norm", warmup=3, window=3, threshold=3.0), rows) == [("grad_norm", 5, 4.0)]
    # a window shorter than the warm-up: before step 7 the last two are 8 and 12, median 10
    assert fired(section("grad_norm", warmup=3, window=2, threshold=3.25), rows) == [("grad_norm", 7, 3.3)]


def test_expert_change_rises_over_its_early_level() -> None:
    rates = [5, 5, 5, 1, 3, 6, 7]
    rows: list[Line] = [{LR: lr, CHANGE.format(0): 0.0, CHANGE.format(10): rate / 64, CHANGE.format(9): 1.0}
                        for lr, rate in zip([0, 1, 2, 2, 2, 1, 1], rates, strict=True)]  # fmt: skip
    # the learning rate rises until step 3; early level (1 + 3) / 2; 6 is three times that, not above
    settings: dict[str, Any] = {"rule": "expert_change", "window": 1, "threshold": 3.0, "noise_multiple": 2.0}
    assert fired(silenced(section(**settings, floor=1 / 64)), rows) == [("expert_change", 7, 3.5)]
    assert fired(silenced(section(**settings, floor=2.5 / 64)), rows) == []
    noisy = [{**row, NOISE: 3.5 / 64} for row in rows]  # 7 is twice the noise, not above
    assert fired(silenced(section(**settings, floor=1 / 64)), noisy) == []
    noisy_once = [{**row, NOISE: 3.5 / 64} if step == 1 else row for step, row in enumerate(rows)]  # the last one counts
    assert fired(silenced(section(**settings, floor=1 / 64)), noisy_once) == []
    quieter = [{**row, NOISE: 3 / 64} for row in rows]
    assert fired(silenced(section(**settings, floor=1 / 64)), quieter) == [("expert_change", 7, 3.5)]


def test_expert_change_without_a_learning_rate_counts_from_the_first_step() -> None:
    rows: list[Line] = [{CHANGE.format(3): rate / 64} for rate in (1, 3, 9, 9, 1, 9)]
    # medians of the last 3: after 1 3 9 it is 3, after 3 9 9 it is 9, 4.5 times the early 2
    watched = section("expert_change", window=3, threshold=3.0, floor=1 / 64)
    assert fired(silenced(watched), rows) == [("expert_change", 4, 4.5)]


def test_expert_change_is_high_as_it_is() -> None:
    rows: list[Line] = [{LR: step, CHANGE.format(7): rate / 64} for step, rate in enumerate((9, 1, 4, 4, 5, 5))]
    # medians of three from the third step on: 4 (on the threshold), 4, 4, 5
    settings: dict[str, Any] = {"rule": "expert_change_level", "window": 3, "threshold": 4 / 64, "noise_multiple": 2.0}
    assert fired(section(**settings), rows) == [("expert_change_level", 6, 5 / 64)]
    assert fired(section(**settings), [{NOISE: 2.5 / 64, **rows[0]}, *rows[1:]]) == []
    local: list[Line] = [{CHANGE.format(7): 0.0, **{LOCAL.format(7): row[CHANGE.format(7)]}} for row in rows]
    assert fired(section(**settings), local) == [("expert_change_level", 6, 5 / 64)]


def test_expert_change_under_replay_is_that_of_the_natural_choice() -> None:
    rows: list[Line] = [{CHANGE.format(1): 0.0, LOCAL.format(0): 0.0, LOCAL.format(1): rate / 64} for rate in (1, 1, 4)]
    watched = silenced(section("expert_change", window=1, threshold=3.0, floor=1 / 64))
    assert fired(watched, rows) == [("expert_change", 3, 4.0)]
    assert fired(watched, [{**row, LOCAL.format(1): None} for row in rows]) == []


def test_load_entropy_falls() -> None:
    rows = lines(drift__load__load_entropy__mean=[1.0, 1.0, 0.5, 0.5])  # levels 0.75 (on the threshold), 0.5
    assert fired(section("load_entropy", window=2, threshold=0.75), rows) == [("load_entropy", 4, 0.5)]


def test_the_busiest_expert_takes_more() -> None:
    rows = lines(drift__load__max_violation__mean=[0.0, 2.0, 4.0, 4.0])  # loads 1 3 5 5 over the mean; start 2; levels 4, 5
    assert fired(section("max_violation", window=2, threshold=2.0), rows) == [("max_violation", 4, 2.5)]


@pytest.mark.parametrize(("start", "later", "value"), [(0.0, [2.0, 2.5], 2.5), (2.0, [4.0, 5.0], 2.5)])
def test_experts_die(start: float, later: list[float], value: float) -> None:
    rows = lines(drift__load__dead_experts__mean=[start, start, *later])
    assert fired(section("dead_experts", window=1, threshold=2.0), rows) == [("dead_experts", 4, value)]


def test_a_rule_fires_again_only_after_it_was_quiet() -> None:
    means = [1.5, 1.5, 1.0, 1.5, 1.0, None, 1.0, 1.5, 1.5]  # one quiet step is not enough; a step without value is none
    assert [step for _, step, _ in fired(section("ratio_mean", quiet=2), lines(ratio__mean=means))] == [1, 8]
    assert [step for _, step, _ in fired(section("ratio_mean", quiet=1), lines(ratio__mean=means))] == [1, 4, 8]


def test_an_alarm_says_what_was_seen_and_which_setting_it_passed() -> None:
    (alarm,) = alarms(section("ratio_mean", threshold=0.125, action="stop"), lines(ratio__mean=[1.25]))
    assert (alarm.rule, alarm.step, alarm.value, alarm.threshold, alarm.action) == ("ratio_mean", 1, 0.25, 0.125, "stop")
    assert alarm.text.startswith("step 1: ratio/mean of 1.250, which")
    assert alarm.text.endswith("(drift.watch.ratio_mean.threshold=0.125)")
    assert alarm_metrics([alarm]) == {"alarm/ratio_mean": 1.0}
    assert alarm_metrics([]) == {}


def test_rules_that_are_off_and_a_watch_that_is() -> None:
    rows = lines(ratio__mean=[2.0], ratio__tail_fraction=[0.5])
    assert [rule for rule, *_ in fired(section("ratio_mean", action="off"), rows)] == ["ratio_tail"]
    assert fired(WatchSection(enabled=False), rows) == []
    assert Watch(WatchSection(enabled=False)).state() == {}


def steady(**changed: float) -> dict[str, float | None]:
    """A step of a calm run, with every key that rules read."""
    names: dict[str, float | None] = {name.replace("__", "/"): value for name, value in changed.items()}
    return {
        "reward/mean": 0.4,
        "reward/group_std": 0.3,
        "ratio/mean": 1.0,
        "ratio/tail_fraction": 0.0,
        "entropy/mean": 0.5,
        "optimizer/grad_norm_max": 2.0,
        "optimizer/lr": 1e-4,
        CHANGE.format(0): 0.0,
        CHANGE.format(1): 0.01,
        NOISE: 0.0,
        "drift/load/load_entropy/mean": 0.8,
        "drift/load/max_violation/mean": 1.5,
        "drift/load/dead_experts/mean": 0.5,
    } | names


def wild(steps: int, seed: int) -> list[Line]:
    """Steps that give every rule cause now and then; some values are missing."""
    draw = random.Random(seed)
    rows: list[Line] = []
    for step in range(steps):
        far = draw.choice([1.0, 1.0, 1.0, 0.2, 6.0]) if step > 5 else 1.0
        row = {key: value * far * draw.uniform(0.8, 1.2) for key, value in steady().items() if value is not None}
        row["reward/mean"] = draw.choice([0.0, 0.0, 0.1, 0.6])
        row["ratio/tail_fraction"] = draw.choice([0.0, 0.2])
        row["reward/group_std"] = draw.choice([0.0, 0.01])
        rows.append({key: value for key, value in row.items() if draw.random() > 0.05})
    return rows


LOOSE = WatchSection.model_validate(
    {"warmup": 3, "quiet": 2}
    | {name: {"window": 2} for name in ("reward", "signal", "expert_change", "load_entropy", "max_violation", "dead_experts")}
    | {"entropy_low": {"window": 2, "threshold": 0.5}, "entropy_high": {"window": 1}, "grad_norm": {"threshold": 2.0}}
    | {"expert_change_level": {"window": 2, "threshold": 0.03}}
)


def test_a_restored_watch_raises_the_same_alarms_to_the_bit() -> None:
    rows = wild(80, seed=1)
    whole = alarms(LOOSE, rows)
    assert {alarm.rule for alarm in whole} == set(RULES)
    for cut in range(len(rows) + 1):
        before, found = Watch(LOOSE), []
        for step, row in enumerate(rows[:cut], start=1):
            found += before.look(step, row)
        saved = json.dumps(before.state(), allow_nan=False)
        after = Watch.restore(LOOSE, json.loads(saved))
        before.look(999, steady(ratio__mean=9.0))  # what was saved is no view of what goes on
        for step, row in enumerate(rows[cut:], start=cut + 1):
            found += after.look(step, row)
        assert found == whole, cut


def test_a_state_is_no_view_of_the_watch() -> None:
    watch = Watch(LOOSE)
    for step, row in enumerate(wild(20, seed=2), start=1):
        watch.look(step, row)
    state = watch.state()
    saved = json.dumps(state)
    watch.look(21, steady())
    Watch.restore(LOOSE, state).look(21, steady())
    assert json.dumps(state) == saved


def test_other_settings_after_a_restore() -> None:
    watch = Watch(section("entropy_high", window=4, threshold=3.0))
    for step, value in enumerate([1.0, 3.0, 4.0, 4.0], start=1):  # start 2
        watch.look(step, {"entropy/mean": value, "ratio/tail_fraction": 0.5})
    shorter = section("entropy_high", window=1, threshold=3.0, warmup=4)
    found = Watch.restore(shorter, watch.state()).look(5, {"entropy/mean": 8.0})
    assert [(alarm.rule, alarm.value) for alarm in found] == [("entropy_high", 4.0)]
    fresh = Watch.restore(section("ratio_tail"), {})
    assert [alarm.rule for alarm in fresh.look(6, {"ratio/tail_fraction": 0.5})] == ["ratio_tail"]


@pytest.mark.parametrize("nothing", ["missing", None, math.nan, math.inf])
def test_a_step_without_the_value_is_skipped(nothing: Any) -> None:
    """The alarms are those of the run without that step, rule by rule."""
    rows = wild(80, seed=1)
    whole = [(alarm.rule, alarm.value, alarm.step) for alarm in alarms(LOOSE, rows)]
    assert {rule for rule, *_ in whole} == set(RULES)
    gap: Line = {} if nothing == "missing" else dict.fromkeys(steady(), nothing)
    stretched = [row for old in rows for row in (old, gap)]  # step n becomes 2n - 1
    assert [(rule, value, 2 * step - 1) for rule, value, step in whole] == [
        (alarm.rule, alarm.value, alarm.step) for alarm in alarms(LOOSE, stretched)
    ]


@pytest.mark.parametrize("key", steady())
def test_one_missing_key_silences_none_but_the_rules_that_need_it(key: str) -> None:
    rows = [{name: value for name, value in row.items() if name != key} for row in wild(80, seed=1)]
    silent = {
        "reward/mean": {"reward", "signal", "entropy_low"},
        "reward/group_std": {"signal"},
        "ratio/mean": {"ratio_mean"},
        "ratio/tail_fraction": {"ratio_tail"},
        "entropy/mean": {"entropy_low", "entropy_high"},
        "optimizer/grad_norm_max": {"grad_norm"},
        "drift/load/load_entropy/mean": {"load_entropy"},
        "drift/load/max_violation/mean": {"max_violation"},
        "drift/load/dead_experts/mean": {"dead_experts"},
    }
    if key == CHANGE.format(1):  # the minibatch before it shows 0 throughout
        silent[key] = {"expert_change", "expert_change_level"}
    assert {rule for rule, *_ in fired(LOOSE, rows)} == set(RULES) - silent.get(key, set())


def test_a_constant_run_raises_nothing() -> None:
    assert fired(WatchSection(), [steady()] * 100) == []


def test_the_line_of_an_evaluation_alone_changes_nothing() -> None:
    watch = Watch(WatchSection())
    before = watch.state()
    assert watch.look(0, {"eval/pass_at_1": 0.5, "step": 0}) == []
    assert watch.state() == before


def test_a_run_that_answers_everything_from_the_start_raises_nothing() -> None:
    """All groups alike, no gradient but now and then, entropy near 0: that is success."""
    row = steady(reward__mean=1.0, reward__group_std=0.0, optimizer__grad_norm_max=0.0, entropy__mean=0.02)
    once = steady(reward__mean=0.99, reward__group_std=0.01, optimizer__grad_norm_max=0.5, entropy__mean=0.001)
    assert fired(WatchSection(), [once if step % 7 == 0 else row for step in range(100)]) == []


def test_a_run_that_answers_nothing_is_told_so_once() -> None:
    row = steady(reward__mean=0.0, reward__group_std=0.0, optimizer__grad_norm_max=0.0)
    assert fired(WatchSection(), [row] * 50) == [("signal", 10, 0.0)]


def test_the_rules_are_those_of_the_settings_and_of_the_guide() -> None:
    rules = [name for name in WatchSection.model_fields if name not in ("enabled", "warmup", "quiet")]
    assert list(RULES) == rules
    guide = (ROOT / "docs" / "stability_watch.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| ([\d.]+) \|$", guide, re.MULTILINE))
    assert rows == {name: f"{getattr(WatchSection(), name).threshold:g}" for name in rules}
    (example,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    watched = DriftSection.model_validate(yaml_text.parse(example, "guide")["drift"]).watch
    assert (watched.reward.threshold, watched.reward.action, watched.dead_experts.action) == (0.6, "stop", "off")
