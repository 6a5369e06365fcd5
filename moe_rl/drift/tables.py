"""The tables of `moe-rl drift`, runs as columns side by side."""

from collections.abc import Callable, Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from moe_rl.drift import analysis, findings, hints
from moe_rl.drift.history import DriftKey, name
from moe_rl.drift.runs import Run
from moe_rl.summary import spread

_MOST_ROWS = 16
_MOST_COLUMNS = 6
RATE = "expert_change_rate"


def tables(runs: Sequence[Run], last: int) -> list[Group]:
    """Every table that some run has numbers for."""
    found: list[Group | None] = [_overview(runs, last)]
    there = {view for run in runs for view in run.history.views()}
    for view in [*(view for view in hints.MEANING if view in there), *sorted(there - set(hints.MEANING))]:
        if len(runs) == 1:
            found.append(_layers_by_minibatch(runs[0], *view, last))
        else:
            found += [_layers(runs, *view, last), _minibatches(runs, *view, last)]
    for which in (("engine", ""), ("update", ""), ("update", "prompt")):
        if not any(which in run.history.views() for run in runs):
            found.append(_trace_layers(runs, *which))
    found += [_margins(runs, last), _clipping(runs, last), _correlations(runs, last), _load(runs), _alarms(runs)]
    return [table for table in found if table is not None]


def _overview(runs: Sequence[Run], last: int) -> Group | None:
    rows: list[tuple[str, list[str]]] = []
    for view in (*hints.MEANING, ("load", "")):
        for metric in sorted({metric for run in runs for metric in run.history.metrics(*view)}):
            cells: list[str] = []
            for run in runs:
                worst = run.history.worst(*view, metric, last)
                cells.append(cell(run.history.over_layers(*view, metric, None, last)))
                cells.append("-" if worst is None else f"{worst[1]:.4f} ({worst[0]:02d})")
            if any(text != "-" for text in cells):
                rows.append((f"{name(*view)} {metric}", cells))
    columns = [heading for run in runs for heading in (_of(runs, run, "mean"), _of(runs, run, "worst (layer)"))]
    return _table(f"drift, over layers, mean of the last {last} steps", "", columns, rows)


def _layers_by_minibatch(run: Run, comparison: str, view: str, last: int) -> Group | None:
    history = run.history
    layers = history.layers(comparison, view, RATE)
    minibatches: list[int | None] = [None, *spread(history.minibatches(comparison, view, RATE), _MOST_COLUMNS)]

    def cells(value: Callable[[int | None], float | None]) -> list[str]:
        return [cell(value(minibatch)) for minibatch in minibatches]

    def at(layer: int) -> Callable[[int | None], float | None]:
        return lambda minibatch: history.at(DriftKey(comparison, view, RATE, "layer", layer, minibatch), last)

    rows = [(f"{layer:02d}", cells(at(layer))) for layer in spread(layers, _MOST_ROWS)]
    if layers:
        rows.append(("mean", cells(lambda minibatch: history.over_layers(comparison, view, RATE, minibatch, last))))
    columns = ["all" if minibatch is None else f"mb {minibatch}" for minibatch in minibatches]
    return _table(_title(comparison, view, "layer and minibatch", last), "layer", columns, rows) if _tells(rows) else None


def _layers(runs: Sequence[Run], comparison: str, view: str, last: int) -> Group | None:
    layers = sorted({layer for run in runs for layer in run.history.layers(comparison, view, RATE)})
    rows = []
    for layer in spread(layers, _MOST_ROWS):
        key = DriftKey(comparison, view, RATE, "layer", layer)
        rows.append((f"{layer:02d}", [cell(run.history.at(key, last)) for run in runs]))
    return _table(_title(comparison, view, "layer", last), "layer", [run.name for run in runs], rows) if _tells(rows) else None


def _minibatches(runs: Sequence[Run], comparison: str, view: str, last: int) -> Group | None:
    minibatches = sorted({m for run in runs for m in run.history.minibatches(comparison, view, RATE)})
    rows = []
    for minibatch in spread(minibatches, _MOST_ROWS):
        values = [run.history.over_layers(comparison, view, RATE, minibatch, last) for run in runs]
        rows.append((str(minibatch), [cell(value) for value in values]))
    title = _title(comparison, view, "minibatch, mean over layers", last)
    return _table(title, "minibatch", [run.name for run in runs], rows) if _tells(rows) else None


def _tells(rows: Sequence[tuple[str, list[str]]]) -> bool:
    """Whether a table would hold more than zeros, which the overview has said."""
    return any(text not in (cell(0.0), cell(None)) for _, cells in rows for text in cells)


