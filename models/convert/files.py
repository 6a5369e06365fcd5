"""The small files of a Hugging Face directory, which travel with a checkpoint so that it can be handed back."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from models.config import ModelConfig
from parallel.errors import UsageError

HUGGINGFACE = "huggingface"  # in a checkpoint: configuration and tokenizer of the model that it was made from
MODEL = "model.json"  # in a checkpoint: the model section that it was made with
TENSORS = "tensors.json"  # beside the former: what was imported, with a hash of each tensor

_MODEL = ("config.json", "generation_config.json")
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*"),
    *("*.model", "*.tiktoken", "*.py"),
)


def huggingface_directory(path: Path) -> Path:
    """What model.path names: a Hugging Face directory, or a checkpoint that has kept what it came from."""
    inside = path / HUGGINGFACE
    return inside if not (path / "config.json").exists() and (inside / "config.json").exists() else path


def small_files(directory: Path) -> list[Path]:
    """Configuration, tokenizer, chat template and code: all that is no weight."""
    return [*_found(directory, _MODEL), *tokenizer_files(directory)]


def tokenizer_files(directory: Path) -> list[Path]:
    """Tokenizer, chat template and code."""
    return _found(directory, _TOKENIZER)


def _found(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})


def keep_with(checkpoint: Path, model: ModelConfig) -> None:
    """Writes into a checkpoint what its weights are of, the configuration that they came with, and the tokenizer."""
    (checkpoint / MODEL).write_text(model.model_dump_json(indent=1))
    files = _found(huggingface_directory(model.path), _MODEL) if model.path else []
    if tokenizer := model.tokenizer or model.path:  # imported weights have no settings yet, and model.path's
        files += tokenizer_files(huggingface_directory(Path(tokenizer)))
    if files:
        (checkpoint / HUGGINGFACE).mkdir(exist_ok=True)
    for path in files:
        shutil.copyfile(path, checkpoint / HUGGINGFACE / path.name)


def trained_model(checkpoint: Path) -> ModelConfig:
    """What the weights of a checkpoint are of. Raises UsageError where it does not say."""
    try:
        return ModelConfig.model_validate_json((checkpoint / MODEL).read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        raise UsageError(f"{checkpoint / MODEL}: cannot be read: {reason}; name a complete checkpoint") from error


# What the tensors of a model are, but for the vocabulary, which is filled up
SHAPE = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "moe_ffn", "experts", "dense_layers", "shared_ffn"),
    *("shared_gate", "tie_embeddings", "qk_norm", "qk_norm_span", "qkv_bias", "bias", "attention_sinks"),
    *("kv_lora_rank", "q_lora_rank", "rope_head_dim", "v_head_dim"),
)


def differing_shape(there: ModelConfig, here: ModelConfig) -> str:
    """The settings by which weights of one do not fit the other, with both values, or nothing."""
    differing = [key for key in SHAPE if getattr(there, key) != getattr(here, key)]
    return ", ".join(f"model.{key}={getattr(here, key)} (the checkpoint: {getattr(there, key)})" for key in differing)


class Imported(NamedTuple):
    """A tensor as it was in the file that it was imported from."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    hash: str


def write_imported(checkpoint: Path, tensors: Mapping[str, Imported]) -> None:
    (checkpoint / HUGGINGFACE / TENSORS).write_text(
        json.dumps({name: [str(one.dtype).removeprefix("torch."), one.shape, one.hash] for name, one in tensors.items()})
    )


def read_imported(checkpoint: Path) -> dict[str, Imported]:
    """What `write_imported` wrote; nothing, where the checkpoint was not imported, or trained since."""
    file = checkpoint / HUGGINGFACE / TENSORS
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_bytes())
        return {name: Imported(getattr(torch, kind), tuple(shape), value) for name, (kind, shape, value) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{file}: cannot be read: {' '.join(str(error).split())[:200]}; import again") from error


def exported_config(raw: Mapping[str, Any], *, dtype: str, dropped_layers: bool) -> bytes:
    """config.json for what is exported. dtype: of its tensors. dropped_layers: those for multi-token prediction are missing."""
    config = {key: value for key, value in raw.items() if key != "quantization_config"}
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if dropped_layers and key in config:
            config[key] = 0
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
