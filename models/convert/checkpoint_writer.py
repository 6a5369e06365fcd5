"""Writes a checkpoint in Megatron's sharded format tensor by tensor, in one process and without Megatron.

Megatron's `torch_dist` is torch.distributed.checkpoint's files with a metadata.json beside them. torch's own writer keeps
every tensor of a file in memory until the file is closed; this one writes the same bytes and keeps none.
"""

import io
import json
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from models.convert import manifest
from models.convert.placing import placed, writing

Shape = tuple[int, ...]

BACKEND = "torch_dist"
CONFIG, METADATA = "metadata.json", ".metadata"

_OVERHEAD = 4096  # bytes: more than a tensor needs in the files beyond its own


class CheckpointWriter:
    """A context in which every tensor of `expected` is added once, in any order. What is added is written at once.

    As `safetensors_writer.Writer`: beside `directory` until all is there, then renamed; nothing stays after an exception.
    expected: dtype and global shape by the names that Megatron's sharded state has. file_bytes: a file that has as many is
    the last tensor's, and the next begins another.
    Raises UsageError where `directory` is taken, cannot be written, or the disk fills up; RuntimeError where tensors were
    not added as expected.
    """

    def __init__(
        self, directory: Path, expected: Mapping[str, tuple[torch.dtype, Shape]], file_bytes: int = 5_000_000_000
    ) -> None:
        self._expected = expected
        self._file_bytes = file_bytes
        self._missing = {name: math.prod(shape) for name, (_, shape) in expected.items()}
        self._bytes = sum(self._missing[name] * dtype.itemsize + _OVERHEAD for name, (dtype, _) in expected.items())
        self._chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in expected}
        self._stored: dict[MetadataIndex, _StorageInfo] = {}
        self._digests: dict[str, manifest.Digest] = {}  # by the name of a file
        self._finished = False
        self._context = self._opened(directory)

    def __enter__(self) -> Self:
        self._context.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.__exit__(kind, error, trace)

    def add(self, name: str, tensor: Tensor) -> None:
        """A whole tensor."""
        self._add(name, (0,) * tensor.ndim, tensor)

    def add_rows(self, name: str, start: int, rows: Tensor) -> None:
        """`rows` as tensor[start : start + len(rows)]: a chunk by itself, such as one expert. Every row is added once."""
        self._add(name, (start, *(0,) * (rows.ndim - 1)), rows)

    @property
    def directory(self) -> Path:
        """Where the checkpoint lies until the context ends: other files may be put beside it."""
        return self._part

    def finish(self) -> None:
        """Writes the tables of contents: what was added can be read back. The end of the context does it, if not done."""
        if self._finished:
            return
        if missing := [name for name, elements in self._missing.items() if elements]:
            raise RuntimeError(f"{missing[0]} was not added whole, nor were {len(missing) - 1} others")
        self._write_contents()
        self._finished = True

    @contextmanager
    def _opened(self, directory: Path) -> Iterator[None]:
        with placed(directory, self._bytes) as self._part:
            self._stream = self._next_file()
            try:
                yield
                self.finish()
            finally:
                self._stream.close()
            known = {name: digest.entry for name, digest in self._digests.items()}
            with writing(self._part / manifest.MANIFEST, self._bytes):
                manifest.write(self._part, manifest.listed(self._part, known))

    def _add(self, name: str, offsets: Shape, chunk: Tensor) -> None:
        if name not in self._expected:
            raise RuntimeError(f"{name} was not expected")
        dtype, shape = self._expected[name]
        size = tuple(chunk.shape)
        if chunk.dtype != dtype:
            raise RuntimeError(f"{name} is {chunk.dtype}, expected was {dtype}")
        if size[1:] != shape[1:] or len(size) != len(shape) or size and not 0 <= offsets[0] <= offsets[0] + size[0] <= shape[0]:
            raise RuntimeError(f"{name}: {size} at {offsets} is no part of the expected {shape}")
        self._missing[name] -= chunk.numel()
        if self._missing[name] < 0:
            raise RuntimeError(f"{name} was added twice")
        self._chunks[name].append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(size)))
        chunk = chunk.detach().cpu().contiguous()
        if chunk.untyped_storage().nbytes() != chunk.nbytes:
            chunk = chunk.clone()  # else all that lies behind the part would be saved with it
        if self._stream.tell() >= self._file_bytes:
            self._stream.close()
            self._stream = self._next_file()
        self._stored[MetadataIndex(name, offsets)] = self._save(chunk)

    def _next_file(self) -> io.FileIO:
        path = self._part / f"__0_{len(self._digests)}.distcp"
        self._digests[path.name] = manifest.Digest()
        with writing(path, self._bytes):
            return io.FileIO(path, "w")

    def _save(self, value: Any) -> _StorageInfo:
        """Where the value lies, as torch.save writes it."""
        path = Path(str(self._stream.name))
        with writing(path, self._bytes):
            offset = self._stream.tell()
            # Any: torch asks for more of a stream's methods than it uses
            stream: Any = _Whole(self._stream, self._digests[path.name])
            try:
                torch.save(value, stream)
            except RuntimeError as error:
                if error.__context__ is not None:  # torch tells of its own confusion where the stream raised
                    raise error.__context__ from None
                raise
            return _StorageInfo(path.name, offset, self._stream.tell() - offset)

    def _write_contents(self) -> None:
        """What Megatron's state has beside the weights, and the tables of contents."""
        common = self._save([{"content_metadata": {"ranks": 1}}])
        nothing = self._save([None])
        objects = {"common_state/shard_0_1": common} | dict.fromkeys(extra_states(self._expected), nothing)
        contents: dict[str, STORAGE_TYPES] = {key: BytesStorageMetadata() for key in objects}
        for name, (dtype, shape) in self._expected.items():
            contents[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), self._chunks[name])
        metadata = Metadata(
            contents,
            storage_data=self._stored | {MetadataIndex(key): info for key, info in objects.items()},
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        with writing(self._part / METADATA, self._bytes):
            (self._part / METADATA).write_bytes(pickle.dumps(metadata))
            (self._part / CONFIG).write_text(json.dumps({"sharded_backend": BACKEND, "sharded_backend_version": 1}))


def extra_states(expected: Mapping[str, tuple[torch.dtype, Shape]]) -> Iterable[str]:
    """The keys of the extra state that each of Megatron's parallel linear layers has, and each expert's apart: it is None
    but where Transformer Engine computes in float8, and yet a model refuses a checkpoint without it."""
    for name, (_, shape) in expected.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2].startswith("linear_"):
            count = shape[0] if ".experts.experts." in name else 1
            yield from (f"{module}._extra_state/shard_{i}_{count}" for i in range(count))


class _Whole(io.RawIOBase):
    """A stream that writes all that it is given, or raises, and digests it. Closing it leaves the file open."""

    def __init__(self, stream: io.FileIO, digest: manifest.Digest) -> None:
        self._stream, self._digest = stream, digest

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += self._stream.write(view[done:]) or 0
        self._digest.update(view)
        return len(view)
