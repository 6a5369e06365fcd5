"""A run directory as the instruments read it: settings, metrics, traces. No torch, no weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_rl import yaml_text
from moe_rl.drift import megatron_trace, traces
from moe_rl.drift.history import History
from moe_rl.drift.trace_sums import TraceSums
from moe_rl.tracking import FILES, read_steps, read_summary
from parallel.errors import UsageError


@dataclass(frozen=True)
class Run:
    """name: unique among the runs read together. notes: what was skipped. traces: None where there is no complete file.

    router_trace: the traces are Megatron-Core's own, which pair nothing. trace_bytes: on disk.
    """

    name: str
    path: Path
    settings: dict[str, Any]
    history: History
    traces: TraceSums | None
    router_trace: bool = False
    trace_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def setting(self, dotted: str) -> Any:
        """A value of config.yaml; None where it is not known."""
        value: Any = self.settings
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def load(paths: Sequence[Path]) -> list[Run]:
    """Raises UsageError, one line, for a path that is no run or whose metrics cannot be read."""
    for place, path in enumerate(paths):
        if path.resolve() in [earlier.resolve() for earlier in paths[:place]]:
            raise UsageError(f"{path}: given twice")
    names = [path.resolve().name for path in paths]
    unique = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    return [_load(path, name) for path, name in zip(paths, unique, strict=True)]


def _load(path: Path, name: str) -> Run:
    if not path.exists():
        raise UsageError(f"{path}: no such run{_near(path)}")
    if not path.is_dir():
        raise UsageError(f"{path}: is a file; give the run directory that holds {FILES['train']}")
    notes: list[str] = []
    lines = _with_summary(path, _lines(path / FILES["train"]))
    own, routers = traces.files(path), megatron_trace.files(path)
    if not lines and not own and not routers:
        wanted = f"{FILES['train']} with a step, {traces.FOLDER}/{traces.PATTERN} or {megatron_trace.PATTERN}"
        raise UsageError(f"{path}: an empty run; it holds none of {wanted}")
    sums = TraceSums.collect(traces.read_run(path, notes.append) if own else _router_traces(routers, notes))
    if not lines and not sums.files:
        raise UsageError(notes[0])
    size = sum(file.stat().st_size for file in own or routers)
    complete = sums if sums.files else None
    return Run(name, path, _settings(path), History(lines), complete, not own and bool(routers), size, notes)


def _with_summary(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The evaluation after the last step is in a file of its own: beside that step's metrics it closes the curve."""
    after = read_summary(path)
    if not lines or after.get("step") != lines[-1]["step"]:
        return lines
    return [*lines[:-1], lines[-1] | {key: value for key, value in after.items() if isinstance(value, int | float)}]


def _near(path: Path) -> str:
    """Runs that are beside the one that is missing."""
    folder = path.parent
    beside = sorted(p.parent.name for p in folder.glob(f"*/{FILES['train']}")) if folder.is_dir() else []
    return f"; {folder} holds {', '.join(beside[:8])}" if beside else ""


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        lines = read_steps(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        for key, value in line.items():
            if not (value is None or isinstance(value, int | float)):
                raise UsageError(f"{path}:{number}: {key} is {str(value)[:40]!r}: must be a number or null")
    # another program may write NaN and Infinity, which are JSON to Python and to no browser
    return [
        {key: value if value is not None and math.isfinite(value) else None for key, value in line.items()} for line in lines
    ]


def _settings(path: Path) -> dict[str, Any]:
    """config.yaml; nothing where there is none."""
    file = path / "config.yaml"
    if not file.exists():
        return {}
    try:
        found = yaml_text.parse(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file}: holds no settings of a run")
    return found


def _router_traces(files: Sequence[Path], notes: list[str]) -> list[traces.Trace]:
    """Ranks whose layers and topk are those of the first one; E is the largest that any of them saw."""
    found: list[traces.Trace] = []
    for file in files:
        try:
            trace = megatron_trace.read(file, notes.append)
        except traces.TraceError as error:
            notes.append(str(error))
            continue
        shape = (trace.header.layers, trace.header.topk)
        if found and shape != (found[0].header.layers, found[0].header.topk):
            notes.append(f"{file}: of other layers or topk than {files[0].name}; look at one pipeline stage at a time")
            continue
        found.append(trace)
    experts = max((trace.header.experts for trace in found), default=0)
    return [replace(trace, header=replace(trace.header, experts=experts)) for trace in found]
