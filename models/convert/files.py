"""The small files of a Hugging Face directory, which travel with a checkpoint so that it can be handed back."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import ModelConfig

HUGGINGFACE = "huggingface"  # in a checkpoint: configuration and tokenizer of the model that it was made from
MODEL = "model.json"  # in a checkpoint: the model section that it was made with
TENSORS = "tensors.json"  # beside the former: what was imported, with a hash of each tensor

_PATTERNS = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "chat_template*", "*.model", "*.tiktoken", "*.py"),
)


def huggingface_directory(path: Path) -> Path:
    """What model.path names: a Hugging Face directory, or a checkpoint that has kept what it came from."""
    inside = path / HUGGINGFACE
    return inside if not (path / "config.json").exists() and (inside / "config.json").exists() else path


def has_tokenizer(directory: Path) -> bool:
    """Whether there is a tokenizer that transformers can read."""
    return any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def small_files(directory: Path) -> list[Path]:
    """Configuration, tokenizer, chat template and code: all that is no weight."""
    return sorted({path for pattern in _PATTERNS for path in directory.glob(pattern) if path.is_file()})


def keep_with(checkpoint: Path, model: ModelConfig) -> None:
    """Writes into a checkpoint what its weights are of, and the small files of the directory that they came from."""
    (checkpoint / MODEL).write_text(model.model_dump_json(indent=1))
    if model.path is None or not (source := huggingface_directory(model.path)).is_dir():
        return
    (checkpoint / HUGGINGFACE).mkdir(exist_ok=True)
    for path in small_files(source):
        shutil.copyfile(path, checkpoint / HUGGINGFACE / path.name)


def exported_config(raw: Mapping[str, Any], *, dtype: str, dropped_layers: bool) -> bytes:
    """config.json for what is exported. dtype: of its tensors. dropped_layers: those for multi-token prediction are missing."""
    config = {key: value for key, value in raw.items() if key != "quantization_config"}
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if dropped_layers and key in config:
            config[key] = 0
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
