"""Checkpoints of other layouts are read tensor by tensor, and what was written that way is loaded in other layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.convert.checkpoint_reader import CheckpointReader
from moe_rl import checkpoint
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built
from tests.distributed.ranks import run_on_ranks
from tests.unit.test_convert_checkpoint import global_tensors, written

pytestmark = pytest.mark.distributed

MODEL: dict[str, Any] = dict(dense_layers=[1], shared_ffn=32)
LAYOUTS: list[dict[str, Any]] = [
    dict(expert=2),
    dict(tensor=2),
    dict(pipeline=2, virtual_pipeline=2),
]


def load_and_save(runtime: Runtime, layout: dict[str, Any], source: Path, target: Path) -> None:
    with built(Case(layout, MODEL, seed=2), runtime) as model:
        checkpoint.load_weights(source, model)
        checkpoint.save_weights(target, model)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_come_through_another_layout(tmp_path: Path, layout: dict[str, Any]) -> None:
    """To the bit: written by one process, loaded and saved by two, and read again by one."""
    with started(seed=0, threads=1, timeout_seconds=60) as runtime, built(Case(model=MODEL, seed=1), runtime) as model:
        wanted = global_tensors(model)
    written(tmp_path / "written", wanted)
    run_on_ranks(load_and_save, 2, layout, tmp_path / "written", tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 2
    reader = CheckpointReader(tmp_path / "saved")
    assert reader.names.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(reader.read(name), tensor), name
        middle = tuple(slice(size // 4, size - size // 4) for size in tensor.shape)  # across the ranks' parts
        assert torch.equal(reader.read(name, middle), tensor[middle]), name
