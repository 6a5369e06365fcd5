"""A Hugging Face directory: what it says of the model, and its tensors beside Megatron's."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError
from torch import Tensor

from models.config import ModelConfig
from models.convert.families import FAMILIES, Family
from models.convert.files import SHAPE
from models.convert.hashing import row_blocks
from models.convert.pieces import PieceMap
from models.convert.quantised import Dequantised
from models.convert.safetensors_reader import Reader
from models.convert.shapes import global_shapes
from models.convert.storage import Source, Stored
from models.convert.values import common
from parallel.errors import UsageError

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

# What a reader of settings raises that trusts them
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, StrictDataclassError)


@dataclass(frozen=True)
class Description:
    """config.json of a directory, which the user named by `key`. hf: transformers' configuration of it. values: keys of the
    model section."""

    directory: Path
    key: str
    hf: Any
    family: Family
    values: dict[str, Any]

    def model(self, path: Path | None = None) -> ModelConfig:
        """Those as a model section, with `path` as model.path. Raises UsageError where there can be no such model."""
        try:
            return ModelConfig(**self.values, path=path)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            reason = f"model.{place}={first['input']}: {first['msg']}" if place else first["msg"].removeprefix("Value error, ")
            raise UsageError(f"{self.key}={self.directory}: config.json is of no model that can be built: {reason}") from error


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
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UsageError(f"{key}={directory}: model_type={kind}: cannot be converted; must be one of {', '.join(FAMILIES)}")
    from transformers import AutoConfig
    from transformers.utils import logging

    family, verbosity = FAMILIES[kind], logging.get_verbosity()
    logging.set_verbosity_error()  # what it has to say of ids and factors, every rank would say
    try:
        hf = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        values = {**common(hf), **family.values(hf)}
    except UsageError:
        raise
    except _MALFORMED as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"{key}={directory}: config.json cannot be read: {type(error).__name__}: {reason}") from error
    finally:
        logging.set_verbosity(verbosity)
    return Description(directory, key, hf, family, values)


class Opened(NamedTuple):
    """Tensors of a directory that are those of a model. dropped: names of the others, which are not converted."""

    pieces: PieceMap
    source: Source
    dropped: list[str]


def opened(description: Description, model: ModelConfig) -> Opened:
    """Reads no more than the headers of files. Raises UsageError for a tensor that is missing, unexpected or misshapen, and
    for a model that was given another shape than that of its weights."""
    published = description.model()
    for key in (*SHAPE, "vocab_size"):
        if (ours := getattr(model, key)) != (theirs := getattr(published, key)):
            raise UsageError(f"model.{key}={ours}: the weights in {description.directory} have {theirs}; leave model.{key} out")
    pieces, source = piece_map(description, model), open_tensors(description)
    return Opened(pieces, source, check_names(description, pieces, source.names))


def open_tensors(description: Description) -> Source:
    """The directory's tensors; those that are quantised as the bfloat16 ones that they stand for."""
    reader, quantisation = Reader(description.directory), getattr(description.hf, "quantization_config", None)
    if quantisation is None:
        return reader
    try:
        return Dequantised(reader, quantisation)
    except UsageError as error:
        raise UsageError(f"{description.directory}: {error}") from error


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


def check_names(description: Description, pieces: PieceMap, found: Mapping[str, Stored]) -> list[str]:
    """The names that are not converted. Raises UsageError for a tensor that is missing, unexpected, of another shape or of a
    type that is none of a weight's."""
    wanted, where = pieces.hf_shapes(), description.directory
    for name, shape in wanted.items():
        if name not in found:
            raise UsageError(f"{where}: tensor {name} {list(shape)} is missing")
        if found[name].shape != shape:
            raise UsageError(f"{where}: tensor {name} has shape {list(found[name].shape)}, must be {list(shape)}")
        if not found[name].dtype.is_floating_point or found[name].dtype.itemsize < 2:
            kind = str(found[name].dtype).removeprefix("torch.")
            raise UsageError(
                f"{where}: tensor {name} is {kind}, and config.json has no quantization_config; must be bfloat16, float16 or "
                "float32"
            )
    ignored = re.compile("|".join([*description.family.ignored(description.hf), r".*\.rotary_emb\.inv_freq"]))
    extra = [name for name in found if name not in wanted]
    for name in extra:
        if not ignored.fullmatch(name) and not (name == _HEAD and description.hf.tie_word_embeddings):
            kind = description.hf.model_type
            raise UsageError(f"{where}: tensor {name} {list(found[name].shape)} is unexpected in a {kind} model")
    return extra


def head_is_embedding(source: Source, dropped: Sequence[str], part: int = 0, parts: int = 1) -> bool:
    """Whether an output layer that is not converted, because it is tied to the embedding, is the embedding. part: of so many
    `parts`, the one whose rows are compared."""
    if _HEAD not in dropped:
        return True
    embedding, head = source.names[_EMBEDDING], source.names[_HEAD]
    if embedding.shape != head.shape:
        return False

    def rows(name: str, block: slice) -> Tensor:
        return source.read(name, (block,)).float()

    blocks = list(row_blocks(head.shape, head.dtype))[part::parts]
    return all(bool((rows(_EMBEDDING, block) == rows(_HEAD, block)).all()) for block in blocks)


def head_differs(description: Description) -> UsageError:
    """What to raise where it is not."""
    return UsageError(
        f"{description.directory}: tensor {_HEAD} is not {_EMBEDDING}, but config.json says tie_word_embeddings=true; set it "
        "to false there if the model has an output layer of its own, or fetch the weights again"
    )
