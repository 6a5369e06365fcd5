"""Which weights a command starts from, and how they get into the model: the one place that knows."""

from pathlib import Path
from typing import TYPE_CHECKING

from models.config import ModelConfig
from moe_rl import checkpoint_paths
from moe_rl.config import RunConfig
from parallel.errors import UsageError

if TYPE_CHECKING:
    from models.model import MoEModel


def initial(config: RunConfig) -> Path | None:
    """Where the settings say that weights come from: checkpoint.load, else model.path; None: fresh ones.

    Raises UsageError where nothing complete is there.
    """
    if config.checkpoint.load is not None:
        return checkpoint_paths.find(config.checkpoint.load)
    return config.model.path


def evaluated(config: RunConfig) -> Path:
    """Those that `moe-rl eval` looks at: checkpoint.load, else the newest of the run itself, else model.path: a run's own
    configuration means what the run made of that model.

    Raises UsageError where there are none: fresh weights are never meant.
    """
    if config.checkpoint.load is not None:
        return checkpoint_paths.find(config.checkpoint.load)
    found = checkpoint_paths.newest(config.directory / "checkpoints") or config.model.path
    if found is None:
        raise UsageError(
            f"checkpoint.load: not given, and {config.directory} holds no checkpoint; name a checkpoint or a run to evaluate, "
            "or a Hugging Face directory as model.path"
        )
    return found


def check(path: Path | None, model: ModelConfig, *, reads: bool) -> None:
    """Raises UsageError where what `initial` or `evaluated` returned is model.path, a Hugging Face directory, and its tensors
    are not the model's, as far as the headers of its files tell: before a process starts. reads: a tied output layer that is
    in the files as well is compared, too. The same where it is a checkpoint that says what it was made with."""
    if path is not None and checkpoint_paths.is_checkpoint(path):
        from models.convert.files import MODEL, differing_shape, trained_model

        if (path / MODEL).exists() and (differing := differing_shape(trained_model(path), model)):
            raise UsageError(
                f"checkpoint.load={path}: does not fit this model: {differing}; the model section must be the one it was made "
                "with"
            )
    if path is None or path != model.path or checkpoint_paths.is_checkpoint(path):
        return
    from models.convert.huggingface import describe, head_differs, head_is_embedding, opened

    _, source, dropped = opened(description := describe(path), model)
    if reads and not head_is_embedding(source, dropped):
        raise head_differs(description)


def load(path: Path, model: "MoEModel") -> None:
    """What `initial` or `evaluated` returned, a checkpoint or a Hugging Face directory, into the model of any layout
    (collective). Raises UsageError where it does not fit."""
    from models.convert import live
    from moe_rl import checkpoint

    if checkpoint_paths.is_checkpoint(path):
        checkpoint.load_weights(path, model)
    else:
        live.load(path, model)
