"""What lies where in safetensors files: their headers and the index of a directory, checked.

Format: https://huggingface.co/docs/safetensors. Several files are one model, as transformers shards it.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel.errors import UsageError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_HEADER_LIMIT = 100_000_000  # bytes; that of the safetensors library


@dataclass(frozen=True)
class Entry:
    """A tensor that can be read. offset: in bytes, from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def model_entries(directory: Path) -> dict[str, Entry]:
    """The tensors of a directory: of model.safetensors, or of the files that its index names, or of every *.safetensors.

    In the order of the files and of the tensors in them. Raises UsageError, with the file and the tensor, where files are
    missing, damaged or contradict each other.
    """
    index = directory / INDEX
    listed = {} if (directory / SINGLE).is_file() or not index.is_file() else _weight_map(index)
    if listed:
        files = [directory / name for name in sorted(set(listed.values()))]
        if absent := [file.name for file in files if not file.is_file()]:
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise UsageError(f"{index}: names {absent[0]}{more}, which is not there; fetch it, the weights are incomplete")
    else:
        files = [directory / SINGLE] if (directory / SINGLE).is_file() else _unlisted(directory)
    found: dict[str, Entry] = {}
    for file in files:
        for name, entry in file_entries(file):
            if name in found:
                raise UsageError(
                    f"{file}: tensor {name} is also in {found[name].file.name}; each tensor must lie in one file, "
                    "remove the file that is not part of the model"
                )
            found[name] = entry
    for name, file_name in listed.items():
        if name not in found or found[name].file != directory / file_name:
            raise UsageError(f"{directory / file_name}: lacks the tensor {name} that {INDEX} lists in it; fetch both again")
    return found


def file_entries(file: Path) -> Iterator[tuple[str, Entry]]:
    """The tensors of one file, by offset. Raises UsageError where header and file do not fit each other."""
    header, end, size = _header(file)
    entries = [(name, *_entry(file, name, value, end)) for name, value in header.items() if name != "__metadata__"]
    for name, entry, stop in sorted(entries, key=lambda item: (item[1].offset, item[2])):
        if stop - entry.offset != entry.nbytes:
            raise UsageError(
                f"{file}: tensor {name}: shape {list(entry.shape)} of {str(entry.dtype).removeprefix('torch.')} takes "
                f"{entry.nbytes} bytes, the header gives it {stop - entry.offset}; fetch the file again"
            )
        if entry.offset != end:
            raise UsageError(f"{file}: tensor {name} does not begin where the one before it ends; fetch the file again")
        if stop > size:
            raise UsageError(
                f"{file}: tensor {name} is cut off: it ends at byte {stop}, the file at {size}; fetch the file again"
            )
        end = stop
        yield name, entry
    if end != size:
        raise UsageError(f"{file}: has {size - end} bytes behind its last tensor; fetch the file again")


def _header(file: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where it ends, and the size of the file, in bytes."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            text = stream.read(length) if length <= _HEADER_LIMIT else b""
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    if start == b"version ":
        raise UsageError(f"{file}: is a Git LFS pointer, not the weights; fetch them with git lfs pull")
    if len(start) < 8 or not length or len(text) < length:
        raise UsageError(f"{file}: has no safetensors header ({size} bytes in all); fetch the file again")
    header = _json_object(file, text)
    return header, 8 + length, size


def _entry(file: Path, name: str, value: Any, data: int) -> tuple[Entry, int]:
    """What the header says of a tensor, and where it ends. data: where the header does."""
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(stop)]} if all(
            isinstance(size, int) and size >= 0 for size in shape
        ):
            if dtype not in DTYPES:
                raise UsageError(f"{file}: tensor {name}: dtype {dtype} is not known; known are {', '.join(DTYPES)}")
            return Entry(DTYPES[dtype], tuple(shape), file, data + begin), data + stop
    raise UsageError(f"{file}: tensor {name}: the header does not say dtype, shape and offsets; fetch the file again")


def _json_object(file: Path, text: bytes) -> dict[str, Any]:
    """Raises UsageError for anything else than an object whose keys differ."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ValueError(f"{key} is there twice")
            result[key] = value
        return result

    try:
        content = json.loads(text, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{file}: its JSON cannot be read: {str(error).splitlines()[0][:200]}; fetch the file again"
        ) from error
    if not isinstance(content, dict):
        raise UsageError(f"{file}: its JSON is no object; fetch the file again")
    return content


def _weight_map(index: Path) -> dict[str, str]:
    try:
        text = index.read_bytes()
    except OSError as error:
        raise UsageError(f"{index}: cannot be read: {error.strerror}") from error
    found = _json_object(index, text).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise UsageError(f"{index}: has no weight_map from tensors to files; fetch the file again")
    return found


def _unlisted(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise UsageError(f"{directory}: is not a directory; name one with a model's config.json and *.safetensors")
    if files := sorted(directory.glob("*.safetensors")):
        return files
    if pickled := sorted([*directory.glob("pytorch_model*.bin"), *directory.glob("*.pth"), *directory.glob("*.pt")]):
        raise UsageError(
            f"{directory}: holds {pickled[0].name} and no *.safetensors; convert it first, by transformers' "
            "from_pretrained and save_pretrained"
        )
    raise UsageError(f"{directory}: holds no *.safetensors; name the directory of a model in Hugging Face's format")
