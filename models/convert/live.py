"""The model of one rank and a Hugging Face directory: each rank reads its own part of the tensors, and no more."""

from typing import Any

import torch

from models.convert.pieces import Index, PieceMap, Read
from models.initialise import global_shards
from parallel.groups import Groups


@torch.no_grad()
def fill(chunks: list[Any], groups: Groups, pieces: PieceMap, read: Read) -> None:
    """Weights and buffers of `chunks` from Hugging Face tensors, cast to the model's types. Padded words become 0."""
    for shard in global_shards(chunks, groups, each_expert=False):
        pieces.to_megatron(shard.key, box_of(shard), read, _with_all_dimensions(shard))


def box_of(shard: Any) -> Index:
    """Where a Megatron ShardedTensor lies in its global tensor."""
    sizes = (1,) * shard.prepend_axis_num + tuple(shard.data.shape)
    return tuple(slice(at, at + size) for at, size in zip(shard.global_offset, sizes, strict=True))


def _with_all_dimensions(shard: Any) -> torch.Tensor:
    return shard.data.view((1,) * shard.prepend_axis_num + tuple(shard.data.shape))
