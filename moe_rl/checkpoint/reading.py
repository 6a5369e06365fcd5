"""Reads checkpoints: looks at their files first, and says in one line what does not fit."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from models.convert import manifest
from models.convert.files import MODEL, differing_shape, trained_model
from models.model import MoEModel
from models.optimizer import Optimizer
from models.transformer import Transformer
from models.value import ValueModel
from moe_rl import checkpoint_paths
from moe_rl.checkpoint.agreement import agree, main_does, said
from moe_rl.checkpoint.contents import CriticState, Progress, random_states, set_random_states, weights
from moe_rl.checkpoint_paths import CRITIC, find_critic
from parallel.errors import UsageError


def load_weights(path: Path, model: MoEModel, key: str | None = "checkpoint.load") -> None:
    """Weights alone, from any layout (collective). key: where the user named it, if that was so.

    Raises UsageError where they do not fit the model or are damaged.
    """
    check_files(path, key)
    _read(path, weights(model), model, key)


def load_critic_weights(path: Path, model: ValueModel, key: str = "checkpoint.load") -> None:
    """Weights alone of the critic in a checkpoint or run, from any layout (collective). key: where the user named it.

    Raises UsageError where there is no critic, or one that does not fit the model.
    """
    found = find_critic(path, key)
    check_files(found, key)
    _read(found / CRITIC, weights(model), model, key)


def load(path: Path, model: MoEModel, optimizer: Optimizer, critic: CriticState | None = None) -> Progress:
    """Everything that `save` saved (collective); random states only where the number of ranks is the same.

    What is in the files is not compared with the manifest: `intact` has done that. A critic in the checkpoint that is not asked
    for stays where it is. Raises UsageError where one is asked for and absent.
    """
    from megatron.core.dist_checkpointing import load_content_metadata

    if critic is not None and not (path / CRITIC).is_dir():
        raise UsageError(
            f"{path}: holds no critic, the run that saved it trained none; begin anew under another run.name (with "
            "checkpoint.load, to keep the policy's weights)"
        )
    about = load_content_metadata(str(path)) or {}
    same_ranks = about.get("ranks") == dist.get_world_size()
    known = about.get("random", ["torch"])
    random = {name: state for name, state in random_states().items() if name in known} if same_ranks else {}
    state = _read_trained(path, model, optimizer, {"random": random} if random else {})
    if critic is not None:
        _read_trained(path / CRITIC, critic.model, critic.optimizer, {})
    if random:
        set_random_states(state["random"])
    return Progress(**state["progress"])


def intact(directory: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint in a run's checkpoints/ whose every file is what was saved (collective); None where there is none
    at all. Newer ones that are damaged are named, and put aside as damaged_step_NNNNNN.

    Raises UsageError where there are some and all are damaged: the run would begin anew in their midst. The same where one
    may not be read by this user, which damages nothing.
    """
    damaged: list[tuple[Path, str]] = []
    # as rank 0 sees them: where ranks saw different ones, each would go on from its own
    for _, path in reversed(main_does(lambda: checkpoint_paths.numbered(directory))):
        try:
            check_files(path, None)
        except UsageError as error:
            agree(_forbidden(path))
            damaged.append((path, str(error)))
            continue
        for broken, reason in damaged:
            say(f"warning: {reason}; it is put aside as damaged_{broken.name}, and the run goes on from {path.name}")
            main_does(lambda broken=broken: _put_aside(broken))
        return path
    if damaged:
        raise UsageError(
            f"{damaged[0][1]}; no other checkpoint in {directory} is whole: mend it, or begin anew under another run.name"
        )
    return None


def _forbidden(path: Path) -> str:
    """The first file of a checkpoint that may not be read, or nothing."""
    try:
        for place in (path, *path.rglob("*")):
            if place.is_dir():
                os.listdir(place)
            elif place.exists():
                place.open("rb").close()
    except PermissionError as error:
        return f"{path}: cannot be read: {said(error)}; mend it, and the same command goes on from there"
    except OSError:
        return ""
    return ""


def _put_aside(path: Path) -> None:
    names = (path.with_name(f"damaged_{path.name}{end}") for end in ("", *(f".{i}" for i in range(2, 10**6))))
    path.rename(next(name for name in names if not name.exists()))


def check_files(path: Path, key: str | None) -> None:
    """Compares every file with the manifest, each rank some of them (collective).

    Raises UsageError, the same on every rank.
    """
    wrong = ""
    try:
        entries = manifest.read(path)
        mine = sorted(entries)[dist.get_rank() :: dist.get_world_size()]
        wrong = manifest.wrong_size(path, entries) or manifest.wrong_content(path, entries, mine)
    except (OSError, UsageError) as error:
        wrong = said(error)
    agree(wrong and f"{_place(path, key)}: is damaged: {wrong}")


def _place(path: Path, key: str | None) -> str:
    return f"{key}={path}" if key else str(path)


def _read_trained(path: Path, model: Transformer, optimizer: Optimizer, more: dict[str, Any]) -> dict[str, Any]:
    """Weights, optimizer and schedule into their places; what else was asked for, in what is returned."""
    wanted = weights(model)
    wanted["optimizer"] = optimizer.sharded_state(wanted, is_loading=True)
    state = _read(path, wanted | more, model)
    optimizer.load_state(state["optimizer"])
    optimizer.schedule.load_state_dict(state["schedule"])
    return state


def _read(path: Path, wanted: dict[str, Any], model: Transformer, key: str | None = None) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    parts = [f"model{i}" for i in range(len(model.bare))]
    try:
        if wrong := _mismatch(path, [wanted[part] for part in parts]):
            raise UsageError(
                f"{_place(path, key)}: does not fit this model: {_named(path, model)}{wrong}; the model section must be the "
                "one it was made with"
            )
        state: Any = dist_checkpointing.load(wanted, str(path))
    except (CheckpointingException, CheckpointException) as error:  # the latter is no Exception
        reason = str(error).strip().splitlines()[-1][:300]
        raise UsageError(f"{_place(path, key)}: cannot be read: {reason}") from error
    for part, chunk in zip(parts, model.bare, strict=True):
        chunk.load_state_dict(state[part])
    return state


def _named(path: Path, model: Transformer) -> str:
    """The settings that make the difference, where the checkpoint says what it was made with."""
    whole = next((place for place in (path, path.parent) if (place / MODEL).exists()), None)
    differing = differing_shape(trained_model(whole), model.config) if whole is not None else ""
    return f"{differing}; " if differing else ""


def _mismatch(path: Path, chunks: list[dict[str, Any]]) -> str:
    """What differs between a checkpoint's weights and the model's, or nothing (collective). Megatron by itself would take a
    part of a deeper model without a word, and fill up or cut off another vocabulary."""
    from megatron.core.dist_checkpointing import load_tensors_metadata
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    here: dict[str, tuple[int, ...]] = {}
    for value in (value for chunk in chunks for value in chunk.values()):
        built: Any = value.build() if isinstance(value, ShardedTensorFactory) else [value]
        shards = built.values() if isinstance(built, dict) else built
        here |= {shard.key: tuple(shard.global_shape) for shard in shards if isinstance(shard, ShardedTensor)}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    ours = {key: shape for part in everywhere for key, shape in part.items()}
    saved = load_tensors_metadata(str(path))
    theirs = {key: tuple(tensor.global_shape) for key, tensor in saved.items() if not key.startswith("optimizer.")}
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            return f"{key} is {theirs.get(key, 'absent')} there and {ours.get(key, 'absent')} here"
    return ""
