"""A checkpoint within a step: what each rank needs to go on with it, beside the weights.

Microbatches are cut for one layout, so a step goes on only in the one that began it.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from models.model import MoEModel
from moe_rl.checkpoint_paths import begun_layout, check_layout, is_within_step
from parallel.config import ParallelConfig

if TYPE_CHECKING:
    from moe_rl.step_state import StepState


def write(checkpoint: Path, step: "StepState", parallel: ParallelConfig) -> list[Path]:
    """This rank's file, and on rank 0 the layout."""
    path = _file(checkpoint)
    torch.save(step, path)
    if dist.get_rank():
        return [path]
    layout = {"processes": dist.get_world_size(), "parallel": parallel.model_dump()}
    (begun_layout(checkpoint)).write_text(json.dumps(layout), encoding="utf-8")
    return [path, begun_layout(checkpoint)]


def load(checkpoint: Path, model: MoEModel) -> "StepState | None":
    """This rank's part; None where the checkpoint was saved after a step.

    Raises UsageError, on every rank, in another layout or number of processes than it was saved in.
    """
    if not is_within_step(checkpoint):
        return None
    check_layout(checkpoint, model.groups.parallel, dist.get_world_size())
    # pickled by this program a moment before it was ended, and compared with the manifest: no foreign file
    return torch.load(_file(checkpoint), map_location=model.device, weights_only=False)


def _file(checkpoint: Path) -> Path:
    return begun_layout(checkpoint).with_name(f"rank_{dist.get_rank():05d}.pt")
