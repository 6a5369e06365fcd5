"""A checkpoint within a step: what each rank needs to go on with it, beside the weights.

Microbatches are cut for one layout, so a step goes on only in the one that began it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from models.model import MoEModel
from parallel.config import ParallelConfig
from parallel.errors import UsageError

if TYPE_CHECKING:
    from moe_rl.step_state import StepState


def directory(checkpoint: Path) -> Path:
    return checkpoint / "begun"


def write(checkpoint: Path, step: "StepState", parallel: ParallelConfig) -> Path:
    """This rank's file."""
    path = _file(checkpoint)
    torch.save({"ranks": dist.get_world_size(), "layout": parallel.model_dump(), "step": step}, path)
    return path


def load(checkpoint: Path, model: MoEModel) -> "StepState | None":
    """This rank's part; None where the checkpoint was saved after a step.

    Raises UsageError, on every rank, in another layout or number of processes than it was saved in.
    """
    if not directory(checkpoint).is_dir():
        return None
    file, layout = _file(checkpoint), model.groups.parallel.model_dump()
    # pickled by this program a moment before it was ended, and compared with the manifest: no foreign file
    saved = torch.load(file, map_location=model.device, weights_only=False) if file.exists() else None
    if saved is None or saved["ranks"] != dist.get_world_size() or saved["layout"] != layout:
        ranks, was = len(list(directory(checkpoint).iterdir())), (saved or {}).get("layout", {})
        changed = ", ".join(f"parallel.{key}={value}" for key, value in was.items() if value != layout[key])
        raise UsageError(
            f"{checkpoint}: was saved within a step, which goes on only in the layout that began it: {ranks} processes"
            f"{' with ' if changed else ''}{changed}; use that, or remove this directory to go on from the one before"
        )
    return saved["step"]


def _file(checkpoint: Path) -> Path:
    return directory(checkpoint) / f"rank_{dist.get_rank():05d}.pt"
