"""What came of each run of a grid, and of each of its cells: the same settings under several seeds. Numbers only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from moe_rl.drift import runs, scoring
from moe_rl.drift.history import History
from moe_rl.drift.watch_config import WatchSection
from moe_rl.tracking import read_summary
from parallel.errors import UsageError

RATE = "expert_change_rate"
SPAN = 10  # steps averaged at the start and at the end of a run
PEAK = 5  # steps averaged for the highest expert change rate

# Step 1 is sampled by the weights of the start, so its reward counts as a level: a run can lose all of it in its first update
COLLAPSE = scoring.Collapse(least=1)


class Settings(NamedTuple):
    """What the runs of a cell share."""

    method: str
    minibatches: int
    lr: float


@dataclass(frozen=True)
class Result:
    """One complete run. None: not recorded.

    before, after: held-out pass@1. reward_first, reward_last: mean of the first and of the last `SPAN` steps.
    change_peak: the expert change rate at the last minibatch, mean over layers, under replay of the natural choice (`local`):
    the highest mean of `PEAK` steps in a row before the collapse, for without reward there is no gradient and no drift.
    change_mean: of all steps. probe_change, router_shift: against the start, at the end. noise: the largest floor measured.
    collapse: the step (`scoring.Collapse`). alarms: rule -> the step in which it fired first, under the default thresholds.
    lines: of metrics.jsonl, without the keys of single layers, which no rule reads.
    """

    name: str
    path: Path
    settings: Settings
    seed: int
    steps: int
    before: float
    after: float
    reward_first: float | None
    reward_last: float | None
    change_peak: float | None
    change_mean: float | None
    probe_change: float | None
    router_shift: float | None
    noise: float | None
    collapse: int | None
    alarms: Mapping[str, int]
    lines: scoring.Lines

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def collapsed(self) -> bool:
        """Its reward collapsed, or it lost more than half of its pass@1."""
        return self.collapse is not None or self.after < self.before / 2

    @property
    def first_alarm(self) -> int | None:
        return min(self.alarms.values(), default=None)

    @property
    def lead(self) -> int | None:
        """Steps from the first alarm to the collapse; negative: too late."""
        return None if self.collapse is None or self.first_alarm is None else self.collapse - self.first_alarm


class Spread(NamedTuple):
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Cell:
    """The runs of one cell, in the order of their seeds."""

    settings: Settings
    results: tuple[Result, ...]

    def spread(self, field: str) -> Spread | None:
        """Over the seeds, of a field of Result; None where no run has it."""
        values = [value for result in self.results if (value := getattr(result, field)) is not None]
        return Spread(fmean(values), min(values), max(values)) if values else None

    @property
    def collapsed(self) -> int:
        return sum(result.collapsed for result in self.results)


def read(directory: Path) -> Result | str:
    """The result of a run, or in a few words why it has none."""
    if not directory.is_dir():
        return "not begun"
    try:
        (run,) = runs.load([directory])
    except UsageError as error:
        return str(error)
    summary, steps = read_summary(directory), run.setting("run.steps")
    if summary.get("step") != steps:
        return f"not finished: step {run.history.steps[-1] if run.history.steps else 0} of {steps}"
    before = run.history.lines[0].get("eval/pass_at_1") if run.history.lines else None
    after = summary.get("eval/pass_at_1")
    if before is None or after is None:
        return "has no evaluation before and after"
    replayed, name = run.setting("replay.mode"), run.setting("algorithm.name")
    method = name if replayed == "off" else f"{name}_{replayed}"
    lines = [{key: value for key, value in line.items() if "/layer_" not in key} for line in run.history.lines]
    change = _last_change(run.history)
    collapse = COLLAPSE.step(lines)
    alarms = scoring.replay(WatchSection(), lines)
    return Result(
        name=directory.name,
        path=directory,
        settings=Settings(method, int(run.setting("algorithm.minibatches")), float(run.setting("optimizer.lr"))),
        seed=int(run.setting("run.seed")),
        steps=int(steps),
        before=before,
        after=after,
        reward_first=_mean(_known(run.history, "reward/mean")[:SPAN]),
        reward_last=_mean(_known(run.history, "reward/mean")[-SPAN:]),
        change_peak=_peak([value for step, value in change if collapse is None or step < collapse]),
        change_mean=_mean([value for _, value in change]),
        probe_change=_last(_known(run.history, f"drift/probe/{RATE}/mean")),
        router_shift=_last(_known(run.history, "drift/probe/router_shift/mean")),
        noise=max(_known(run.history, f"drift/noise/{RATE}/mean"), default=None),
        collapse=collapse,
        alarms={alarm.rule: alarm.step for alarm in reversed(alarms)},  # the first one of a rule is written last, and stays
        lines=lines,
    )


def cells(results: Sequence[Result]) -> list[Cell]:
    """By method in the order they come in, then by minibatches and learning rate."""
    methods = list(dict.fromkeys(result.settings.method for result in results))
    grouped: dict[Settings, list[Result]] = {}
    for result in sorted(
        results, key=lambda r: (methods.index(r.settings.method), r.settings.minibatches, r.settings.lr, r.seed)
    ):
        grouped.setdefault(result.settings, []).append(result)
    return [Cell(settings, tuple(found)) for settings, found in grouped.items()]


@dataclass(frozen=True)
class Difference:
    """A cell less that of the base method, paired by seed. gains: after less after; changes: change_peak less change_peak."""

    settings: Settings
    gains: tuple[float, ...]
    changes: tuple[float, ...]


def differences(results: Sequence[Result], base: str = "grpo") -> list[Difference]:
    """Of every cell of another method of which a seed has a partner under `base`."""
    by_place = {(result.settings, result.seed): result for result in results}
    found = []
    for cell in cells(results):
        partners = [(r, by_place.get((cell.settings._replace(method=base), r.seed))) for r in cell.results]
        pairs = [(ours, theirs) for ours, theirs in partners if theirs is not None and cell.settings.method != base]
        if pairs:
            gains = tuple(ours.after - theirs.after for ours, theirs in pairs)
            changes = [(ours.change_peak, theirs.change_peak) for ours, theirs in pairs]
            both = tuple(a - b for a, b in changes if a is not None and b is not None)
            found.append(Difference(cell.settings, gains, both))
    return found


@dataclass(frozen=True)
class RuleScore:
    """A rule over all runs. false_lost: of the calm runs with an alarm, those whose pass@1 fell all the same.

    ahead: median steps from its alarm to that of the rule `reward`, over collapsed runs with both; negative: behind.
    """

    score: scoring.Score
    threshold: float
    false_lost: int
    ahead: float | None


def rule_scores(results: Sequence[Result]) -> list[RuleScore]:
    """Of the rules as they are set by default, over distinct runs.

    A run that lost its pass@1 but has no step of collapse is left out.
    """
    section = WatchSection()
    counted = {result.name: result for result in distinct(results) if result.collapse is not None or not result.collapsed}
    found = scoring.outcomes(section, {name: result.lines for name, result in counted.items()}, COLLAPSE)
    collapsed = [result.alarms for result in counted.values() if result.collapse is not None]
    rows = []
    for score in scoring.scores(found):
        lost = sum(
            outcome.rule == score.rule and outcome.collapse is None and bool(outcome.false) and counted[outcome.run].gain < 0
            for outcome in found
        )
        ahead = [alarms["reward"] - alarms[score.rule] for alarms in collapsed if {"reward", score.rule} <= set(alarms)]
        rows.append(RuleScore(score, getattr(section, score.rule).threshold, lost, median(ahead) if ahead else None))
    return rows


def distinct(results: Sequence[Result]) -> list[Result]:
    """Without runs that earned the rewards of an earlier one in every step: with one minibatch all methods are the same."""
    first: dict[tuple[Any, ...], Result] = {}
    for result in results:
        rewards = tuple(line.get("reward/mean") for line in result.lines)
        first.setdefault((*result.settings[1:], result.seed, result.after, rewards), result)
    return list(first.values())


def _last_change(history: History) -> list[tuple[int, float]]:
    """Step and expert change rate at the last minibatch, of the natural choice."""
    view = history.natural_view
    minibatches = history.minibatches("update", view, RATE)
    if not minibatches:
        return []
    series = history.series(f"drift/update/{f'{view}/' if view else ''}{RATE}/mean/minibatch_{minibatches[-1]}")
    return [(step, value) for step, value in zip(history.steps, series, strict=True) if value is not None]


def _peak(values: Sequence[float]) -> float | None:
    ends = range(min(PEAK, len(values)), len(values) + 1)
    return max((fmean(values[max(0, end - PEAK) : end]) for end in ends if end), default=None)


def _known(history: History, key: str) -> list[float]:
    return [value for value in history.series(key) if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None
