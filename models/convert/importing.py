"""A Hugging Face directory -> a checkpoint in Megatron's format, one tensor in memory at a time."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from models.convert.checkpoint_reader import CheckpointReader
from models.convert.checkpoint_writer import CheckpointWriter
from models.convert.files import Imported, keep_with, write_imported
from models.convert.hashing import fingerprint, row_blocks
from models.convert.huggingface import describe, head_differs, head_is_embedding, opened
from models.convert.memory import free_tensors_at_once
from models.convert.pieces import Index, PieceMap, lengths, whole
from models.convert.shapes import Shape, global_shapes
from models.convert.storage import Source
from parallel.errors import UsageError

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True)
class Converted:
    """tensors, parameters: of the Hugging Face side. dropped: names that were not converted. unchanged: of an export, how
    many tensors are those that were once imported; None where that is not known."""

    tensors: int
    parameters: int
    dropped: list[str]
    unchanged: int | None = None


def import_directory(source: Path, target: Path, progress: Progress = lambda done, total: None) -> Converted:
    """Writes the checkpoint `target` and reads it back: every tensor's hash must be that of the file it came from.

    Raises UsageError, and leaves nothing at `target`, where a tensor is missing, unexpected, misshapen or cut off, the family
    is not known, or the disk fills up.
    """
    free_tensors_at_once()
    description = describe(source, "HF_DIR")
    model = description.model(source)
    pieces, reader, dropped = opened(description, model)
    if not head_is_embedding(reader, dropped):
        raise head_differs(description)
    names = list(pieces.by_name)
    shapes = global_shapes(model)
    kinds = {key: (_dtype_of(pieces, key, reader), shape) for key, shape in shapes.items()}
    total = 3 * sum(nbytes(*_kind(reader, name)) for name in names)  # read, read back, and the hashes of the files
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        progress(done, total)

    with CheckpointWriter(target, kinds) as writer:
        for key, (dtype, shape) in kinds.items():
            for box in chunks_of(key, shape, dtype):
                block = torch.empty(lengths(box), dtype=dtype)
                pieces.to_megatron(key, box, reader.read, block)
                writer.add_rows(key, box[0].start, block)
                advance(block.nbytes)
        keep_with(writer.directory, model)
        hashes = {}
        for name in names:
            hashes[name] = fingerprint(*_kind(reader, name), lambda rows, name=name: reader.read(name, (rows,)))
            advance(nbytes(*_kind(reader, name)))
        kept = {name: Imported(reader.names[name].dtype, reader.names[name].shape, hashes[name]) for name in names}
        write_imported(writer.directory, kept)
        writer.finish()
        _check_hashes(CheckpointReader(writer.directory), pieces, reader, hashes, advance)
    return Converted(len(names), sum(math.prod(reader.names[name].shape) for name in names), dropped)


def chunks_of(key: str, shape: Shape, dtype: torch.dtype) -> list[Index]:
    """The parts in which a tensor is written: each expert by itself, and others in blocks of rows (vocabularies are large)."""
    each_expert = (slice(expert, expert + 1) for expert in range(shape[0]))
    rows = each_expert if ".experts.experts." in key else row_blocks(shape, dtype)
    return [(some, *whole(shape[1:])) for some in rows]


def _dtype_of(pieces: PieceMap, key: str, reader: Source) -> torch.dtype:
    return functools.reduce(torch.promote_types, {reader.names[piece.name].dtype for piece in pieces.by_key[key]})


def nbytes(shape: Shape, dtype: torch.dtype) -> int:
    """What a tensor takes."""
    return math.prod(shape) * dtype.itemsize


def _kind(reader: Source, name: str) -> tuple[Shape, torch.dtype]:
    return reader.names[name].shape, reader.names[name].dtype


def _rows_of(written: CheckpointReader, pieces: PieceMap, name: str, dtype: torch.dtype, rows: slice) -> torch.Tensor:
    return pieces.to_hf(name, written.read, rows).to(dtype)


def _check_hashes(
    written: CheckpointReader, pieces: PieceMap, reader: Source, hashes: dict[str, str], advance: Callable[[int], None]
) -> None:
    for name, expected in hashes.items():
        shape, dtype = _kind(reader, name)
        found = fingerprint(shape, dtype, functools.partial(_rows_of, written, pieces, name, dtype))
        if found != expected:
            raise UsageError(
                f"{written.directory}: tensor {name} is not what was read: the disk or its memory is at fault; import again"
            )
        advance(nbytes(*_kind(reader, name)))
