"""The commands `moe-rl import` and `moe-rl export`."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from models.convert.importing import Converted, Progress
from moe_rl import checkpoint_paths

_SECONDS = 10  # between lines, where there is no terminal


def import_command(source: Path, target: Path) -> int:
    """Writes the checkpoint `target`. Raises UsageError for anything that is wrong with either."""
    from models.convert.importing import import_directory

    with _shown("import") as progress:
        done = import_directory(source, target, progress)
    _print(f"{_count(done)} from {source} in {target}, each compared with its file")
    if done.dropped:
        _print(f"{len(done.dropped)} tensors were not converted: {done.dropped[0]} and what is like it")
    return 0


def export_command(source: Path, target: Path, like: Path | None, dtype: str | None, shard_gb: int) -> int:
    """Writes the directory `target`. Raises UsageError for anything that is wrong with either."""
    import torch

    from models.convert.exporting import export_directory

    checkpoint = checkpoint_paths.find(source, "CKPT")
    kind = getattr(torch, dtype) if dtype else None
    with _shown("export") as progress:
        done = export_directory(checkpoint, target, like=like, dtype=kind, shard_bytes=shard_gb * 10**9, progress=progress)
    same = "" if done.unchanged is None else f"; {done.unchanged} of them are as they were imported"
    _print(f"{_count(done)} from {checkpoint} in {target}{same}")
    return 0


def _count(done: Converted) -> str:
    return f"{done.tensors:,} tensors, {done.parameters:,} parameters"


def _print(text: str) -> None:
    Console(highlight=False, soft_wrap=True).print(text, markup=False)


@contextlib.contextmanager
def _shown(what: str) -> Iterator[Progress]:
    """A bar on a terminal, else a line every few seconds."""
    console = Console(stderr=True)
    if console.is_terminal:
        with Bar(TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task(what)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    begun = said = time.monotonic()

    def say(done: int, total: int) -> None:
        nonlocal said
        if (now := time.monotonic()) - said >= _SECONDS:
            said = now
            console.print(f"{what} {100 * done // max(total, 1)} % after {now - begun:.0f} s", markup=False)

    yield say
