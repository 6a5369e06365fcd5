"""Writes a directory beside its place: at its place it is complete, or it is not there."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel.errors import UsageError

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


@contextmanager
def placed(directory: Path, needed: int) -> Iterator[Path]:
    """Gives an empty directory beside `directory` that is renamed to it when the context ends; an exception removes it.

    needed: bytes that will be written. What a killed process left beside is replaced.
    Raises UsageError where `directory` is taken, cannot be written, or its disk has fewer bytes free.
    """
    directory = Path(os.path.realpath(directory))  # a link cannot be renamed to, what it stands for can
    part = directory.with_name(f".{directory.name}.part")
    if os.path.ismount(directory):
        raise UsageError(f"{directory}: a disk is mounted there; name a directory in it")
    try:
        with writing(directory, needed):
            if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
                raise UsageError(f"{directory}: exists already; name another directory, or remove it first")
            shutil.rmtree(part, ignore_errors=True)
            free = _free(directory)
            if needed > free:
                raise UsageError(
                    f"{directory}: {needed:,} bytes are to be written and its disk has {free:,} free; name another disk"
                )
            part.mkdir(parents=True)
        yield part
        with writing(directory, needed):
            for path in [*sorted(part.rglob("*"), reverse=True), part]:
                to_disk(path)
            part.rename(directory)
            to_disk(directory.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # once renamed, it is not there


@contextmanager
def writing(path: Path, needed: int) -> Iterator[None]:
    """Turns a full disk, or one that cannot be written, into a UsageError. needed: bytes in all, for its text."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise UsageError(
                f"{path}: {error.strerror}: {needed:,} bytes are needed in all and {_free(path):,} are left; nothing was kept, "
                "make room or name another disk"
            ) from error
        raise UsageError(f"{error.filename or path}: cannot be written: {error.strerror}; name another directory") from error


def _free(path: Path) -> int:
    """Bytes on the disk of the nearest directory above that exists."""
    return shutil.disk_usage(next(above for above in path.parents if above.exists())).free


def to_disk(path: Path) -> None:
    """Waits until the file, or the directory's list of names, is stored."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
