"""A disk that is full, for all ranks or for one alone, ends a save on all of them with the same line and loses nothing."""

import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from models.config import OptimizerConfig
from models.model import MoEModel
from models.optimizer import Optimizer
from moe_rl import checkpoint
from moe_rl.checkpoint import CriticState, Progress, Saver
from moe_rl.config import CheckpointSection
from parallel.errors import UsageError
from parallel.runtime import Runtime
from tests.distributed.passes import Case
from tests.distributed.ranks import run_on_ranks
from tests.distributed.value_passes import both, update_policy, update_values
from tests.unit.test_checkpoint_damage import content, tmpfs

pytestmark = pytest.mark.distributed

SETTINGS = OptimizerConfig(lr=1e-2)
ROOM = "8m"  # for one checkpoint and not for two
CASE = Case(layout=dict(expert=2), model=dict(layers=1))


def saves(runtime: Runtime, folder: Path, alone: bool) -> list[dict[str, Any]]:
    """What this rank has seen of a first save, two that find no room, and one that does again: without and with a thread.
    alone: on rank 1 its file of the policy does not fit, and that of the critic does; else the disk itself is full."""
    with both(CASE, runtime) as (policy, model):
        optimizer, critic = policy.optimizer(SETTINGS, 20), CriticState(model, model.optimizer(SETTINGS, 20))
        return [_saves(runtime, folder, policy, optimizer, critic, background, alone) for background in (False, True)]


def _saves(
    runtime: Runtime, folder: Path, policy: MoEModel, optimizer: Optimizer, critic: CriticState, background: bool, alone: bool
) -> dict[str, Any]:
    directory = folder / f"checkpoints_{background}"
    saver = Saver(directory, CheckpointSection(asynchronous=background, keep=1))

    def save(step: int) -> str:
        try:
            saver.save(Progress(step, 0, 0, 0.0), policy, optimizer, critic=critic)
            saver.finish()
        except UsageError as error:
            return str(error)
        return ""

    found: dict[str, Any] = {"first": save(1), "before": content(directory)}
    update_policy(policy, optimizer, 0)
    update_values(*critic, 0)
    saved = directory / "step_000001"
    sizes = [(saved / place).stat().st_size for place in ("__1_0.distcp", "critic/__1_0.distcp")]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if alone and runtime.rank == 1:
        assert sizes[1] < sizes[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (sum(sizes) // 2, limits[1]))
    found |= {"second": save(2), "again": save(2)}
    dist.barrier()  # rank 0 clears away what was written
    found["after"] = content(directory)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    path = checkpoint.intact(directory, print)
    assert path is not None
    found |= {"step": checkpoint.load(path, policy, optimizer, critic).step, "room": save(3) if alone else ""}
    dist.barrier()
    if not alone and runtime.is_main:
        shutil.rmtree(directory)
    dist.barrier()
    return found


def assert_nothing_lost(ranks: list[list[dict[str, Any]]], reason: str) -> None:
    (first, behind), other = ranks
    assert [first["second"], behind["second"]] == [one["second"] for one in other]
    for found in (first, behind, *other):
        assert found["first"] == found["room"] == ""
        assert found["again"] == found["second"]
        assert re.search(rf"step_000002: cannot be saved: .*{reason}; what was saved before is as it was", found["second"])
        assert found["after"] == found["before"] and found["step"] == 1


def test_a_full_disk(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", ROOM) as disk:
        assert_nothing_lost(run_on_ranks(saves, 2, disk, False), "No space left on device")


def test_one_rank_alone_cannot_write_one_of_its_files(tmp_path: Path) -> None:
    assert_nothing_lost(run_on_ranks(saves, 2, tmp_path, True), "File too large")
    for directory in tmp_path.iterdir():
        assert [path.name for path in directory.iterdir()] == ["step_000003"]
