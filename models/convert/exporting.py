"""A checkpoint -> a Hugging Face directory, one part of a tensor in memory at a time."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from models.config import ModelConfig
from models.convert import manifest
from models.convert.checkpoint_reader import CheckpointReader
from models.convert.checkpoint_writer import METADATA
from models.convert.files import HUGGINGFACE, MODEL, exported_config, read_imported, small_files, trained_model
from models.convert.hashing import fingerprint
from models.convert.huggingface import Description, describe, piece_map
from models.convert.importing import Converted, Progress
from models.convert.memory import free_tensors_at_once
from models.convert.pieces import PieceMap
from models.convert.safetensors_reader import Reader
from models.convert.safetensors_writer import Writer
from models.convert.shapes import Shape, global_shapes
from parallel.errors import UsageError

_SHARD_BYTES = 5_000_000_000
# what a run may change without its weights meaning something else
_FREE = {
    *("preset", "path", "tokenizer", "max_positions", "init_std", "dtype", "recompute", "logprob_chunk", "router_fusion"),
    *("load_balancing", "aux_loss_coefficient", "expert_bias", "expert_bias_rate"),
}


@dataclass(frozen=True)
class _Plan:
    """kinds: dtype and shape of each tensor that is written."""

    origin: Description
    reader: CheckpointReader
    pieces: PieceMap
    kinds: dict[str, tuple[torch.dtype, Shape]]


def export_directory(
    source: Path,
    target: Path,
    *,
    like: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = _SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Writes the checkpoint `source` as a directory that transformers and vLLM open, and reads it back.

    like: a Hugging Face directory of the same model, whose configuration and tokenizer are taken; none: those that the
    checkpoint has kept. dtype: of all tensors; none: each as it is in the checkpoint.
    Raises UsageError, and leaves nothing at `target`, where the checkpoint is not complete or not of that model, or the disk
    fills up.
    """
    free_tensors_at_once()
    if (source / manifest.MANIFEST).exists():
        manifest.check(source, {METADATA})  # which is unpickled, and before the minutes that all of them may take
    plan = _plan(source, like, dtype)
    manifest.check(source)
    total = 2 * sum(dtype.itemsize * math.prod(shape) for dtype, shape in plan.kinds.values())
    done = 0
    hashes: dict[str, str] = {}
    with Writer(target, plan.kinds, shard_bytes) as writer:
        for name, (kind, shape) in plan.kinds.items():

            def write(rows: slice, name: str = name, kind: torch.dtype = kind) -> torch.Tensor:
                part = plan.pieces.to_hf(name, plan.reader.read, rows).to(kind)
                writer.add_rows(name, rows.start, part)
                return part

            hashes[name] = fingerprint(shape, kind, write)
            done += kind.itemsize * math.prod(shape)
            progress(done, total)
        _add_small_files(writer, plan)
        writer.finish()
        written = Reader(writer.directory)
        for name, (kind, shape) in plan.kinds.items():
            if fingerprint(shape, kind, lambda rows, name=name: written.read(name, (rows,))) != hashes[name]:
                raise UsageError(f"{target}: tensor {name} is not what was written: the disk is at fault; export again")
            done += kind.itemsize * math.prod(shape)
            progress(done, total)
    parameters = sum(math.prod(shape) for _, shape in plan.kinds.values())
    return Converted(len(plan.kinds), parameters, [], _unchanged(source, hashes))


def _plan(source: Path, like: Path | None, dtype: torch.dtype | None) -> _Plan:
    reader = CheckpointReader(source)
    origin = describe(like or _kept(source), "--like" if like else "CKPT")
    model = origin.model()
    _check_same_model(source, origin, model)
    for key, shape in (shapes := global_shapes(model)).items():
        found = reader.names[key].shape if key in reader.names else None
        if found != shape:
            there = f"is {list(found)}" if found else "is missing"
            raise UsageError(f"{source}: tensor {key} {there}, must be {list(shape)} in the model of {origin.directory}")
    if extra := [key for key in reader.names if key not in shapes]:
        raise UsageError(f"{source}: tensor {extra[0]} is unexpected in the model of {origin.directory}")
    pieces = piece_map(origin, model)
    kinds, imported = {}, read_imported(source)
    for name, shape in pieces.hf_shapes().items():
        # queries may have been of another type than keys, with which they share a tensor here
        kept = imported[name].dtype if name in imported else reader.names[pieces.by_name[name][0].key].dtype
        kinds[name] = (dtype or kept, shape)
    return _Plan(origin, reader, pieces, kinds)


def has_kept(source: Path) -> bool:
    """Whether a checkpoint has the configuration of the Hugging Face model that it was made from."""
    return (source / HUGGINGFACE / "config.json").exists()


def _kept(source: Path) -> Path:
    kept = source / HUGGINGFACE
    if not has_kept(source):
        raise UsageError(
            f"CKPT={source}: was not made from a Hugging Face model, so it has no config.json and no tokenizer; name a "
            "directory of such a model with --like"
        )
    return kept


def _check_same_model(source: Path, origin: Description, model: ModelConfig) -> None:
    """That what the run computed with these weights is what config.json says."""
    if not (source / MODEL).exists():
        return
    trained = trained_model(source)
    if key := differing(trained, model):
        raise UsageError(
            f"{source}: was trained with model.{key}={getattr(trained, key)}, {origin.directory}/config.json says "
            f"{getattr(model, key)}: with it, the weights would mean something else; name a fitting directory with --like"
        )


def differing(one: ModelConfig, other: ModelConfig) -> str | None:
    """The first setting, if any, by which the same weights compute something else."""
    keys = (key for key in type(one).model_fields if key not in _FREE)
    return next((key for key in keys if getattr(one, key) != getattr(other, key)), None)


def _add_small_files(writer: Writer, plan: _Plan) -> None:
    for path in small_files(plan.origin.directory):
        if path.name != "config.json":
            writer.add_file(path.name, path)
    raw = json.loads((plan.origin.directory / "config.json").read_text())
    most = Counter(dtype for dtype, _ in plan.kinds.values()).most_common(1)[0][0]
    dropped = bool(plan.origin.family.ignored(plan.origin.hf))
    config = exported_config(raw, dtype=str(most).removeprefix("torch."), dropped_layers=dropped)
    writer.add_file("config.json", config)


def _unchanged(source: Path, hashes: dict[str, str]) -> int | None:
    """How many tensors are, to the bit, those that were imported."""
    if not (imported := read_imported(source)):
        return None
    return sum(name in imported and imported[name].hash == value for name, value in hashes.items())
