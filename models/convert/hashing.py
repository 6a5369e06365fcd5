"""Whether two sets of tensors are the same: a hash of each, made from rows, so that no tensor has to be whole in memory."""

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from models.convert.shapes import Shape

_BLOCK = 1 << 24  # bytes of a tensor that are in memory at once


def row_blocks(shape: Shape, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of the first dimension, each of about 16 MB, or of one row."""
    row = math.prod(shape[1:]) * dtype.itemsize
    height = max(1, _BLOCK // max(row, 1))
    for start in range(0, shape[0], height):
        yield slice(start, min(start + height, shape[0]))


def fingerprint(shape: Shape, dtype: torch.dtype, rows: Callable[[slice], Tensor]) -> str:
    """BLAKE2b of type, shape and bytes of a tensor whose `rows` are given."""
    digest = hashlib.blake2b(f"{dtype} {list(shape)}".encode(), digest_size=16)
    for part in row_blocks(shape, dtype):
        digest.update(memoryview(rows(part).contiguous().view(torch.uint8).reshape(-1).numpy()))
    return digest.hexdigest()
