"""A rank's part in comparing checkpoints with transformers."""

from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.convert import huggingface, live
from models.convert.safetensors_reader import Reader
from models.model import MoEModel
from parallel.config import ParallelConfig
from parallel.groups import Groups, process_groups
from parallel.runtime import Runtime
from tests.parity_passes import compared


def compare(runtime: Runtime, layout: dict[str, Any], directories: list[Path]) -> list[dict[str, Any]]:
    """What `compared` says of each directory (tests.parity_passes.prepare made them) on this rank, and the bytes of tensors
    that it has read."""
    with process_groups(ParallelConfig(**layout)) as groups:
        return [_compare(runtime, groups, directory) for directory in directories]


def _compare(runtime: Runtime, groups: Groups, directory: Path) -> dict[str, Any]:
    description = huggingface.describe(directory)
    config = ModelConfig.model_validate(description.values)
    config.check_layout(groups.parallel)
    model = MoEModel(config, groups, runtime.device, seed=1)
    reader = huggingface.open_tensors(description)
    assert isinstance(reader, Reader)
    live.fill(model.bare, groups, huggingface.piece_map(description, config), reader.read)
    return {"bytes": reader.bytes_read, **compared(model, directory)}
