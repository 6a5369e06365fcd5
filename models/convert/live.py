"""The model of one rank and a Hugging Face directory: each rank reads its own part of the tensors, and no more."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models.convert.huggingface import describe, head_differs, head_is_embedding, opened
from models.convert.pieces import Index, PieceMap, Read
from models.initialise import global_shards
from models.transformer import Transformer
from parallel.groups import Groups


def load(directory: Path, model: Transformer) -> None:
    """Weights and buffers of a live model, in any layout (collective).

    Raises UsageError, on every rank before any weight has changed, where a tensor is missing, unexpected or misshapen.
    """
    description = describe(directory)
    pieces, reader, dropped = opened(description, model.config)
    same = torch.tensor(head_is_embedding(reader, dropped, dist.get_rank(), dist.get_world_size()), dtype=torch.int)
    dist.all_reduce(same := same.to(model.device), dist.ReduceOp.MIN)
    if not same:
        raise head_differs(description)
    fill(model.bare, model.groups, pieces, reader.read)


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
