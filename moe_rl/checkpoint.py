"""Checkpoints in Megatron's sharded format: complete or absent, and loadable in another layout.

A checkpoint is a directory step_NNNNNN. It is written beside its place and renamed when every rank is done, so a directory of
that name is complete. In it lies the policy, and where a run trains a critic, that one in critic/, by itself and in the same
format: what reads a policy's weights need not know of it.
"""

import queue
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from models.convert.files import keep_with
from models.model import MoEModel
from models.optimizer import Optimizer
from models.transformer import Transformer
from models.value import ValueModel
from moe_rl import checkpoint_paths
from moe_rl.checkpoint_paths import CRITIC, find_critic, numbered
from parallel.errors import UsageError

if TYPE_CHECKING:
    from moe_rl.step_state import StepState

_BEGUN = "begun"  # in a checkpoint saved within a step: each rank's part of that step
_ELSEWHERE = (
    "{path}: was saved within a step, which goes on only in the layout and number of processes that began it; use those, or "
    "remove it to go on from the checkpoint before"
)
_PINNED = "pinned"  # a file of this name in a checkpoint keeps it


class CriticState(NamedTuple):
    """A value model and what trains it."""

    model: ValueModel
    optimizer: Optimizer


@dataclass(frozen=True)
class Progress:
    """Where a run stands. position: problems drawn so far. policy_version: optimizer updates so far. replay: the mode that an
    alarm switched on, else "". watch: the stability watch's state as JSON text, in which no format changes a number."""

    step: int
    position: int
    policy_version: int
    kl_coefficient: float
    replay: str = ""
    watch: str = ""


def save(
    directory: Path,
    progress: Progress,
    model: MoEModel,
    optimizer: Optimizer,
    keep: int,
    *,
    pinned: bool = False,
    critic: CriticState | None = None,
    begun: "StepState | None" = None,
) -> Path:
    """Saves weights, optimizer, schedule, every rank's random state and `progress` (collective); keeps the newest `keep`.

    pinned: this one stays, and does not count among them. critic: weights, optimizer and schedule of it are saved too.
    begun: a step within which this is, of each rank.
    """
    target = directory / checkpoint_paths.name(progress.step, begun and begun.done)

    def states() -> Iterator[tuple[str, dict[str, Any]]]:  # one at a time: a state holds gathered moments
        yield "", _trained(model, optimizer) | {"progress": asdict(progress), "random": _random_state()}
        if critic is not None:
            yield CRITIC, _trained(*critic)

    _write(target, states(), model, begun)
    if dist.get_rank() == 0:
        if pinned:
            (target / _PINNED).touch()
        for _, old in [pair for pair in numbered(directory) if not (pair[1] / _PINNED).exists()][:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def save_weights(path: Path, model: MoEModel) -> None:
    """Weights alone, for `load_weights` (collective)."""
    _write(path, [("", _weights(model))], model)


def load_weights(path: Path, model: MoEModel) -> None:
    """Weights alone, from any layout (collective). Raises UsageError where they do not fit the model."""
    _read(path, _weights(model), model)


def load_critic_weights(path: Path, model: ValueModel, key: str = "checkpoint.load") -> None:
    """Weights alone of the critic in a checkpoint or run, from any layout (collective). key: where the user named it.

    Raises UsageError where there is no critic, or one that does not fit the model.
    """
    _read(find_critic(path, key) / CRITIC, _weights(model), model, key)


def load(path: Path, model: MoEModel, optimizer: Optimizer, critic: CriticState | None = None) -> Progress:
    """Everything that `save` saved (collective); random states only where the number of ranks is the same.

    A critic in the checkpoint that is not asked for stays where it is. Raises UsageError where one is asked for and absent.
    """
    from megatron.core.dist_checkpointing import load_content_metadata

    if critic is not None and not (path / CRITIC).is_dir():
        raise UsageError(
            f"{path}: holds no critic, the run that saved it trained none; begin anew under another run.name (with "
            "checkpoint.load, to keep the policy's weights)"
        )
    same_ranks = (load_content_metadata(str(path)) or {}).get("ranks") == dist.get_world_size()
    state = _read_trained(path, model, optimizer, {"random": _random_state()} if same_ranks else {})
    if critic is not None:
        _read_trained(path / CRITIC, critic.model, critic.optimizer, {})
    if same_ranks:
        torch.set_rng_state(state["random"]["torch"])
    return Progress(**state["progress"])


def _read_trained(path: Path, model: Transformer, optimizer: Optimizer, more: dict[str, Any]) -> dict[str, Any]:
    """Weights, optimizer and schedule into their places; what else was asked for, in what is returned."""
    wanted = _weights(model)
    wanted["optimizer"] = optimizer.sharded_state(wanted, is_loading=True)
    state = _read(path, wanted | more, model)
    optimizer.load_state(state["optimizer"])
    optimizer.schedule.load_state_dict(state["schedule"])
    return state


def _trained(model: Transformer, optimizer: Optimizer) -> dict[str, Any]:
    state = _weights(model)
    state["optimizer"] = optimizer.sharded_state(state, is_loading=False)
    return state | {"schedule": optimizer.schedule.state_dict()}


def _weights(model: Transformer) -> dict[str, Any]:
    metadata = {"dp_cp_group": model.groups.collection.dp_cp}
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(model.bare)}


