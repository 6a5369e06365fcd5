"""What the RL layer exchanges between ranks: rollouts, metrics, drift sums."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moe_rl.drift.sums import DriftSums
from moe_rl.metrics import Metrics
from parallel.groups import Groups

Item = TypeVar("Item")


def from_model_main[Item](value: Item | None, groups: Groups) -> Item:
    """The value that the main rank of this model copy has, on all its ranks."""
    return _broadcast(value, dist.get_global_rank(groups.model.group, 0), groups)


def _broadcast(value: Any, source: int, groups: Groups) -> Any:
    if groups.model.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, source, group=groups.model.group)
    return box[0]


def from_main[Item](value: Item | None) -> Item:
    """The value that rank 0 has, on all ranks."""
    box = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, 0)
    return box[0]  # pyright: ignore[reportReturnType]


def gather_over_data[Item](mine: Sequence[Item], groups: Groups) -> list[Item]:
    """Every data-parallel rank's items, on all of them, rank by rank."""
    if groups.data.size == 1:
        return list(mine)
    parts: list[Any] = [None] * groups.data.size
    dist.all_gather_object(parts, list(mine), group=groups.data.group)
    return [item for part in parts for item in part]


def reduce_metrics(metrics: Metrics | None, groups: Groups) -> dict[str, float]:
    """Means and maxima over all data-parallel ranks, on every rank. Only the last stage has metrics, the others None."""
    values = None
    if metrics is not None:
        sums, maxima = metrics.vector(torch.accelerator.current_accelerator() if torch.cuda.is_available() else None)
        dist.all_reduce(sums, group=groups.data.group)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=groups.data.group)
        metrics.load_vector(sums, maxima)
        values = metrics.means() | metrics.maxima()
    if groups.pipeline.size > 1:
        values = _broadcast(values, groups.last_stage_main, groups)
    assert values is not None
    return values


def reduce_drift(minibatches: Sequence[DriftSums]) -> list[DriftSums]:
    """Sums over every rank: tensor and data-parallel ranks hold distinct tokens, pipeline stages distinct layers."""
    if not minibatches:
        return []
    vectors = torch.stack([sums.vector() for sums in minibatches])
    dist.all_reduce(vectors)
    layers, experts = minibatches[0].load.shape
    return [DriftSums.from_vector(vector, layers, experts) for vector in vectors]
