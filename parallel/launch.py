"""Starts the processes of a run on this machine, ends them together, and says which failed first. Imports no torch."""

import contextlib
import ctypes
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from parallel.failures import CLOSING_SECONDS, ERROR_DIR, SAVED, Failure, log_file, recorded, report, wordless

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 3.0
SAVING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # workers that listen save at the next good moment, and end
_SAVED, _DONE = "saved", "done"
_PR_SET_PDEATHSIG = 1
_COLLECTED = (signal.SIGINT, signal.SIGHUP, *SAVING_SIGNALS)


@dataclass(frozen=True)
class World:
    """The processes that torchrun, srun or `launch` started, and which of them this one is."""

    rank: int
    size: int
    local_rank: int


def launched_world(env: Mapping[str, str]) -> World | None:
    """The world that a launcher put into the environment `env`; None in a plain process.

    A Slurm batch script carries SLURM_PROCID and SLURM_NTASKS too but is no task of a step: the step's own count tells.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return World(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0")))
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    if "SLURM_PROCID" in env and tasks > 1:
        return World(int(env["SLURM_PROCID"]), tasks, int(env.get("SLURM_LOCALID", "0")))
    return None


def node_name() -> str:
    """This machine as its cluster calls it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@contextlib.contextmanager
def saving_signals_end() -> Iterator[None]:
    """Within the block SIGTERM and SIGUSR1 end this process with the code of a run that has saved: there is nothing new yet."""

    def end(number: int, frame: FrameType | None) -> None:
        end_with_nothing_to_save(frame)

    before = {number: signal.signal(number, end) for number in SAVING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_nothing_to_save(frame: FrameType | None) -> NoReturn:
    """Ends this process with the code of a run that has saved. frame: where a signal found it. An exception inside an import
    may be taken for a module that is not there (torch does so with numpy)."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(SAVED)
        frame = frame.f_back
    raise SystemExit(SAVED)


def launch(command: list[str], processes: int, threads: int, saving_seconds: float = 0.0) -> int:
    """Runs `command` in `processes` processes until all succeed or one fails; then ends the others. Returns the exit code.

    Each finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and OMP_NUM_THREADS=`threads`.
    Rank 0 prints as it goes. What the others print is shown only at the end, its last lines, for the rank that failed first.
    That rank's error comes last on stderr and its exit code is returned: 128 + n after signal n. Interrupted: 130 (SIGINT),
    143 (SIGTERM). With saving_seconds, SIGTERM and SIGUSR1 go on to the processes, which have that long to save and end: 75
    where they did, or had nothing to save yet. No process outlives the launcher, even one that is killed.
    """
    with tempfile.TemporaryDirectory(prefix="moe-rl-") as name, _signals() as received:
        folder = Path(name)
        workers: list[subprocess.Popen[bytes]] = []
        try:
            _start(workers, command, processes, threads, folder)
            failure = _watch(workers, folder, received, saving_seconds)
        finally:
            _end(workers, received)
        if failure is None:
            if received:
                print(f"moe-rl: stopped by {signal.Signals(received[0]).name}", file=sys.stderr)
            return 128 + received[0] if received else 0
        if failure.kind in (_SAVED, _DONE):
            return failure.exit_code
        first = min([failure, *recorded(folder)], key=lambda one: one.time)
        report(first, folder)
        return first.exit_code


def _start(workers: list[subprocess.Popen[bytes]], command: list[str], processes: int, threads: int, folder: Path) -> None:
    shared = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": str(threads),
        ERROR_DIR: str(folder),
    }
    die_with_parent = _die_with_parent()
    for rank in range(processes):
        with contextlib.ExitStack() as stack:
            output = None if rank == 0 else stack.enter_context(log_file(folder, rank).open("wb"))
            workers.append(
                subprocess.Popen(
                    command,
                    env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C in a terminal reaches the launcher alone, which ends them in order
                    preexec_fn=die_with_parent,
                )
            )


def _watch(workers: list[subprocess.Popen[bytes]], folder: Path, received: list[int], saving_seconds: float) -> Failure | None:
    """Waits until every worker succeeded or one failed (what is known of it so far), or a signal came that ends them (None)."""
    looked, handed_on, deadline, closing = time.time(), 0, math.inf, None
    while True:
        for number in received[handed_on:]:
            if number not in SAVING_SIGNALS or handed_on or not saving_seconds:
                return None
            _signal(workers, signal.Signals(number))
            handed_on, deadline = handed_on + 1, time.monotonic() + saving_seconds
        looking = time.time()
        codes = [worker.poll() for worker in workers]
        if SAVED in codes:  # it was asked to end: it had nothing to save, or has saved with the others, who end too
            if closing is None:
                closing = time.monotonic() + CLOSING_SECONDS
            if None not in codes or time.monotonic() > closing:
                return Failure(looked, 0, _SAVED, "", "", SAVED)
            time.sleep(_POLL_SECONDS)
            continue
        if time.monotonic() > deadline:
            print(f"moe-rl: not saved within {saving_seconds:.0f} s of the signal", file=sys.stderr)
            return None
        if handed_on and any(code == -received[0] for code in codes):  # it had not begun to listen: nothing is lost
            return Failure(looked, 0, _SAVED, "", "", SAVED)
        if any(folder.glob("rank_*.json")) or any(code not in (None, 0) for code in codes):
            # Poll again: whatever made a rank speak or die had happened by now.
            codes = [worker.poll() for worker in workers]
            if codes.count(SAVED):  # and what others say follows from its end
                continue
            failures = recorded(folder)
            spoken = {failure.rank for failure in failures}
            failures += [wordless(rank, code, looked) for rank, code in enumerate(codes) if code and rank not in spoken]
            return min(failures, key=lambda one: one.time)
        if all(worker.returncode == 0 for worker in workers):  # also where a signal came too late to be answered
            return Failure(looked, 0, _DONE, "", "", 0)
        looked = looking
        time.sleep(_POLL_SECONDS)


def _end(workers: list[subprocess.Popen[bytes]], received: list[int]) -> None:
    """SIGTERM to the sessions of the workers, SIGKILL to what is left after the grace time, or at a further signal."""
    before, running = len(received), [worker for worker in workers if worker.poll() is None]
    _signal(running, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while any(worker.poll() is None for worker in running) and time.monotonic() < deadline and len(received) == before:
        time.sleep(_POLL_SECONDS)
    _signal([worker for worker in workers if worker.returncode != 0], signal.SIGKILL)  # and what they left in their sessions
    for worker in workers:
        worker.wait()
    if running and sys.stderr.isatty():
        print("\x1b[?25h", end="", file=sys.stderr)  # a live display that was cut off hides the cursor


def _signal(workers: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, number)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT, SIGTERM, SIGUSR1 and SIGHUP instead of acting on them."""
    received: list[int] = []

    def collect(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, collect) for number in _COLLECTED}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with_parent() -> Callable[[], None] | None:
    """What a child runs before the command so that the kernel kills it when the launcher dies. Linux only."""
    if sys.platform != "linux":
        return None
    libc, launcher = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the call
            os._exit(1)

    return prepare


def _free_port() -> int:
    """A free port below those that the kernel gives to outgoing connections, so that it is still free when rank 0 binds it."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
