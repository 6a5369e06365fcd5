"""A rank's part in comparing checkpoints with transformers: one layout after the other in the same processes."""

from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.convert import huggingface, live
from models.convert.safetensors_reader import Reader
from models.model import MoEModel
from parallel.config import ParallelConfig
from parallel.groups import process_groups
from parallel.runtime import Runtime
from tests.parity_passes import compared

Job = tuple[dict[str, Any], Path]  # (layout, directory that tests.parity_passes.prepare made)


def compare(runtime: Runtime, jobs: list[Job]) -> list[dict[str, Any]]:
    """What `compared` says on this rank, and the bytes of tensors that it has read."""
    return [_compare(runtime, *job) for job in jobs]


def _compare(runtime: Runtime, layout: dict[str, Any], directory: Path) -> dict[str, Any]:
    parallel = ParallelConfig(**layout)
    description = huggingface.describe(directory)
    config = ModelConfig.model_validate(description.values)
    config.check_layout(parallel)
    with process_groups(parallel) as groups:
        model = MoEModel(config, groups, runtime.device, seed=1)
        reader = huggingface.open_tensors(description)
        assert isinstance(reader, Reader)
        live.fill(model.bare, groups, huggingface.piece_map(description, config), reader.read)
        return {"bytes": reader.bytes_read, **compared(model, directory)}
