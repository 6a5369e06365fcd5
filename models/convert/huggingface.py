"""A Hugging Face directory: what it says of the model, and its tensors beside Megatron's."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.convert.families import FAMILIES, Family
from models.convert.pieces import PieceMap
from models.convert.safetensors_reader import Reader
from models.convert.shapes import Shape, global_shapes
from models.convert.storage import Source
from models.convert.values import common
from parallel.errors import UsageError

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


@dataclass(frozen=True)
class Description:
    """config.json of a directory. hf: transformers' configuration of it."""

    directory: Path
    hf: Any
    family: Family

    @property
    def values(self) -> dict[str, Any]:
        """Keys of the model section."""
        return {**common(self.hf), **self.family.values(self.hf)}


def describe(directory: Path, key: str = "model.path") -> Description:
    """Raises UsageError naming `key` unless `directory` has a config.json of a family that converts."""
    file = directory / "config.json"
    try:
        raw = json.loads(file.read_text())
    except OSError as error:
        hint = "must be a directory with a Hugging Face model"
        raise UsageError(f"{key}={directory}: {file.name} cannot be read: {error.strerror}; {hint}") from error
    except ValueError as error:
        raise UsageError(f"{key}={directory}: config.json is not JSON: {error}") from error
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind not in FAMILIES:
        raise UsageError(f"{key}={directory}: model_type={kind}: cannot be converted; must be one of {', '.join(FAMILIES)}")
    from transformers import AutoConfig

    try:
        hf = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{key}={directory}: transformers cannot read config.json: {' '.join(str(error).split())}") from error
    return Description(directory, hf, FAMILIES[kind])


def open_tensors(description: Description) -> Source:
    """The directory's tensors."""
    return Reader(description.directory)


def piece_map(description: Description, model: ModelConfig) -> PieceMap:
    """How the directory's tensors are Megatron's. Every tensor of the model has its pieces."""
    rules = {rule.key: rule for rule in description.family.rules(description.hf)}
    pieces = []
    for key, shape in global_shapes(model).items():
        match = _LAYER.fullmatch(key)
        prefix, name = (f"model.layers.{match[1]}.", match[2]) if match else ("", key)
        assert name in rules, f"{description.hf.model_type} has no rule for {key}"
        pieces += rules[name].pieces(model, shape, key, prefix)
    return PieceMap(pieces)


def check_names(description: Description, pieces: PieceMap, found: Mapping[str, Shape]) -> list[str]:
    """The names that are not converted. Raises UsageError for a tensor that is missing, unexpected or of another shape."""
    wanted, where = pieces.hf_shapes(), description.directory
    for name, shape in wanted.items():
        if name not in found:
            raise UsageError(f"{where}: tensor {name} {list(shape)} is missing")
        if found[name] != shape:
            raise UsageError(f"{where}: tensor {name} has shape {list(found[name])}, must be {list(shape)}")
    ignored = re.compile("|".join([*description.family.ignored(description.hf), r".*\.rotary_emb\.inv_freq"]))
    extra = [name for name in found if name not in wanted]
    for name in extra:
        if not ignored.fullmatch(name) and not (name == "lm_head.weight" and description.hf.tie_word_embeddings):
            raise UsageError(f"{where}: tensor {name} {list(found[name])} is unexpected in a {description.hf.model_type} model")
    return extra
