"""How well the rules of the watch foretell collapse, on recorded runs: replays them over the lines of metrics.jsonl.

A run has collapsed at the first step from which on, until its end, the smoothed reward is below `share` of the best that it
ever was. Smoothed: the mean of the last `window` steps that have a reward, or of those so far, once there are `least`. A run
whose best is below `floor` had nothing to lose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from moe_rl.drift.watch import Alarm, Watch
from moe_rl.drift.watch_config import WatchSection
from moe_rl.drift.watch_rules import RULES

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Collapse:
    """What counts as one. horizon: steps before it in which an alarm foretells it; an earlier one is false."""

    window: int = 10
    least: int = 5
    share: float = 0.5
    floor: float = 0.1
    horizon: int = 50

    def step(self, lines: Lines) -> int | None:
        """The step at which the run collapsed, or None."""
        rewards = [(int(line["step"]), value) for line in lines if (value := line.get("reward/mean")) is not None]
        levels = [
            (rewards[end - 1][0], fmean(value for _, value in rewards[max(0, end - self.window) : end]))
            for end in range(self.least, len(rewards) + 1)
        ]
        best = max((level for _, level in levels), default=0.0)
        if best < self.floor:
            return None
        below = None
        for step, level in reversed(levels):
            if level >= self.share * best:
                break
            below = step
        return below


@dataclass(frozen=True)
class Outcome:
    """One rule on one run. lead: steps from the alarm to the collapse; negative: too late; None: missed, or none to foretell.

    The alarm is the first one within the horizon before the collapse, or after it. false: steps of the alarms before that
    stretch; in a run without collapse, of all. calm: steps of the run in which an alarm would be false.
    """

    run: str
    rule: str
    collapse: int | None
    lead: int | None
    false: tuple[int, ...]
    calm: int


@dataclass(frozen=True)
class Score:
    """One rule over all runs. hits, late, misses: collapsed runs with an alarm in time (lead >= 0), after, never.

    lead: median over hits and late ones, in steps. false: alarms without a collapse to come; false_rate: of those a 100 calm
    steps. false_runs: runs without collapse that have one.
    """

    rule: str
    hits: int
    late: int
    misses: int
    lead: float | None
    false: int
    false_rate: float | None
    false_runs: int


def replay(section: WatchSection, lines: Lines) -> list[Alarm]:
    """The alarms that a run would have raised under `section`: those it did raise, where the settings were the same."""
    watch = Watch(section)
    return [alarm for line in lines for alarm in watch.look(int(line["step"]), line)]


def outcomes(section: WatchSection, runs: Mapping[str, Lines], collapse: Collapse | None = None) -> list[Outcome]:
    """Every rule on every run, run by run. Rules that are off are left out."""
    collapse = collapse or Collapse()
    found = []
    for name, lines in runs.items():
        at, alarms = collapse.step(lines), replay(section, lines)
        steps = [int(line["step"]) for line in lines if line.get("reward/mean") is not None]
        begin = None if at is None else at - collapse.horizon  # from here on an alarm is about this collapse
        calm = sum(begin is None or step < begin for step in steps)
        for rule in watched(section):
            raised = [alarm.step for alarm in alarms if alarm.rule == rule]
            false = tuple(step for step in raised if begin is None or step < begin)
            about = raised[len(false) :]
            lead = at - about[0] if at is not None and about else None
            found.append(Outcome(name, rule, at, lead, false, calm))
    return found


def scores(found: Sequence[Outcome]) -> list[Score]:
    """Outcomes summed over runs, a rule a row, in the order of the rules."""
    rows = []
    for rule in dict.fromkeys(outcome.rule for outcome in found):
        ours = [outcome for outcome in found if outcome.rule == rule]
        collapsed = [outcome for outcome in ours if outcome.collapse is not None]
        leads = [outcome.lead for outcome in collapsed if outcome.lead is not None]
        hits, false, calm = sum(lead >= 0 for lead in leads), sum(len(o.false) for o in ours), sum(o.calm for o in ours)
        rows.append(
            Score(
                rule,
                hits=hits,
                late=len(leads) - hits,
                misses=len(collapsed) - len(leads),
                lead=median(leads) if leads else None,
                false=false,
                false_rate=100 * false / calm if calm else None,
                false_runs=sum(outcome.collapse is None and bool(outcome.false) for outcome in ours),
            )
        )
    return rows


def sweep(
    section: WatchSection,
    rule: str,
    thresholds: Sequence[float],
    runs: Mapping[str, Lines],
    collapse: Collapse | None = None,
) -> dict[float, Score]:
    """One rule's score at each threshold, everything else as in `section`. Raises ValueError at one that is out of range."""
    found = {}
    for threshold in thresholds:
        values = section.model_dump()
        values[rule] |= {"threshold": threshold, "action": "log"}
        tried = WatchSection.model_validate(values)
        found[threshold] = next(score for score in scores(outcomes(tried, runs, collapse)) if score.rule == rule)
    return found


def watched(section: WatchSection) -> list[str]:
    """The rules that are on."""
    return [name for name in RULES if section.enabled and getattr(section, name).action != "off"]


def table(rows: Sequence[Score]) -> str:
    """Scores as Markdown."""
    lines = [
        "| rule | hits | late | misses | median lead (steps) | false alarms | a 100 calm steps | calm runs with one |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lead = "-" if row.lead is None else f"{row.lead:g}"
        rate = "-" if row.false_rate is None else f"{row.false_rate:.2f}"
        cells = (row.rule, row.hits, row.late, row.misses, lead, row.false, rate, row.false_runs)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def lead_table(found: Sequence[Outcome]) -> str:
    """Outcomes as Markdown, rules by runs: the lead before a collapse (steps; `-`: missed), the number of false alarms."""
    runs = {outcome.run: outcome.collapse for outcome in found}
    heads = [f"{run} ({'calm' if at is None else f'collapse at {at}'})" for run, at in runs.items()]
    lines = [f"| rule | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for rule in dict.fromkeys(outcome.rule for outcome in found):
        cells = [_cell(outcome) for run in runs for outcome in found if (outcome.rule, outcome.run) == (rule, run)]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(outcome: Outcome) -> str:
    false = f"{len(outcome.false)} false" if outcome.false else ""
    if outcome.collapse is None:
        return false or "silent"
    lead = "-" if outcome.lead is None else str(outcome.lead)
    return f"{lead}, {false}" if false else lead
