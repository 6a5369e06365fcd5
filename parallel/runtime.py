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

from parallel.cpu import let_megatron_run_without_cuda
from parallel.errors import UsageError


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


def place_in_world() -> tuple[int, int, int]:
    """(rank, world size, local rank) from torchrun's environment, else srun's, else a world of one."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0"))
    if "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        if "MASTER_ADDR" not in env:
            raise UsageError(
                "MASTER_ADDR is not set: under srun export it, for example "
                'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1), and MASTER_PORT'
            )
        return int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env.get("SLURM_LOCALID", "0"))
    return 0, 1, 0


@contextlib.contextmanager
def started(seed: int, threads: int, timeout_seconds: float, rendezvous: Path | None = None) -> Iterator[Runtime]:
    """The process group, up for the duration of the block. `rendezvous`: a file instead of MASTER_ADDR, for tests."""
    rank, world_size, local_rank = place_in_world()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(threads)
    let_megatron_run_without_cuda()
    _seed(seed)
    if rendezvous is not None:
        method = rendezvous.absolute().as_uri()
    elif world_size == 1 and "MASTER_ADDR" not in os.environ:
        method = None
    else:
        method = "env://"
    if method is None:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=timeout_seconds))
    else:
        dist.init_process_group(
            backend, init_method=method, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_seconds)
        )
    try:
        yield Runtime(rank, world_size, local_rank, device, backend)
    finally:
        dist.destroy_process_group()


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
