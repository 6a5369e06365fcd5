"""First weights, alike in every layout: each global tensor is drawn from its own seed, and each rank takes its part."""

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from parallel.groups import Groups

_SCALED_DOWN = ("linear_proj.weight", "linear_fc2.weight")  # layers that write into the residual stream


def global_shards(chunks: list[Any], groups: Groups, *, each_expert: bool = True) -> Iterator[Any]:
    """Megatron's ShardedTensor for every parameter and buffer of `chunks`: `.key` names the global tensor, `.data` is this
    rank's part, in place, at `.global_offset` of `.global_shape`.

    each_expert: experts, and gate and up projection, are tensors by themselves; else they are parts of one, as in checkpoints.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    metadata = {"singleton_local_shards": each_expert, "dp_cp_group": groups.collection.dp_cp}
    for chunk in chunks:
        for value in chunk.sharded_state_dict(metadata=metadata).values():
            if isinstance(value, ShardedTensorFactory):  # gate and up projection lie in one parameter
                yield from value.build().values() if isinstance(built := value.build(), dict) else built
            elif isinstance(value, ShardedTensor):
                yield value


@torch.no_grad()
def initialise(chunks: list[Any], model: ModelConfig, groups: Groups, seed: int) -> None:
    """Normal with model.init_std for matrices (less where a layer writes into the residual stream), 1 for norms, else 0."""
    for shard in global_shards(chunks, groups):
        shard.data.copy_(_draw(shard, model, seed))


def _draw(shard: Any, model: ModelConfig, seed: int) -> Tensor:
    key, shape, part = shard.key, shard.global_shape, shard.data
    if len(shape) == 1:
        return torch.ones_like(part) if "norm" in key and key.endswith("weight") else torch.zeros_like(part)
    generator = torch.Generator().manual_seed(_seed_of(key, seed))
    std = model.init_std / math.sqrt(2 * model.layers) if key.endswith(_SCALED_DOWN) else model.init_std
    whole = torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
    where = tuple(slice(start, start + size) for start, size in zip(shard.global_offset, part.shape, strict=True))
    return whole[where].to(part.device, part.dtype)


def _seed_of(key: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=7).digest())
