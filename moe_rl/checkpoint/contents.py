"""What is in a checkpoint: weights, optimizer, schedule, random states, and where the run stands."""

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from models.optimizer import Optimizer
from models.transformer import Transformer
from models.value import ValueModel


class CriticState(NamedTuple):
    """A value model and what trains it."""

    model: ValueModel
    optimizer: Optimizer


@dataclass(frozen=True)
class Progress:
    """Where a run stands. position: problems drawn so far. policy_version: optimizer updates so far. replay: the mode that an
    alarm switched on, else "". watch: the stability watch's state as JSON text, in which no format changes a number.
    task, tokenizer: fingerprints of the problems and of the vocabulary that the run began with; "": not known."""

    step: int
    position: int
    policy_version: int
    kl_coefficient: float
    replay: str = ""
    watch: str = ""
    task: str = ""
    tokenizer: str = ""


def trained(model: Transformer, optimizer: Optimizer) -> dict[str, Any]:
    """Weights, optimizer and schedule as they are, for saving."""
    state = weights(model)
    state["optimizer"] = optimizer.sharded_state(state, is_loading=False)
    return state | {"schedule": optimizer.schedule.state_dict()}


def weights(model: Transformer) -> dict[str, Any]:
    """Each chunk's as Megatron's shards, by model0, model1 ..."""
    metadata = {"dp_cp_group": model.groups.collection.dp_cp}
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(model.bare)}


def random_states() -> dict[str, Any]:
    """This rank's generators, each as a shard by name: torch's, Python's and numpy's, which a user's reward may draw from, and
    on a GPU its own and Megatron's."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)),
    }
    if torch.cuda.is_available():
        states |= {"cuda": torch.cuda.get_rng_state(), "megatron": dict(_tracker().get_states())}
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return {name: ShardedObject(f"random/{name}", state, (ranks,), (rank,), replica_id=0) for name, state in states.items()}


def set_random_states(states: dict[str, Any]) -> None:
    """Takes over what was loaded into `random_states`; what is not there stays as it is."""
    torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        kind, keys, *rest = states["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
        _tracker().set_states(states["megatron"])


def _tracker() -> Any:
    """Of what Megatron draws where tensor-parallel ranks must differ."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
