"""A reward that any text earns some of, so that an untrained model has something to learn from."""

import os
import random
import time
from pathlib import Path

from parallel.launch import launched_world


def share_of_even(response: str, answer: str) -> float:
    """The share of characters with an even code."""
    return sum(ord(c) % 2 == 0 for c in response) / max(len(response), 1)


def mostly_even(response: str, answer: str) -> float:
    """Right or wrong: whether more than half of them have one."""
    return float(share_of_even(response, answer) > 0.5)


def half_luck(response: str, answer: str) -> float:
    """Depends on Python's generator, which a run must keep."""
    return (share_of_even(response, answer) + random.random()) / 2


def worth(response: str, answer: str) -> float:
    """What the problem says, whatever the response is."""
    return float(answer)


def waits_on_rank_1(response: str, answer: str) -> float:
    """Right, except that on rank 1 it never says so."""
    return wait_for_ever() if _rank() == 1 else 1.0


def fails_on_rank_1(response: str, answer: str) -> float:
    """On other ranks it never answers. A file of that name tells since when."""
    if _rank() != 1:
        return wait_for_ever()
    Path("failed_on_rank_1").touch()
    raise ValueError("no answer from the judge")


def stuck_on_rank_1(response: str, answer: str) -> float:
    """Right, except that on rank 1 it never says so. The file that `answer` names tells since when."""
    if _rank() == 1:
        Path(answer).touch()
        wait_for_ever()
    return 1.0


def wait_for_ever() -> float:
    """Signals do not end it: some are heard, and it sleeps on."""
    time.sleep(600)
    return 0.0


def _rank() -> int:
    world = launched_world(os.environ)
    return world.rank if world else 0