def _trace_layers(runs: Sequence[Run], comparison: str, view: str) -> Group | None:
    totals = {run.name: run.traces.total((comparison, view)) if run.traces is not None else None for run in runs}
    layers = sorted({layer for run in runs if run.traces and run.traces.header for layer in run.traces.header.layers})
    rows = []
    for layer in spread(layers, _MOST_ROWS):
        cells: list[str] = []
        for run in runs:
            total = totals[run.name]
            header = run.traces.header if run.traces is not None else None
            if total is None or header is None or layer not in header.layers:
                cells += ["-", "-"]
                continue
            rates = total.rates()
            cells += [cell(rates[metric][header.layers.index(layer)]) for metric in (RATE, "flip_rate")]
        rows.append((f"{layer:02d}", cells))
    if not any(total is not None for total in totals.values()):
        return None
    columns = [heading for run in runs for heading in (_of(runs, run, "change rate"), _of(runs, run, "flip rate"))]
    return _table(
        f"{name(comparison, view)} by layer, from all traces: {hints.meaning(comparison, view)}", "layer", columns, rows
    )


def _margins(runs: Sequence[Run], last: int) -> Group | None:
    bins = {run.name: findings.margin_bins(run, last) for run in runs}
    rows = []
    for place in range(max(map(len, bins.values()))):
        cells: list[str] = []
        for run in runs:
            found = bins[run.name][place] if place < len(bins[run.name]) else None
            cells += ["-", "-"] if found is None else [cell(found.margin, ".2e"), cell(found.flip_rate)]
        rows.append((f"{place + 1}", cells))
    columns = [heading for run in runs for heading in (_of(runs, run, "margin"), _of(runs, run, "flip rate"))]
    return _table("flips against margin, quantile bins (1: nearest to a tie)", "bin", columns, rows)


def _clipping(runs: Sequence[Run], last: int) -> Group | None:
    rows = [(unit, [cell(v) for run in runs for v in findings.clip_fractions(run, unit, last)]) for unit in findings.UNITS]
    columns = [heading for run in runs for heading in (_of(runs, run, "steady"), _of(runs, run, "flipped"))]
    return _table("share that is clipped, of steady and of flipped ones", "by", columns, _present(rows))


def _correlations(runs: Sequence[Run], last: int) -> Group | None:
    rows = [(unit, [cell(v, ".3f") for run in runs for v in findings.correlations(run, unit, last)]) for unit in findings.UNITS]
    columns = [heading for run in runs for heading in (_of(runs, run, "overall"), _of(runs, run, "within an update"))]
    return _table("correlation of flips with |log r|", "by", columns, _present(rows))


def _load(runs: Sequence[Run]) -> Group | None:
    """Of runs that have no metrics: the others have drift/load in the overview of their keys."""
    rows: list[tuple[str, list[str]]] = []
    for run in runs:
        traces = run.traces
        if run.history.lines or traces is None or traces.load is None or traces.header is None:
            continue
        values = (analysis.load_entropy(traces.load), analysis.max_violation(traces.load), analysis.dead_experts(traces.load))
        for place in spread(list(range(len(traces.header.layers))), _MOST_ROWS):
            entropy, violation, dead = (float(value[place]) for value in values)
            label = _of(runs, run, f"{traces.header.layers[place]:02d}")
            rows.append((label, [cell(entropy, ".3f"), cell(violation, ".2f"), f"{dead:.0f}"]))
    columns = ["load entropy", "max violation", "dead experts"]
    return _table("load by layer, from all traces", "layer", columns, rows)


def _alarms(runs: Sequence[Run]) -> Group | None:
    fired = {run.name: run.history.alarms() for run in runs}
    rows = []
    for rule in sorted({rule for alarms in fired.values() for rule in alarms}):
        cells = []
        for run in runs:
            steps = fired[run.name].get(rule, [])
            cells.append(f"{len(steps)} (first: step {steps[0]})" if steps else "-")
        rows.append((rule, cells))
    return _table("alarms: steps in which a rule fired", "rule", [run.name for run in runs], rows)


def cell(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None or not np.isfinite(value) else f"{value:{form}}"


def _present(rows: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    return [(label, cells) for label, cells in rows if any(text != "-" for text in cells)]


def _of(runs: Sequence[Run], run: Run, heading: str) -> str:
    """A column's heading; with several runs the run's name above it."""
    return heading if len(runs) == 1 else f"{run.name}\n{heading}"


def _title(comparison: str, view: str, by: str, last: int) -> str:
    return f"{name(comparison, view)}: expert change rate by {by}, last {last} steps\n{hints.meaning(comparison, view)}"


def _table(title: str, corner: str, columns: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> Group | None:
    """The title stands above the table and is not folded into its width."""
    if not rows:
        return None
    table = Table(box=SIMPLE_HEAD)
    table.add_column(corner, no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", overflow="fold")
    for label, cells in rows:
        table.add_row(label, *cells, style="bold" if label == "mean" else None)
    return Group(Text(title, style="bold"), table)
