"""Notices that a run has stopped moving: every rank writes what its threads are doing, and the run ends."""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from parallel.failures import HANG, Failure, leave_word
from parallel.launch import node_name
from parallel.runtime import Runtime, side_store

HANG_EXIT_CODE = 70
_MOVES, _DECLARED = "moves", "declared"
_LONGEST_LOOK = 30.0  # seconds between two looks, at most
_STORE_SECONDS = 10.0
_SETTLE_SECONDS = 5.0  # until every rank that still can has said where it is
_TORCH = str(Path(torch.__path__[0]))


class Watchdog:
    """One rank's share. Nobody hangs while any rank of the job still reports progress: ranks may wait for one that works.

    A thread counts the time without progress, not the clock, so that a job which was suspended goes on. It uses a connection
    to the store of its own: the main thread may be stuck in a call that holds the other.
    """

    def __init__(self, seconds: float, directory: Path, here: Runtime) -> None:
        """seconds: without progress of any rank, until the run is ended; 0: never. directory: the run's, where stacks/ and
        (by the main rank) log.txt are written."""
        self._seconds, self._directory, self._here = seconds, directory, here
        self._phase, self._since, self._moves = "start", time.monotonic(), 0
        self._stop = threading.Event()

    def progress(self, phase: str) -> None:
        """This rank has got somewhere, and is now in `phase`."""
        self._phase, self._since = phase, time.monotonic()
        self._moves += 1

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        if not self._seconds:
            yield
            return
        store = side_store("watchdog", timedelta(seconds=_STORE_SECONDS))
        self.progress(self._phase)
        thread = threading.Thread(target=self._watch, args=(store,), name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, store: Store) -> None:
        between = min(self._seconds / 10, _LONGEST_LOOK)
        seen, quiet, told, last = -1, 0.0, 0, time.monotonic()
        while not self._stop.wait(between):
            # written without the interpreter: for when not even this thread runs, as something holds the lock for ever
            faulthandler.dump_traceback_later(self._seconds + between, file=2)
            now, moves = time.monotonic(), self._moves
            quiet, last = quiet + min(now - last, 2 * between), now
            try:
                total, declared = store.add(_MOVES, moves - told), store.check([_DECLARED])
                told = moves
            except dist.DistError:  # the rank that holds the store is gone: what is left to watch is this one
                total, declared = seen + moves - told, False
                told = moves
            if total != seen:
                seen, quiet = total, 0.0
            if declared or quiet >= self._seconds:
                self._end(store)

    def _end(self, store: Store) -> NoReturn:
        waits, place = main_thread()
        text = f"{self._phase}: {'waits for others in' if waits else 'in'} {place}"
        self._write_stacks(f"{text}; no progress here for {time.monotonic() - self._since:.0f} s")
        known = {self._here.rank: (waits, text)}
        declared = time.time()
        with contextlib.suppress(dist.DistError):
            declared = float(store.compare_set(_DECLARED, "", str(declared)))
            store.set(f"where/{self._here.rank}", json.dumps([waits, text]))
            known |= _gathered(store, self._here.world_size)
        message = describe(self._seconds, known, self._here.world_size, self._directory / "stacks")
        if self._here.is_main:
            with contextlib.suppress(OSError), (self._directory / "log.txt").open("a", encoding="utf-8") as log:
                print(f"{HANG}: {message}", file=log)
        # the earliest word counts as the cause: that of a rank which the others wait for
        told = leave_word(Failure(declared + waits, self._here.rank, HANG, message, "", HANG_EXIT_CODE))
        if not told and self._here.is_main:
            os.write(2, f"moe-rl: {HANG}: {message}\n".encode())
        if self._here.is_main:
            time.sleep(1)  # the others may still be reading from the store that ends with this process
        os._exit(HANG_EXIT_CODE)

    def _write_stacks(self, headline: str) -> None:
        with contextlib.ExitStack() as stack:
            try:
                folder = self._directory / "stacks"
                folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((folder / f"rank_{self._here.rank:05d}.txt").open("w", encoding="utf-8"))
            except OSError:
                file = sys.stderr
            print(f"rank {self._here.rank} on {node_name()}, process {os.getpid()}, {headline}", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)


def describe(seconds: float, known: Mapping[int, tuple[bool, str]], size: int, stacks: Path) -> str:
    """One line: who is where, those that others wait for first. known: of each rank that answered, whether it waits for
    others, and where it is."""
    places: dict[tuple[bool, str], list[int]] = {}
    for rank, place in sorted(known.items()):
        places.setdefault(place, []).append(rank)
    parts = [f"{ranks_text(ranks)} {text}" for (_, text), ranks in sorted(places.items(), key=lambda one: one[0][0])]
    if silent := [rank for rank in range(size) if rank not in known]:
        parts.insert(0, f"{ranks_text(silent)} did not answer")
    return f"no rank got anywhere for {seconds:g} s (run.hang_seconds); {'; '.join(parts)}; all stacks: {stacks}"


def ranks_text(ranks: list[int]) -> str:
    """Rising ranks as "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def main_thread() -> tuple[bool, str]:
    """Whether the main thread is inside torch.distributed, and the innermost function of it that is not torch's."""
    frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    inner = len(frames) - 1
    while inner and frames[inner].filename.startswith(_TORCH):
        inner -= 1
    waits = any(f"{os.sep}distributed{os.sep}" in frame.filename for frame in frames[inner + 1 :])
    frame = frames[inner]
    return waits, f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"


def _gathered(store: Store, size: int) -> dict[int, tuple[bool, str]]:
    """What the ranks have said, after all did or the time is up."""
    known: dict[int, tuple[bool, str]] = {}
    deadline = time.monotonic() + _SETTLE_SECONDS
    while len(known) < size and time.monotonic() < deadline:
        for rank in range(size):
            if rank not in known and store.check([f"where/{rank}"]):
                waits, text = json.loads(store.get(f"where/{rank}"))
                known[rank] = (waits, text)
        time.sleep(0.1)
    return known
