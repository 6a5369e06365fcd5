"""Starts and stops a rank: who am I, which device and backend, seeds, time-outs, tear-down."""

import contextlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from parallel.cpu import let_megatron_run_without_cuda
from parallel.errors import UsageError
from parallel.failures import report_errors
from parallel.launch import World, launched_world
from parallel.meeting import MEETING_SECONDS, met


@dataclass(frozen=True)
class Runtime:
    """One process of the run."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def place_in_world() -> World:
    """This process in the world that torchrun, srun or `launch` started, else in a world of one."""
    world = launched_world(os.environ) or World(rank=0, size=1, local_rank=0)
    if world.size > 1 and "MASTER_ADDR" not in os.environ:
        raise UsageError(
            "MASTER_ADDR is not set: under srun export it and MASTER_PORT, for example "
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500'
        )
    return world


@contextlib.contextmanager
def started(seed: int, threads: int, timeout_seconds: float, rendezvous: Path | None = None) -> Iterator[Runtime]:
    """The process group, up for the duration of the block. `rendezvous`: a file instead of MASTER_ADDR, for tests."""
    world = place_in_world()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", world.local_rank) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(threads)
    let_megatron_run_without_cuda()
    _seed(seed)
    timeout = timedelta(seconds=timeout_seconds)
    if world.size == 1:
        store = HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        store = met(world, min(timeout_seconds, MEETING_SECONDS), rendezvous)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    try:
        # inside: the peers' connections break when the group is destroyed, and the cause must be on record before
        with report_errors():
            yield Runtime(world.rank, world.size, world.local_rank, device, backend)
    finally:
        dist.destroy_process_group()


def side_store(prefix: str, timeout: timedelta) -> Store:
    """The store at which the ranks met, over a connection of its own and under names of its own."""
    default = dist.distributed_c10d._get_default_store()
    store = PrefixStore(prefix, default.clone())
    store.set_timeout(timeout)
    return store


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
