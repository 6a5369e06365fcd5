"""Ends a rank that does not get through the preflight in time."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from parallel.failures import Failure, leave_word
from parallel.runtime import Runtime, side_store
from parallel.watchdog import main_thread, ranks_text

_SILENT_SECONDS = 2.0  # after the time-out, for the ranks that are only held up to say so


class Alarm:
    """A thread that ends this process when the preflight takes too long, and says which rank is silent."""

    def __init__(self, here: Runtime, host: str, seconds: float) -> None:
        self._here, self._host, self._seconds, self._stage = here, host, seconds, 0
        self._store = side_store("preflight", timedelta(seconds=seconds))
        self._ended = threading.Event()

    def stage(self, name: str) -> None:
        """This rank is about to do what `name` says. Every rank does the same ones, in order."""
        self._stage += 1
        self._store.set(f"at/{self._here.rank}", f"{self._host}: {name}")

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        thread = threading.Thread(target=self._wait, name="preflight", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _wait(self) -> None:
        if self._ended.wait(self._seconds):
            return
        waits, function = main_thread()
        text = "the store at rank 0 does not answer"
        with contextlib.suppress(dist.DistError):
            store = side_store("preflight", timedelta(seconds=_SILENT_SECONDS))  # the other may be in use
            store.set(f"late/{self._here.rank}", "")
            if self._ended.wait(_SILENT_SECONDS):
                return
            places = [_place(store, rank) for rank in range(self._here.world_size)]
            silent = [rank for rank in range(len(places)) if not store.check([f"late/{rank}"])]
            named = silent or [self._here.rank]
            known = "; ".join(f"rank {rank}: {places[rank]}" for rank in named[:8])
            text = f"{ranks_text(silent)} silent ({known})" if silent else f"does not get beyond {known}, in {function}"
        message = f"preflight: not done after {self._seconds:g} s: {text}; look at that node, or leave it out of the job"
        # the earliest word counts as the cause: of the rank that got least far, and among those one that waits for nobody
        word = Failure(time.time() + 2 * self._stage + waits, self._here.rank, "UsageError", message, "", 2)
        if not leave_word(word) and (self._here.is_main or not _same_on_all(text)):
            os.write(2, f"moe-rl: error: {message}\n".encode())
        if self._here.is_main:
            time.sleep(1)  # the store ends with this process
        os._exit(2)


def _same_on_all(text: str) -> bool:
    """Whether the text is the same on all ranks, so that the main one alone says it."""
    return " silent (" in text


def _place(store: Store, rank: int) -> str:
    return store.get(f"at/{rank}").decode() if store.check([f"at/{rank}"]) else "has not come to the preflight"
