"""Writes a Hugging Face directory tensor by tensor: at its place it is complete, or it is not there."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from models.convert.placing import placed, writing
from models.convert.safetensors_headers import DTYPES, INDEX, SINGLE

_CODES = {dtype: code for code, dtype in DTYPES.items()}

Shape = tuple[int, ...]


@dataclass
class _Place:
    """Where a tensor goes. written: of its bytes, so far."""

    file: str
    offset: int
    dtype: torch.dtype
    shape: Shape
    written: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Writer:
    """A context in which every tensor of `expected` is added once, in any order, and other files beside them.

    Sizes are known beforehand, so each tensor goes straight to its place in its file; nothing is held. All is written in
    .NAME.part beside `directory` and renamed at the end of the context; an exception removes it. What a killed process left
    there is replaced.
    expected: dtype and shape by name. shard_bytes: of tensors in a file, unless one alone has more.
    Raises UsageError where `directory` is taken, cannot be written, or the disk fills up; RuntimeError where tensors were
    not added as expected.
    """

    def __init__(
        self, directory: Path, expected: Mapping[str, tuple[torch.dtype, Shape]], shard_bytes: int = 5_000_000_000
    ) -> None:
        self._places, self._headers = _layout(expected, shard_bytes)
        self._tensor_bytes = sum(place.nbytes for place in self._places.values())
        self._bytes = self._tensor_bytes + sum(map(len, self._headers.values()))
        self._finished = False
        self._context = self._opened(directory)

    def __enter__(self) -> Self:
        self._context.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.__exit__(kind, error, trace)

    @contextmanager
    def _opened(self, directory: Path) -> Iterator[None]:
        with placed(directory, self._bytes) as self._part:
            for file, header in self._headers.items():
                self._write_file(file, header)
            yield
            self.finish()

    @property
    def directory(self) -> Path:
        """Where the files lie until the context ends."""
        return self._part

    def finish(self) -> None:
        """Writes the index: what was added can be read back. The end of the context does it, if not done."""
        if self._finished:
            return
        if missing := [name for name, place in self._places.items() if place.written != place.nbytes]:
            raise RuntimeError(f"{missing[0]} was not added whole, nor were {len(missing) - 1} others")
        if len(self._headers) > 1:
            weight_map = {name: place.file for name, place in self._places.items()}
            index = {"metadata": {"total_size": self._tensor_bytes}, "weight_map": weight_map}
            self._write_file(INDEX, json.dumps(index, indent=2).encode())
        self._finished = True

    def add(self, name: str, tensor: Tensor) -> None:
        """A whole tensor."""
        place = self._place(name)
        if tuple(tensor.shape) != place.shape:
            raise RuntimeError(f"{name} has shape {tuple(tensor.shape)}, expected was {place.shape}")
        self._write(name, place, 0, tensor)

    def add_rows(self, name: str, start: int, rows: Tensor) -> None:
        """`rows` as tensor[start : start + len(rows)]; every row of a tensor is to be added once."""
        place = self._place(name)
        if tuple(rows.shape[1:]) != place.shape[1:] or not 0 <= start <= start + len(rows) <= place.shape[0]:
            raise RuntimeError(f"{name}: rows {start} on of shape {tuple(rows.shape)} are no part of {place.shape}")
        self._write(name, place, start * math.prod(place.shape[1:]) * place.dtype.itemsize, rows)

    def add_file(self, name: str, content: bytes | Path) -> None:
        """A file beside the tensors, such as config.json: its bytes, or one to copy."""
        if name in (SINGLE, INDEX) or (self._part / name).exists():
            raise RuntimeError(f"{name} is written already")
        self._write_file(name, content if isinstance(content, bytes) else content.read_bytes())

    def _write_file(self, name: str, content: bytes) -> None:
        path = self._part / name
        with writing(path, self._bytes):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise RuntimeError(f"{name} was not expected")
        return self._places[name]

    def _write(self, name: str, place: _Place, offset: int, tensor: Tensor) -> None:
        if tensor.dtype != place.dtype:
            raise RuntimeError(f"{name} is {tensor.dtype}, expected was {place.dtype}")
        data = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        place.written += len(data)
        if place.written > place.nbytes:
            raise RuntimeError(f"{name} was added twice")
        file = self._part / place.file
        with writing(file, self._bytes):
            descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < len(data):
                    done += os.pwrite(descriptor, data[done:], place.offset + offset + done)
            finally:
                os.close(descriptor)


def _layout(expected: Mapping[str, tuple[torch.dtype, Shape]], shard_bytes: int) -> tuple[dict[str, _Place], dict[str, bytes]]:
    """Every tensor's place, and every file's header."""
    shards: list[dict[str, tuple[torch.dtype, Shape]]] = [{}]
    size = 0
    for name, (dtype, shape) in expected.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, tuple(shape))
        size += nbytes
    places: dict[str, _Place] = {}
    headers: dict[str, bytes] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        # wider types first: each tensor is aligned to its type, as the safetensors library does it
        for name, (dtype, shape) in sorted(shard.items(), key=lambda item: -item[1][0].itemsize):
            places[name] = _Place(file, end, dtype, shape)
            stop = end + places[name].nbytes
            content[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [end, stop]}
            end = stop
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
        for name in shard:
            places[name].offset += len(headers[file])
    return {name: places[name] for name in expected}, headers
