"""`moe-rl drift RUN [RUN ...]`: how routing moved, from metrics.jsonl and trace files. No GPU, no weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from moe_rl.drift import csv_files, hints
from moe_rl.drift.history import name
from moe_rl.drift.runs import Run, load
from moe_rl.drift.tables import tables
from moe_rl.summary import as_text

_LABEL = 36  # columns that the first column of a table takes at most
_RUN = 26  # columns of a run beside it


def drift(paths: Sequence[Path], last: int, console: Console | None = None) -> int:
    """Prints the tables and writes RUN/drift/*.csv. last: steps that are averaged. Raises UsageError for what is no run."""
    console = console or Console(highlight=False)
    runs = load(paths)
    lines = [line for run in runs for line in heading(run)]
    parts = [*lines, *tables(runs, last), *(line for run in runs for line in missing(run))]
    width = max(80, _LABEL + _RUN * len(runs))
    for part in parts:
        if console.is_terminal:
            console.print(part)
        else:
            print(part if isinstance(part, str) else "\n" + as_text(part, width) + "\n", file=console.file)
    for run in runs:
        written = csv_files.write(run, last)
        folder = run.path / csv_files.FOLDER
        if written:
            print(f"written: {folder}/{{{','.join(path.stem for path in written)}}}.csv", file=console.file)
    return 0


def heading(run: Run) -> Iterator[str]:
    """What the run is and what is at hand of it."""
    traces, header = run.traces, run.traces.header if run.traces is not None else None
    about = [str(run.path)]
    if algorithm := run.setting("algorithm.name") or (header.algorithm if header else None):
        about.append(algorithm)
    if replay := run.setting("replay.mode") or (header.replay if header else None):
        about.append(f"replay {replay}")
    if header:
        about.append(f"{len(header.layers)} MoE layers, {header.topk} of {header.experts} experts")
    if run.history.lines:
        about.append(f"{len(run.history.lines)} steps of metrics")
    yield ", ".join(about)
    if traces is not None:
        kind = "Megatron-Core router traces" if run.router_trace else "traces"
        size = f"{run.trace_bytes / 2**20:.1f} MiB, {run.trace_bytes / max(1, traces.tokens):,.0f} bytes a token"
        span = f"steps {traces.steps[0]} to {traces.steps[-1]}" if traces.steps else "no step"
        yield f"  {kind}: {traces.files} file{'s' * (traces.files != 1)}, {span}, {traces.tokens:,} tokens, {size}"
        if run.router_trace:
            yield "  they hold one pass and pair nothing: load is all they can tell"
        elif header and header.replay not in ("off", ""):
            yield f"  replay {header.replay}: new routes in the traces are the routers' own choice (local), not the forced one"
    for note in run.notes:
        yield f"  skipped {note}"


def missing(run: Run) -> Iterator[str]:
    """One line: what the run does not hold, and the settings that record it. None where nothing is missing."""
    if run.setting("model.experts") == 0:
        yield f"{run.name} has a dense model: no layer routes, so there is no drift to show"
        return
    by_setting: dict[str, list[str]] = {}
    if not run.history.lines:
        by_setting["`moe-rl train` writes metrics.jsonl"] = ["drift over the steps", "alarms"]
    else:
        there = run.history.views()
        replayed = run.setting("replay.mode") not in (None, "off")
        for (comparison, view), setting in hints.VIEWS.items():
            if (comparison, view) not in there and (replayed or view not in ("local", "free")):
                by_setting.setdefault(setting, []).append(name(comparison, view))
    if run.traces is None:
        by_setting[hints.TRACES] = ["traces (log-ratios by flip, load by expert)"]
    elif run.traces.margins is None and not run.router_trace:
        by_setting[hints.SCORES] = ["margins in the traces"]
    if by_setting:
        parts = [f"{', '.join(what)}: {setting}" for setting, what in by_setting.items()]
        yield f"{run.name} lacks {'; '.join(parts)}"
