"""results.csv, cells.csv and rules.csv: the numbers of a study for another program. Empty: not known."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from moe_rl.drift.watch_rules import RULES
from moe_rl.study.results import Cell, Result, RuleScore

# fields of Result that are averaged over the seeds of a cell
FIELDS = (
    "before",
    "after",
    "gain",
    "change_peak",
    "change_mean",
    "probe_change",
    "router_shift",
    "reward_first",
    "reward_last",
)
_SETTINGS = ("method", "minibatches", "lr")
Value = str | int | float | None


def write(root: Path, results: Sequence[Result], cells: Sequence[Cell], rules: Sequence[RuleScore]) -> list[Path]:
    """One row a run, a cell, a rule. Returns the files."""
    own = ("seed", "steps", *FIELDS, "noise", "collapsed", "collapse", "first_alarm", "lead")
    runs = [
        [result.name, *result.settings, *(_plain(getattr(result, field)) for field in own), *map(result.alarms.get, RULES)]
        for result in results
    ]
    heads = ["run", *_SETTINGS, *own, *(f"alarm_{rule}" for rule in RULES)]
    spreads = [f"{field}_{part}" for field in FIELDS for part in ("mean", "low", "high")]
    return [
        _write(root / "results.csv", heads, runs),
        _write(root / "cells.csv", [*_SETTINGS, "seeds", "collapsed", *spreads, "lead_median"], map(_cell, cells)),
        _write(
            root / "rules.csv",
            [
                "rule",
                "threshold",
                "hits",
                "late",
                "misses",
                "lead_median",
                "false",
                "false_rate",
                "false_runs",
                "false_lost",
                "ahead_median",
            ],
            map(_rule, rules),
        ),
    ]


def _cell(cell: Cell) -> list[Value]:
    spreads = [part for field in FIELDS for part in (cell.spread(field) or (None, None, None))]
    leads = [result.lead for result in cell.results if result.lead is not None]
    return [*cell.settings, len(cell.results), cell.collapsed, *spreads, median(leads) if leads else None]


def _rule(rule: RuleScore) -> list[Value]:
    score = rule.score
    counts = (score.hits, score.late, score.misses, score.lead, score.false, score.false_rate, score.false_runs)
    return [score.rule, rule.threshold, *counts, rule.false_lost, rule.ahead]


def _plain(value: Value) -> Value:
    return int(value) if isinstance(value, bool) else value


def _write(path: Path, heads: Sequence[str], rows: Iterable[Sequence[Value]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(heads)
        writer.writerows(rows)
    return path
