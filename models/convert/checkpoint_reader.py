"""Reads the weights of checkpoints in Megatron's sharded format, of any layout, without Megatron and in one process."""

import io
import json
import math
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from models.convert.checkpoint_writer import BACKEND, CONFIG, METADATA
from models.convert.storage import Index, Kind, hull, ranges
from parallel.errors import UsageError

_AGAIN = "name a complete checkpoint"
# What pickle raises where a bit of what it reads is another one
_UNPICKLING = (
    *(OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, ImportError, pickle.UnpicklingError),
    *(ArithmeticError, MemoryError, RuntimeError, SystemError),
)


class CheckpointReader:
    """The weights of a checkpoint, as global tensors; what belongs to the optimizer and objects are left out.

    names: dtype and global shape by the name that Megatron's sharded state has. bytes_read: of chunks, so far.
    Raises UsageError, with the file and the tensor, where it is no checkpoint, or not all of one.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bytes_read = 0
        metadata = _metadata(directory)
        self._last: tuple[MetadataIndex, Tensor] | None = None
        try:
            self._stored: Mapping[MetadataIndex, Any] = metadata.storage_data or {}
            self._tensors = {
                key: value
                for key, value in metadata.state_dict_metadata.items()
                if isinstance(value, TensorStorageMetadata) and not key.startswith("optimizer.")
            }
            self.names: Mapping[str, Kind] = {
                key: Kind(value.properties.dtype, tuple(value.size)) for key, value in self._tensors.items()
            }
            self._check_files()
        except (AttributeError, TypeError, ValueError) as error:  # parts of what was pickled are not what they should be
            raise UsageError(f"{directory / METADATA}: cannot be read: {error}; {_AGAIN}") from error

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """The tensor, or `tensor[index]`: a fresh one. Of the chunks that ranks saved, those that hold some of it are read
        one after the other, and the last is kept, since a tensor is often read in parts.

        Raises KeyError for a name that is not in `names`, UsageError where a file cannot be read.
        """
        kind = self.names[name]
        cut = ranges(index, kind.shape)
        firsts, counts = zip(*map(hull, cut), strict=True) if cut else ((), ())
        target = torch.empty(counts, dtype=kind.dtype)
        for chunk in self._tensors[name].chunks:
            parts = []  # per dimension: where the overlap starts in the target and in the chunk, and its length
            for first, count, offset, size in zip(firsts, counts, chunk.offsets, chunk.sizes, strict=True):
                start = max(first, offset)
                parts.append((start - first, start - offset, min(first + count, offset + size) - start))
            if all(length > 0 for _, _, length in parts):
                into = tuple(slice(start, start + length) for start, _, length in parts)
                taken = tuple(slice(start, start + length) for _, start, length in parts)
                target[into] = self._chunk(name, chunk)[taken]
        steps = tuple(slice(None, None, part.step) for part in cut)
        return target[steps].clone() if any(part.step > 1 for part in cut) else target

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        index = MetadataIndex(name, chunk.offsets)
        if self._last is not None and self._last[0] == index:
            return self._last[1]
        self._last = None  # its memory goes before the next takes its own
        stored = self._stored[index]
        file = self.directory / stored.relative_path
        try:
            with file.open("rb") as stream:
                window: Any = _Window(stream, stored.offset, stored.length)  # torch asks for more methods than it uses
                tensor = torch.load(window, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise UsageError(f"{file}: tensor {name} cannot be read: {reason}; {_AGAIN}") from error
        if tensor.dtype != self.names[name].dtype or tensor.shape != chunk.sizes:
            raise UsageError(
                f"{file}: tensor {name} is {tensor.dtype} {list(tensor.shape)} there, {METADATA} says "
                f"{self.names[name].dtype} {list(chunk.sizes)}; {_AGAIN}"
            )
        self.bytes_read += tensor.nbytes
        self._last = (index, tensor)
        return tensor

    def _check_files(self) -> None:
        """That all chunks are there, as far as can be said without reading them."""
        sizes: dict[str, int] = {}
        for name, tensor in self._tensors.items():
            if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) < math.prod(tensor.size):
                raise UsageError(f"{self.directory / METADATA}: not all of the tensor {name} was saved; {_AGAIN}")
            for chunk in tensor.chunks:
                stored = self._stored.get(MetadataIndex(name, chunk.offsets))
                if stored is None:
                    raise UsageError(f"{self.directory / METADATA}: does not say where the tensor {name} lies; {_AGAIN}")
                file = self.directory / stored.relative_path
                if stored.relative_path not in sizes:
                    if not file.is_file():
                        raise UsageError(f"{file}: is not there, and holds the tensor {name}; {_AGAIN}")
                    sizes[stored.relative_path] = file.stat().st_size
                if stored.offset + stored.length > sizes[stored.relative_path]:
                    raise UsageError(
                        f"{file}: tensor {name} is cut off: it ends at byte {stored.offset + stored.length}, the file at "
                        f"{sizes[stored.relative_path]}; {_AGAIN}"
                    )


def _metadata(directory: Path) -> Metadata:
    config = directory / CONFIG
    if not config.is_file():
        raise UsageError(f"{directory}: is no complete checkpoint, it has no {CONFIG}; name a step_NNNNNN of a run, or weights")
    try:
        backend = json.loads(config.read_bytes())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{config}: cannot be read: {error}; {_AGAIN}") from error
    if backend != BACKEND:
        raise UsageError(f"{config}: sharded_backend={backend}: must be {BACKEND}; save it in that format")
    file = directory / METADATA
    try:
        metadata = pickle.loads(file.read_bytes())
    except _UNPICKLING as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise UsageError(f"{file}: cannot be read: {reason}; {_AGAIN}") from error
    if not isinstance(metadata, Metadata):
        raise UsageError(f"{file}: holds {type(metadata).__name__}, no checkpoint's table of contents; {_AGAIN}")
    return metadata


class _Window(io.RawIOBase):
    """`size` bytes of a file from `start`, as a file of its own, which torch.load asks for."""

    def __init__(self, stream: io.BufferedReader, start: int, size: int) -> None:
        self._stream, self._start, self._size = stream, start, size
        stream.seek(start)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell() - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._size}[whence]
        return self._stream.seek(self._start + base + offset) - self._start

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        return self._stream.readinto(view[: max(0, self._size - self.tell())])
