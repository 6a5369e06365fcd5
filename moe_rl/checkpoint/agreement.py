"""What goes wrong on one rank is said on all of them, so that they end together and none waits for another."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from parallel.errors import UsageError


def agree(wrong: str) -> None:
    """Raises UsageError with the text of the first rank that has one, on every rank (collective)."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, wrong)
    if first := next((text for text in found if text), ""):
        raise UsageError(first)


def main_does[Result](work: Callable[[], Result]) -> Result:
    """Has rank 0 do it while the others wait; what it returns is returned on every rank, and what it raises as OSError or
    UsageError is raised on every rank (collective)."""
    box: list[Any] = [None, ""]
    if dist.get_rank() == 0:
        try:
            box[0] = work()
        except (OSError, UsageError) as error:
            box[1] = said(error)
    dist.broadcast_object_list(box, 0)
    if box[1]:
        raise UsageError(box[1])
    return box[0]


def said(error: BaseException) -> str:
    """One line: of an error of the disk, which file and why, however deep it lies in what other libraries made of it."""
    if isinstance(error, UsageError):
        return str(error)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError) and cause.strerror:
        return f"{cause.filename}: {cause.strerror}" if cause.filename else cause.strerror
    return " ".join(str(error).split())[:300] or type(error).__name__
