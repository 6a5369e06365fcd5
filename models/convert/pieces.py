"""How two sets of tensors hold the same numbers: pieces, each a block of one tensor that is a block of another.

A piece says so in both directions, so what reads it one way and what reads it the other way cannot disagree. Blocks are
slices with a start, a stop and a step, so the part of a piece that a rank holds is a piece again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from models.convert.shapes import Shape

Index = tuple[slice, ...]
Read = Callable[[str, Index], Tensor]  # (name, part of it) -> that part


@dataclass(frozen=True)
class Piece:
    """hf[name][source] == megatron[key][target], after a transposition of the last two dimensions where `transposed`.

    The blocks have one shape, but for leading dimensions of size 1 (an expert's own tensor, and its place among experts).
    """

    name: str
    source: Index
    key: str
    target: Index
    transposed: bool = False

    def __post_init__(self) -> None:
        ours, theirs = list(lengths(self.target)), list(lengths(self.source))
        if self.transposed:
            theirs[-2:] = theirs[:-3:-1]
        depth = min(len(ours), len(theirs))
        same = ours[-depth:] == theirs[-depth:] and all(n == 1 for n in (*ours[:-depth], *theirs[:-depth]))
        assert same, f"{self.name}{self.source} is no {self.key}{self.target}"

    def within(self, box: Index) -> Self | None:
        """The part of the piece whose target lies in `box` (steps of 1); None where there is none."""
        return self._cut([_overlap(side, bound) for side, bound in zip(self.target, box, strict=True)], "target")

    def from_within(self, box: Index) -> Self | None:
        """The same for its source."""
        return self._cut([_overlap(side, bound) for side, bound in zip(self.source, box, strict=True)], "source")

    def _cut(self, overlaps: Sequence[range], cut: str) -> Self | None:
        if any(not overlap for overlap in overlaps):
            return None
        source = _narrow(self.source, overlaps, self.transposed and cut == "target")
        return replace(self, source=source, target=_narrow(self.target, overlaps, self.transposed and cut == "source"))


def lengths(index: Index) -> Shape:
    """The shape of a block."""
    return tuple(len(range(s.start, s.stop, s.step or 1)) for s in index)


def whole(shape: Shape) -> Index:
    """All of a tensor."""
    return tuple(slice(0, size) for size in shape)


def _overlap(side: slice, bound: slice) -> range:
    """Which of the steps of `side` fall into `bound`."""
    steps = range(side.start, side.stop, side.step or 1)
    first = max(0, -(-(bound.start - steps.start) // steps.step))
    last = min(len(steps), -(-(bound.stop - steps.start) // steps.step))
    return range(first, max(first, last))


def _narrow(index: Index, overlaps: Sequence[range], transposed: bool) -> Index:
    """`index` restricted to these steps, counted from the last dimension."""
    taken = list(overlaps)
    if transposed:
        taken[-2:] = taken[:-3:-1]
    depth = min(len(index), len(taken))
    narrowed = list(index)
    for place in range(-depth, 0):
        side = range(index[place].start, index[place].stop, index[place].step or 1)[taken[place].start : taken[place].stop]
        narrowed[place] = slice(side.start, side.stop, side.step)
    return tuple(narrowed)


class PieceMap:
    """All pieces of one model, by either side."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.by_name: dict[str, list[Piece]] = defaultdict(list)
        self.by_key: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces:
            self.by_name[piece.name].append(piece)
            self.by_key[piece.key].append(piece)

    def hf_shapes(self) -> dict[str, Shape]:
        """The Hugging Face tensors that there must be, in Megatron's order."""
        return {name: self.hf_shape(name) for name in self.by_name}

    def hf_shape(self, name: str) -> Shape:
        return tuple(max(side.stop for side in sides) for sides in zip(*(p.source for p in self.by_name[name]), strict=True))

    def check(self, shapes: Mapping[str, Shape], padded: Mapping[str, Shape]) -> None:
        """That every element of either side is in exactly one piece; AssertionError says which are not.

        padded: the part of a Megatron tensor that has a counterpart, where that is not all of it.
        """
        for key, shape in shapes.items():
            _check_cover(key, padded.get(key, shape), [p.target for p in self.by_key.get(key, [])])
        assert not (unknown := self.by_key.keys() - shapes.keys()), f"pieces of {sorted(unknown)}, which the model lacks"
        for name, shape in self.hf_shapes().items():
            _check_cover(name, shape, [p.source for p in self.by_name[name]])

    def to_megatron(self, key: str, box: Index, read: Read, into: Tensor) -> None:
        """Fills `into`, which is megatron[key][box], from Hugging Face tensors. What has no counterpart becomes 0."""
        into.zero_()
        for piece in self.by_key[key]:
            if part := piece.within(box):
                block = read(part.name, part.source)
                block = block.mT if part.transposed else block
                place = _relative(part.target, box)
                into[place] = block.reshape(lengths(place)).to(into.dtype)

    def to_hf(self, name: str, read: Read, rows: slice | None = None) -> Tensor:
        """One Hugging Face tensor, or these rows of it, from Megatron's, which `read` gives."""
        shape = self.hf_shape(name)
        box = (rows or slice(0, shape[0]), *whole(shape[1:]))
        tensor: Tensor | None = None
        for piece in self.by_name[name]:
            if part := piece.from_within(box):
                block, place = read(part.key, part.target), _relative(part.source, box)
                size = lengths(place)
                block = block.reshape(*size[:-2], size[-1], size[-2]).mT if part.transposed else block.reshape(size)
                tensor = torch.empty(lengths(box), dtype=block.dtype) if tensor is None else tensor
                tensor[place] = block
        assert tensor is not None
        return tensor


def _relative(index: Index, box: Index) -> Index:
    return tuple(slice(s.start - b.start, s.stop - b.start, s.step) for s, b in zip(index, box, strict=True))


def _check_cover(name: str, shape: Shape, blocks: Sequence[Index]) -> None:
    count = torch.zeros(shape, dtype=torch.uint8)
    for block in blocks:
        count[block] += 1
    assert bool((count == 1).all()), (
        f"{name} {shape}: {int((count == 0).sum())} elements in no piece, {int((count > 1).sum())} twice"
    )
