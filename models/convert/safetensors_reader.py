"""Reads Hugging Face's safetensors directories, one tensor or one part of a tensor at a time.

Everything that is wrong with the files is found on opening, from their headers alone; only a disk that fails comes later.
"""

import itertools
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from models.convert.safetensors_headers import Entry, model_entries
from models.convert.storage import Index, hull, ranges
from parallel.errors import UsageError

_RUN = 4096  # bytes: runs shorter than this are read together with what lies between them


class Reader:
    """The tensors of a directory: model.safetensors, or the files that its index names, or every *.safetensors.

    names: in the order of the files and of the tensors in them. bytes_read: of tensors, so far.
    Raises UsageError, with the file and the tensor, where the files are missing, damaged or contradict each other.
    """

    def __init__(self, directory: Path) -> None:
        self.bytes_read = 0
        self.names: Mapping[str, Entry] = model_entries(directory)

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """The tensor, or `tensor[index]`: a fresh one, contiguous.

        Of a part, runs of bytes are read from the first to the last that is needed in the innermost dimension that is cut
        (what a step skips there is read, too); in a dimension further out where those would be shorter than 4 KiB.
        Raises KeyError for a name that is not in `names`, UsageError where the file cannot be read any more.
        """
        entry = self.names[name]
        if not entry.shape:
            return self._runs(name, entry, [entry.offset], entry.dtype.itemsize).view(entry.dtype).reshape(())
        cut = ranges(index, entry.shape)
        depth = _depth(entry, cut)
        sizes = [math.prod(entry.shape[i + 1 :]) * entry.dtype.itemsize for i in range(depth + 1)]  # of one row, in bytes
        first, rows = hull(cut[depth])
        starts = (
            entry.offset + sum(i * size for i, size in zip((*outer, first), sizes, strict=True))
            for outer in itertools.product(*cut[:depth])
        )
        outer_shape = [len(part) for part in cut[:depth]]
        read = self._runs(name, entry, starts, rows * sizes[depth], math.prod(outer_shape)).view(entry.dtype)
        read = read.reshape(*outer_shape, rows, *entry.shape[depth + 1 :])
        inner = [slice(part.start, part.stop, part.step) for part in cut[depth + 1 :]]
        part = read[(*[slice(None)] * depth, slice(None, None, cut[depth].step), *inner)]
        return part if part.numel() == read.numel() else part.clone()

    def _runs(self, name: str, entry: Entry, starts: Iterable[int], run: int, count: int = 1) -> Tensor:
        """`run` bytes from each of `count` starts, one behind the other."""
        # Read into a buffer, never mapped: pages of a mapped file count in RSS and in RLIMIT_AS as if the model were in memory
        buffer = torch.empty(count * run, dtype=torch.uint8)
        if not buffer.numel():
            return buffer
        view = memoryview(buffer.numpy())
        try:
            descriptor = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                whole = all(_read_run(descriptor, view[i * run : (i + 1) * run], start) for i, start in enumerate(starts))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UsageError(f"{entry.file}: tensor {name} cannot be read: {error.strerror}; fetch the file again") from error
        if not whole:
            raise UsageError(f"{entry.file}: tensor {name} is cut off now, on opening it was not; fetch the file again")
        self.bytes_read += len(view)
        return buffer


def _depth(entry: Entry, cut: list[range]) -> int:
    """The dimension whose hull is one run of bytes: the innermost that is cut, unless that makes many tiny runs."""
    whole = [len(part) == size for part, size in zip(cut, entry.shape, strict=True)]
    depth = max((i for i in range(len(cut)) if not whole[i]), default=0)
    row = math.prod(entry.shape[depth + 1 :]) * entry.dtype.itemsize
    while math.prod(map(len, cut[:depth])) > 1 and hull(cut[depth])[1] * row < _RUN:
        row *= entry.shape[depth]
        depth -= 1
    return depth


def _read_run(descriptor: int, view: memoryview, start: int) -> bool:
    """Fills `view`, or gives False where the file ends."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], start + done)
        if not count:
            return False
        done += count
    return True
