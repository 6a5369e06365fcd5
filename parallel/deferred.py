"""SIGTERM and SIGUSR1 in a process that starts ranks, where they reach each rank anyway (Slurm sends them to all of a step)."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from parallel.conclusion import say_how
from parallel.failures import SAVED
from parallel.launch import SAVING_SIGNALS, end_with_nothing_to_save


class LeftToRanks:
    """From here on this process dies of neither. Before its ranks are there SIGUSR1 ends it as a run that has saved: there is
    nothing to save. SIGTERM is kept for them, as it may come from srun, because another agent failed to start. Then both are
    the ranks' own, and only remembered."""

    def __init__(self, folder: Path) -> None:
        """folder: where agents meet (parallel/conclusion.py)."""
        self.heard: set[int] = set()
        self._folder, self._begun = folder, False
        for number in SAVING_SIGNALS:
            signal.signal(number, self._hear)  # not inherited: a rank that does not listen yet dies of it, as it should

    @contextlib.contextmanager
    def starting(self) -> Iterator[list[int]]:
        """Within the block the ranks are started, and their processes noted in its list: what came until then is handed on
        to all of them."""
        self._begun, processes = True, list[int]()
        yield processes
        for process in processes:
            for number in self.heard:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._begun and number == signal.SIGUSR1:
            say_how(self._folder, f"{SAVED} saved")
            end_with_nothing_to_save(frame)
        self.heard.add(number)
