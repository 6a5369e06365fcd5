"""The study in the terminal: at most 80 columns."""

from collections.abc import Sequence
from decimal import Decimal
from statistics import fmean, median

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from moe_rl.study.results import PEAK, Cell, Difference, Result, RuleScore, Spread, distinct


def tables(cells: Sequence[Cell], differences: Sequence[Difference], rules: Sequence[RuleScore]) -> list[Group]:
    methods = list(dict.fromkeys(cell.settings.method for cell in cells))
    found = [_cells(method, [cell for cell in cells if cell.settings.method == method]) for method in methods]
    found += [_differences(method, [d for d in differences if d.settings.method == method]) for method in methods]
    return [table for table in [*found, _rules(rules)] if table is not None]


def _cells(method: str, cells: Sequence[Cell]) -> Group:
    rows = []
    for cell in cells:
        after = cell.spread("after")
        rows.append(
            [
                str(cell.settings.minibatches),
                lr(cell.settings.lr),
                number(cell.spread("before"), 3),
                number(after, 3),
                span(after, 3),
                number(cell.spread("change_peak"), 4),
                number(cell.spread("probe_change"), 3),
                number(cell.spread("router_shift"), 3),
                f"{cell.collapsed}/{len(cell.results)}",
                lead(cell),
            ]
        )
    heads = ["mb", "lr", "before", "after", "range", "change", "probe", "router", "collapsed", "lead"]
    title = (
        f"{method}: means over seeds. before, after, range: held-out pass@1\n"
        f"change: expert change rate at the last minibatch, highest {PEAK} steps in a row\n"
        "probe, router: change of experts and of router weights since the start\n"
        "lead: steps from the first alarm to the collapse, median"
    )
    return _table(title, heads, rows)


def _differences(method: str, differences: Sequence[Difference]) -> Group | None:
    if not differences:
        return None
    rows = []
    for found in differences:
        gains = found.gains
        sides = " / ".join(str(sum(map(side, gains))) for side in (_better, _equal, _worse))
        rows.append(
            [
                str(found.settings.minibatches),
                lr(found.settings.lr),
                f"{fmean(gains):+.3f}",
                f"{min(gains):+.3f} to {max(gains):+.3f}",
                sides,
                f"{fmean(found.changes):+.4f}" if found.changes else "-",
            ]
        )
    heads = ["mb", "lr", "pass@1", "range", "better / equal / worse", "change rate"]
    return _table(f"{method} less grpo, paired by seed: pass@1 after, change rate", heads, rows)


def _rules(rules: Sequence[RuleScore]) -> Group | None:
    rows = []
    for rule in rules:
        score = rule.score
        lead, rate = steps(score.lead), score.false_rate
        counts = [score.hits, score.late, score.misses, lead, score.false, "-" if rate is None else f"{rate:.2f}"]
        rows.append([score.rule, *map(str, [*counts, score.false_runs, rule.false_lost, steps(rule.ahead)])])
    heads = ["rule", "hits", "late", "miss", "lead", "false", "a 100", "runs", "fell", "ahead"]
    title = (
        "rules of the watch at their defaults, over distinct runs. lead: median, steps\n"
        "false: alarms in runs that did not collapse; a 100 of their steps\n"
        "runs: of those that did not collapse, with an alarm; fell: of these, pass@1 fell\n"
        "ahead: median steps before the rule reward, in collapsed runs with both"
    )
    return _table(title, heads, rows) if rows else None


def summary(results: Sequence[Result]) -> str:
    """How many there are, and how many of them collapsed, and when."""
    collapsed = [result for result in results if result.collapsed]
    steps = [result.collapse for result in collapsed if result.collapse is not None]
    same = len(results) - len(distinct(results))
    twice = f" ({same} the same as another)" if same else ""
    text = f"{len(results)} complete runs{twice}, {len(collapsed)} of them collapsed"
    return f"{text} (median step {median(steps):g}, from {min(steps)} to {max(steps)})" if steps else text


def lead(cell: Cell) -> str:
    """The median over the seeds that collapsed with an alarm."""
    leads = [result.lead for result in cell.results if result.lead is not None]
    return steps(median(leads) if leads else None)


def steps(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def lr(value: float) -> str:
    """5e-5: as it is written in a configuration, without zeros."""
    return f"{Decimal(repr(value)).normalize():e}"


def number(spread: Spread | None, digits: int) -> str:
    return "-" if spread is None else f"{spread.mean:.{digits}f}"


def span(spread: Spread | None, digits: int) -> str:
    return "-" if spread is None else f"{spread.low:.{digits}f}-{spread.high:.{digits}f}"


def _better(gain: float) -> bool:
    return gain > 0


def _equal(gain: float) -> bool:
    return gain == 0


def _worse(gain: float) -> bool:
    return gain < 0


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Group:
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place == 0 and head == "rule" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return Group(Text(title, style="bold"), table)