def _random_state() -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    ranks, rank = dist.get_world_size(), dist.get_rank()
    return {"torch": ShardedObject("random/torch", torch.get_rng_state(), (ranks,), (rank,), replica_id=0)}


def load_begun(path: Path, model: MoEModel) -> "StepState | None":
    """This rank's part of the step within which a checkpoint was saved; None where it was saved after one (collective).

    Raises UsageError in another layout than it was saved in: a microbatch is cut for one.
    """
    if not (path / _BEGUN).is_dir():
        return None
    file, layout = _begun_file(path), model.groups.parallel.model_dump()
    if not file.exists() or len(list((path / _BEGUN).iterdir())) != dist.get_world_size():
        raise UsageError(_ELSEWHERE.format(path=path))
    saved = torch.load(file, map_location=model.device, weights_only=False)
    if saved["layout"] != layout:
        raise UsageError(_ELSEWHERE.format(path=path))
    return saved["step"]


def _begun_file(path: Path) -> Path:
    return path / _BEGUN / f"rank_{dist.get_rank():05d}.pt"


def _write(
    target: Path, states: Iterable[tuple[str, dict[str, Any]]], model: MoEModel, begun: "StepState | None" = None
) -> None:
    """Each state into its folder of `target` ("": itself), and what `model` is: beside its place, then all renamed together;
    what is there under that name is replaced."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Megatron 0.19 asks a process of its own for a queue, also where, as here, threads of this one do the writing
    filesystem_async._results_queue = queue.Queue()
    part = target.with_name(f".{target.name}.part")
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
    for folder, state in states:
        if dist.get_rank() == 0:
            (part / folder).mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(state, str(part / folder), content_metadata={"ranks": dist.get_world_size()})
        dist.barrier()
    if begun is not None:
        if dist.get_rank() == 0:
            (part / _BEGUN).mkdir()
        dist.barrier()
        torch.save({"layout": model.groups.parallel.model_dump(), "step": begun}, _begun_file(part))
        dist.barrier()
    if dist.get_rank() == 0:
        keep_with(part, model.config)
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
    dist.barrier()


def _read(path: Path, wanted: dict[str, Any], model: Transformer, key: str = "checkpoint.load") -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    parts = [f"model{i}" for i in range(len(model.bare))]
    try:
        if wrong := _mismatch(path, [wanted[part] for part in parts]):
            raise UsageError(
                f"{key}={path}: does not fit this model: {wrong}; the model section must be the one it was made with"
            )
        state: Any = dist_checkpointing.load(wanted, str(path))
    except (CheckpointingException, CheckpointException) as error:  # the latter is no Exception
        reason = str(error).strip().splitlines()[-1][:300]
        raise UsageError(f"{key}={path}: cannot be read: {reason}") from error
    for part, chunk in zip(parts, model.bare, strict=True):
        chunk.load_state_dict(state[part])
    return state


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
