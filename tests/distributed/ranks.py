"""Runs a function on several gloo ranks: real processes, a file as meeting place, an error of any rank is the test's."""

import itertools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing as mp

if TYPE_CHECKING:
    from moe_rl.config import RunConfig

# What every rank needs is imported once, by the server that the ranks are forked from: it takes seconds and computes nothing.
multiprocessing.set_forkserver_preload(["tests.distributed.imported"])

_RUNS_A_PROCESS = 6


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What `function(runtime, *args)` returned on each rank. The function must be importable by name."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_enter, (function, world_size, folder, args), nprocs=world_size, start_method="forkserver")  # pyright: ignore[reportPrivateImportUsage]
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _enter(rank: int, function: Callable[..., Any], world_size: int, folder: str, args: tuple[Any, ...]) -> None:
    from parallel.runtime import started

    place(rank, world_size)
    with _Shown(), started(seed=0, threads=1, timeout_seconds=120, rendezvous=Path(folder) / "meet") as runtime:
        torch.save(function(runtime, *args), Path(folder) / f"{rank}.pt")


def train_on_ranks(world_size: int, configs: "list[RunConfig]", command: str = "train") -> None:
    """What the command line's `command` (train, sft, eval) starts, for one configuration after the other, some in the same
    processes: the threads and groups that finished runs leave behind slow those that follow."""
    for some in itertools.batched(configs, _RUNS_A_PROCESS):
        with tempfile.TemporaryDirectory() as folder:
            args = (world_size, folder, command, some)
            mp.start_processes(_run, args, nprocs=world_size, start_method="forkserver")  # pyright: ignore[reportPrivateImportUsage]


def _run(rank: int, world_size: int, folder: str, command: str, configs: "Sequence[RunConfig]") -> None:
    from moe_rl.cli import _entry
    from parallel import runtime

    place(rank, world_size)
    started = runtime.started
    with _Shown():
        for i, config in enumerate(configs):
            runtime.started = partial(started, rendezvous=Path(folder) / f"meet{i}")
            _entry(command)(config)


class _Shown:
    """Prints an error where it happened, and lets it go its way: the parent only learns of the rank that it noticed first."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            traceback.print_exception(error)


def place(rank: int, world_size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    os.environ["MASTER_ADDR"] = "localhost"  # asked for, though the ranks meet at a file
