"""The commands `moe-rl import` and `moe-rl export`."""

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from models.convert.importing import Converted, Progress
from moe_rl import checkpoint_paths
from parallel.errors import UsageError

_SECONDS = 10  # between lines, where there is no terminal


def import_command(source: Path, target: Path) -> int:
    """Writes the checkpoint `target`. Raises UsageError for anything that is wrong with either."""
    from models.convert.importing import import_directory

    with _shown("import") as progress:
        done = import_directory(source, target, progress)
    _print(f"{_count(done)} from {source} in {target}, each compared with its file")
    if done.dropped:
        more = f" and {len(done.dropped) - 1} more" if len(done.dropped) > 1 else ""
        _print(f"not converted, since this model has no such part of its own: {done.dropped[0]}{more}")
    return 0


def export_command(source: Path, target: Path, like: Path | None, dtype: str | None, shard_gb: int) -> int:
    """Writes the directory `target`. Raises UsageError for anything that is wrong with either."""
    import torch

    from models.convert.exporting import export_directory, has_kept
    from models.convert.files import MODEL

    checkpoint = checkpoint_paths.find(source, "CKPT")
    kind = getattr(torch, dtype) if dtype else None
    with contextlib.ExitStack() as stack, _shown("export") as progress:
        if like is None and not has_kept(checkpoint) and (checkpoint / MODEL).exists():
            like = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moe-rl-")))
            _describe_as_qwen3(checkpoint, like)
        done = export_directory(checkpoint, target, like=like, dtype=kind, shard_bytes=shard_gb * 10**9, progress=progress)
    same = "" if done.unchanged is None else f"; {done.unchanged} of them are as they were imported"
    _print(f"{_count(done)} from {checkpoint} in {target}{same}")
    return 0


def _describe_as_qwen3(checkpoint: Path, directory: Path) -> None:
    """Configuration and tokenizer for a model that was made here. Raises UsageError where it is no Qwen3."""
    from models.convert.exporting import differing
    from models.convert.files import HUGGINGFACE, tokenizer_files, trained_model
    from models.convert.huggingface import describe
    from models.convert.native import qwen3_config
    from moe_rl.tasks import ByteTokenizer

    model = trained_model(checkpoint)
    (directory / "config.json").write_text(json.dumps(qwen3_config(model)))
    if model.tokenizer in (None, ByteTokenizer.name):
        ByteTokenizer().save(directory)
    for path in tokenizer_files(checkpoint / HUGGINGFACE):
        shutil.copyfile(path, directory / path.name)
    if key := differing(model, describe(directory, "CKPT").model()):
        raise UsageError(
            f"CKPT={checkpoint}: model.{key}={getattr(model, key)}: no Qwen3 has that, and which other family the model is of "
            "is not known; name a Hugging Face directory of one like it with --like"
        )


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
