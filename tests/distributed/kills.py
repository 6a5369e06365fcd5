"""Runs whose processes are killed and started again until they are done."""

import importlib
import itertools
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from moe_rl.config import RunConfig
from parallel.failures import SAVED
from tests.distributed.ranks import place

multiprocessing.set_forkserver_preload(["tests.distributed.imported"])

_DEADLINE = 300.0  # seconds
_GRACE = 0.3  # seconds that ranks live on after the first has died


@dataclass(frozen=True)
class Kill:
    """When processes die, without a word, or are asked to end `by` another signal: at call number `call` of function `point`
    ("module:Class.method"), before it or `after` it; or after `cpu` seconds of their own work. ranks: which ones; none: all."""

    point: str = ""
    call: int = 1
    after: bool = False
    cpu: float = 0.0
    ranks: tuple[int, ...] | None = None
    by: int = signal.SIGKILL

    def arm(self, rank: int) -> None:
        """In a process that is to die."""
        if self.ranks is not None and rank not in self.ranks:
            return
        if self.cpu:
            signal.setitimer(signal.ITIMER_VIRTUAL, self.cpu)  # nobody handles its signal, and so the kernel ends the process
            return
        module, _, path = self.point.partition(":")
        holder: Any = importlib.import_module(module)
        *owners, name = path.split(".")
        for owner in owners:
            holder = getattr(holder, owner)
        real, calls = getattr(holder, name), itertools.count(1)

        def deadly(*args: Any, **settings: Any) -> Any:
            now = next(calls) == self.call
            if now and not self.after:
                os.kill(os.getpid(), self.by)
            result = real(*args, **settings)
            if now and self.after:
                os.kill(os.getpid(), self.by)
            return result

        setattr(holder, name, deadly)


def run_killed(config: RunConfig, world: int, kills: Sequence[Kill], command: str = "train") -> int:
    """Starts the run until it is done, in each attempt with the next of `kills` and at last with none. Returns how many
    attempts were killed; one may be done before its kill comes."""
    killed = 0
    for kill in [*kills, None]:
        if _attempt(config, world, kill, command):
            break
        killed += 1
    return killed


def _attempt(config: RunConfig, world: int, kill: Kill | None, command: str) -> bool:
    """Whether the run came to its end; False: it was killed."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        args = [(rank, world, folder, command, config, kill) for rank in range(world)]
        processes = [context.Process(target=_rank, args=some) for some in args]
        for process in processes:
            process.start()
        deadline = time.monotonic() + _DEADLINE
        while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        _end(processes)
        codes = [process.exitcode for process in processes]
        if not any(codes):
            return True
        asked = kill is not None and kill.by != signal.SIGKILL  # then no rank ends in any other way, unless it was too late
        died = [code for code in codes if code in ((SAVED,) if asked else (-signal.SIGKILL, -signal.SIGVTALRM))]
        assert kill is not None and died and not (asked and {*codes} - {SAVED, -signal.SIGKILL}), (
            codes,
            [(Path(folder) / f"{rank}.log").read_text()[-3000:] for rank in range(world)],
        )
        return False


def _end(processes: Sequence[ForkServerProcess]) -> None:
    """As a launcher does: those that still live have a moment to do harm, and are killed."""
    for process in processes:
        process.join(_GRACE)
    for process in processes:
        process.kill()
        process.join()


def _rank(rank: int, world: int, folder: str, command: str, config: RunConfig, kill: Kill | None) -> None:
    from moe_rl.cli import _entry
    from parallel import runtime
    from parallel.launch import saving_signals_end

    log = os.open(Path(folder) / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    place(rank, world)
    runtime.started = partial(runtime.started, rendezvous=Path(folder) / "meet")
    if kill is not None:
        kill.arm(rank)
    before = os.times().user
    with saving_signals_end():
        _entry(command)(config)
    (config.directory / f"cpu_{rank}").write_text(str(os.times().user - before))


def work_of(directory: Path) -> float:
    """Seconds of its own work that each rank of a run which nobody killed has needed, at least: what `Kill.cpu` counts in."""
    return min(float(path.read_text()) for path in directory.glob("cpu_*"))
