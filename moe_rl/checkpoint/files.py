"""Directories of checkpoints: made visible in one step, and removed so that a kill in between leaves nothing half there."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from models.convert.placing import to_disk
from moe_rl import checkpoint_paths

PINNED = "pinned"  # a file of this name in a checkpoint keeps it
_PART, _OLD = ".part", ".old"


def part_of(target: Path) -> Path:
    """Where `target` is written before it is whole."""
    return target.with_name(f".{target.name}{_PART}")


def begin(target: Path) -> None:
    """Makes the empty `part_of(target)`, and removes what killed runs have left beside it."""
    for left in leftovers(target.parent):
        _remove(left)
    part_of(target).mkdir(parents=True)


def leftovers(directory: Path) -> Iterator[Path]:
    """What was being written or removed when a run was killed."""
    yield from (path for end in (_PART, _OLD) for path in directory.glob(f".*{end}"))


def publish(target: Path) -> None:
    """`part_of(target)`, whose files are on the disk, becomes `target`; one that is there already makes room first."""
    part = part_of(target)
    for path in [*(path for path in part.rglob("*") if path.is_dir()), part]:
        to_disk(path)
    old = _set_aside(target) if os.path.lexists(target) else None
    part.rename(target)
    to_disk(target.parent)
    if old is not None:
        _remove(old)


def retire(directory: Path, keep: int, keep_every: int) -> None:
    """Removes all complete checkpoints but the newest `keep`, those of a step that `keep_every` divides (0: none), and pinned
    ones; and those within a step that a newer one has overtaken. What is not complete is not counted and not touched."""
    complete = [(step, path) for step, path in checkpoint_paths.numbered(directory) if checkpoint_paths.is_complete(path)]
    loose = [pair for pair in complete if not (pair[1] / PINNED).exists()]
    within = [pair for pair in loose if checkpoint_paths.is_within_step(pair[1])]
    overtaken = [path for _, path in within if path != complete[-1][1]]
    old = [path for step, path in [pair for pair in loose if pair not in within][:-keep] if not keep_every or step % keep_every]
    for path in overtaken + old:
        _remove(_set_aside(path))


def remove(directory: Path) -> None:
    """A directory of checkpoints, if it is there: all at once, for whoever looks."""
    if directory.exists():
        shutil.rmtree(_set_aside(directory))


def _set_aside(path: Path) -> Path:
    """A name under which nobody takes it for a checkpoint."""
    old = path.with_name(f".{path.name}{_OLD}")
    if os.path.lexists(old):
        _remove(old)
    return path.rename(old)


def _remove(path: Path) -> None:
    """Of what somebody keeps elsewhere and has linked to, the link."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except OSError as error:  # which names the last part of the path alone
        raise OSError(error.errno, f"cannot be removed: {error.strerror}", str(path)) from error
