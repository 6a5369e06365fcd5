"""RUN/drift/*.csv: the numbers behind the tables, all layers and minibatches of them, for another program to read."""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from moe_rl.drift import findings
from moe_rl.drift.history import DriftKey
from moe_rl.drift.ratio_analysis import EDGES
from moe_rl.drift.runs import Run
from moe_rl.drift.trace_sums import TraceSums
from parallel.errors import UsageError

FOLDER = "drift"
Cell = str | int | float | None


def write(run: Run, last: int) -> list[Path]:
    """The files written. A part that the run does not hold has no file. Raises UsageError where they cannot be written."""
    parts: list[tuple[str, list[str], Iterable[Sequence[Cell]]]] = [
        ("layers", ["comparison", "view", "metric", "layer", "minibatch", "value"], _layers(run, last)),
        ("steps", ["step", "comparison", "view", "metric", "over_layers", "value"], _steps(run)),
        ("alarms", ["step", "rule"], ((step, rule) for rule, steps in run.history.alarms().items() for step in steps)),
        ("margins", ["bin", "margin", "pairs", "flip_rate"], _margins(run, last)),
        ("clipping", ["unit", "steady", "flipped"], _pairs(run, last, findings.clip_fractions)),
        ("correlations", ["unit", "overall", "within_update"], _pairs(run, last, findings.correlations)),
    ]
    if run.traces is not None:
        header = ["step", "update", "comparison", "view", "layer", "tokens", "expert_change_rate", "flip_rate", "jaccard"]
        parts.append(("trace_layers", header, _trace_layers(run.traces)))
        parts.append(("log_ratios", ["from", "to", "steady", "flipped"], _log_ratios(run.traces)))
        parts.append(("load", ["layer", "expert", "tokens"], _load(run.traces)))
    folder, written = run.path / FOLDER, []
    try:
        folder.mkdir(exist_ok=True)
        for name, header, rows in parts:
            path = folder / f"{name}.csv"
            if _write(path, header, rows):
                written.append(path)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror}") from error
    return written


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> bool:
    """False, and no file is left, where there is no row."""
    found = list(rows)
    if not found:
        path.unlink(missing_ok=True)  # of an earlier call
        return False
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(found)
    return True


def _layers(run: Run, last: int) -> Iterator[Sequence[Cell]]:
    """Means over the last steps; minibatch empty: all of a step."""
    for key in sorted(run.history.drift, key=_order):
        if key.layer is not None and (value := run.history.at(key, last)) is not None:
            yield key.comparison, key.view, key.metric, key.layer, key.minibatch, value


def _order(key: DriftKey) -> tuple[str, str, str, int, int]:
    return key.comparison, key.view, key.metric, key.layer or 0, -1 if key.minibatch is None else key.minibatch


def _steps(run: Run) -> Iterator[Sequence[Cell]]:
    """mean and worst over layers at every step, over all minibatches."""
    for key in sorted(run.history.drift, key=_order):
        if key.layer is not None or key.minibatch is not None:
            continue
        for step, value in zip(run.history.steps, run.history.series(run.history.drift[key]), strict=True):
            if value is not None:
                yield step, key.comparison, key.view, key.metric, key.place, value


def _margins(run: Run, last: int) -> Iterator[Sequence[Cell]]:
    for place, found in enumerate(findings.margin_bins(run, last)):
        yield place, found.margin, found.pairs, found.flip_rate


def _pairs(run: Run, last: int, of: Callable[[Run, str, int], tuple[float | None, float | None]]) -> Iterator[Sequence[Cell]]:
    for unit in findings.UNITS:
        values = of(run, unit, last)
        if any(value is not None for value in values):
            yield unit, *values


def _trace_layers(traces: TraceSums) -> Iterator[Sequence[Cell]]:
    layers = traces.header.layers if traces.header else ()
    for (comparison, view), parts in sorted(traces.drift.items()):
        for (step, update), sums in sorted(parts.items()):
            rates = sums.rates()
            for place, layer in enumerate(layers):
                if tokens := int(sums.tokens[place]):
                    values = [float(rates[name][place]) for name in ("expert_change_rate", "flip_rate", "jaccard")]
                    yield step, update, comparison, view, layer, tokens, *values


def _log_ratios(traces: TraceSums) -> Iterator[Sequence[Cell]]:
    if traces.log_ratios is None:
        return
    edges = [None, *EDGES.tolist(), None]  # the outermost bins are open
    steady, flipped = traces.log_ratios.tolist()
    yield from zip(edges[:-1], edges[1:], steady, flipped, strict=True)


def _load(traces: TraceSums) -> Iterator[Sequence[Cell]]:
    if traces.load is None or traces.header is None:
        return
    for layer, counts in zip(traces.header.layers, traces.load.tolist(), strict=True):
        yield from ((layer, expert, tokens) for expert, tokens in enumerate(counts))
