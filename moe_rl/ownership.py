"""Whose a run's directory is: one start of a run writes in it, also where a job was submitted twice, or was queued again while
a node that the cluster had lost still computes."""

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from parallel.errors import UsageError

FILE = "owner.json"  # in the run's directory, while it is written to; what a kill leaves says nothing
_SECONDS = 1.0  # to which a process's start is known


def nothing_to_check() -> None:
    """Of ranks that are not the main one, and of what writes in no run's directory."""


def check_free(directory: Path) -> None:
    """Raises UsageError where a living process of this machine works in the directory."""
    owner = _read(directory)
    if owner is not None and owner["host"] == socket.gethostname() and _lives(owner["process"], owner["since"]):
        raise UsageError(f"{directory}: {_named(owner)} works in it; end that first, or choose another run.name for this one")


@contextlib.contextmanager
def owned(directory: Path) -> Iterator[Callable[[], None]]:
    """Takes the directory for this process until the end of the block. What is returned raises UsageError once another start
    of the run, on a machine that cannot see this one, has taken it: call it before anything is written."""
    mine = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": psutil.Process().create_time(),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "token": secrets.token_hex(8),
    }
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f".{FILE}.{mine['token']}"
    part.write_text(json.dumps(mine) + "\n", encoding="utf-8")
    part.replace(directory / FILE)

    def check() -> None:
        owner = _read(directory)
        if owner is None or owner["token"] != mine["token"]:
            who = f"{_named(owner)} has" if owner else "another start of this run had"
            raise UsageError(f"{directory}: {who} taken it over; this one ends, and the newer one goes on with the run")

    try:
        yield check
    finally:
        with contextlib.suppress(OSError):  # what stays is of a process that is no more; why the run ends is said elsewhere
            owner = _read(directory)
            if owner is not None and owner["token"] == mine["token"]:
                (directory / FILE).unlink(missing_ok=True)


def _read(directory: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((directory / FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # damaged: by nobody who still writes
        return None
    return found if isinstance(found, dict) and found.keys() >= {"host", "process", "since", "token"} else None


def _lives(process: int, since: float) -> bool:
    if process == os.getpid():
        return False
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(process)
        return abs(found.create_time() - since) < _SECONDS and found.status() != psutil.STATUS_ZOMBIE
    return False


def _named(owner: dict[str, Any]) -> str:
    job = f"job {owner['job']}, " if owner["job"] else ""
    return f"{job}process {owner['process']} on {owner['host']}"
