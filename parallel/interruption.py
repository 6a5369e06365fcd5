"""A request from outside, SIGTERM or SIGUSR1, to save at the next good moment and end."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from parallel.failures import SAVED
from parallel.launch import SAVING_SIGNALS


class Interruption:
    """What this rank was asked for, and what all agree on."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block the signals are noted, and kill nobody. One that came too late to be answered in it goes, at its
        end, to whoever handled it before."""

        def note(number: int, frame: FrameType | None) -> None:
            self.received = signal.Signals(number)

        before = {number: signal.signal(number, note) for number in SAVING_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.received is not None:
            signal.raise_signal(self.received)

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked: the same answer on all of them (collective)."""
        asked = torch.tensor(int(self.received is not None), device=device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)


def end_after_saving() -> NoReturn:
    """Ends this rank with the exit code that says: what there is was saved, and the same command goes on from there."""
    raise SystemExit(SAVED)
