"""What converters read from, whatever the format: named tensors, of which a part can be read."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Index = Sequence[slice]


class Stored(Protocol):
    """What is known of a tensor before it is read."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Kind(NamedTuple):
    """That, and no more."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Source(Protocol):
    """A directory of tensors, or a view of one that presents them in another form.

    read: the tensor, or `tensor[index]` where there is one; slices of trailing dimensions may be left out, steps are positive.
    """

    @property
    def names(self) -> Mapping[str, Stored]: ...

    def read(self, name: str, index: Index | None = None) -> Tensor: ...


def ranges(index: Index | None, shape: tuple[int, ...]) -> list[range]:
    """What `index` takes of each dimension of `shape`."""
    index = index or ()
    if len(index) > len(shape):
        raise RuntimeError(f"{len(index)} slices of a tensor of shape {shape}")
    slices = [*index, *[slice(None)] * (len(shape) - len(index))]
    cut = [range(*part.indices(size)) for part, size in zip(slices, shape, strict=True)]
    if any(part.step <= 0 for part in cut):
        raise RuntimeError(f"slices go forwards, got {list(index)}")
    return cut


def hull(part: range) -> tuple[int, int]:
    """The first row, and how many there are from it to the last."""
    return (part[0], part[-1] - part[0] + 1) if part else (0, 0)
