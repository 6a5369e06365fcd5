"""Bytes that tensors of a real model really have on each rank: what `moe-rl plan` predicts."""

import re
from typing import Any

import torch
from torch import Tensor

from models.config import OptimizerConfig
from models.model import MoEModel
from models.stream import pack_sequences
from models.value import ValueModel
from moe_rl.rollouts.embedded import EmbeddedEngine, _Generation
from moe_rl.rollouts.engine import Request
from moe_rl.types import Sampling
from parallel.groups import process_groups
from parallel.runtime import Runtime
from tests.distributed.passes import Case, built, sample_batch, streams_here


def held_by_each(runtime: Runtime, cases: list[Case]) -> list[dict[str, Any]]:
    return [held(runtime, case) for case in cases]


def held(runtime: Runtime, case: Case) -> dict[str, Any]:
    """Of one rank, after one update: bytes of weights, gradients and optimizer state; its stage, layers and experts."""
    with built(case, runtime) as model:
        sequences, prompts, _ = sample_batch(case.config, case.seed)
        streams, _ = streams_here(model, sequences, prompts, case.budget)
        optimizer = model.optimizer(OptimizerConfig(lr=1e-3), total_updates=2)
        optimizer.zero_grad()
        losses: list[Any] = [lambda scores: (scores.logprobs.sum(), None)] * len(streams)
        model.accumulate_gradients(streams, losses, 100)
        optimizer.step()
        names = [name for chunk in model.bare for name, _ in chunk.named_parameters()]
        return {
            "states": _states(model, optimizer),
            "stage": model.groups.pipeline.rank,
            "layers": sorted(layer.layer_number - 1 for chunk in model.bare for layer in chunk.decoder.layers),
            "experts": _experts(model),
            "embedding": any("embedding" in name for name in names),
        }


def held_by_critic(runtime: Runtime, case: Case) -> tuple[int, int, int]:
    with process_groups(case.parallel) as groups:
        model = ValueModel(case.config, groups, runtime.device, 0)
        return _states(model, model.optimizer(OptimizerConfig(), total_updates=2))


def cached_by_each(runtime: Runtime, cases: list[Case], prompts: list[int], response: int) -> list[int]:
    return [cached(runtime, case, prompts, response) for case in cases]


def cached(runtime: Runtime, case: Case, prompts: list[int], response: int) -> int:
    """Bytes of keys and values that a generation of prompts of these lengths has when it ends."""
    with built(case, runtime) as model:
        requests = [Request([1] * n, seed=i) for i, n in enumerate(prompts)]
        generation = _Generation(model, requests, Sampling(response, 1.0, 1.0, 0, frozenset(), False), None, True)
        with torch.no_grad(), model.generating():
            generation.run(None)
        buffers = generation.cache._buffers.values()
        assert EmbeddedEngine(model, len(prompts)).max_batch == len(prompts)
        return sum(tensor.untyped_storage().nbytes() for pair in buffers for tensor in pair)


def saved(runtime: Runtime, case: Case, tokens: int) -> int:
    """Bytes that the forward pass of one microbatch of `tokens` tokens saves for its backward pass on this rank."""
    with built(case, runtime) as model:
        return saved_bytes(model, tokens)[0]


def saved_bytes(model: MoEModel, tokens: int) -> tuple[int, int]:
    """Of all tensors that are saved, each memory once, without the weights: (by the forward pass, also by recomputation)."""
    weights = {p.untyped_storage().data_ptr() for chunk in model.bare for p in chunk.parameters()}
    found: dict[int, tuple[int, Tensor]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes(), tensor.detach()  # kept, so that no other takes its place
        return tensor

    def size() -> int:
        return sum(size for size, _ in found.values())

    # two rows of equal length: torch's attention copies others into padded rows
    part = (model.groups.tensor.rank, model.groups.tensor.size)
    stream = pack_sequences([list(range(tokens // 2 + 1))] * 2, [1, 1], tokens, model.device, part=part)
    losses: list[Any] = [lambda scores: (scores.logprobs.sum(), size())]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        before = model.accumulate_gradients([stream], losses, tokens)
    return (before[0] if before else size()), size()


def _states(model: Any, optimizer: Any) -> tuple[int, int, int]:
    buffers = [b for chunk in model.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights = sum(b.param_data.untyped_storage().nbytes() for b in buffers)
    gradients = sum(b.grad_data.untyped_storage().nbytes() for b in buffers)
    inside = {b.param_data.untyped_storage().data_ptr() for b in buffers}
    for chunk in model.bare:  # nothing lies beside the buffers
        assert all(p.untyped_storage().data_ptr() in inside for p in chunk.parameters())
    return weights, gradients, _optimizer_bytes(optimizer, inside)


def _optimizer_bytes(optimizer: Any, weights: set[int]) -> int:
    """Moments, and the weights that are updated where those are not the model's own memory."""
    found: dict[int, int] = {}

    def add(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()

    for part in optimizer.megatron.chained_optimizers:
        inner = part.optimizer
        for group in inner.param_groups:
            for p in group["params"]:
                add(p.data)
                for key in ("exp_avg", "exp_avg_sq"):
                    add(inner.state[p][key])
    return sum(found.values())


def _experts(model: Any) -> list[int]:
    """Global numbers of the experts whose weights lie here, from the names that a checkpoint gives them."""
    from models.initialise import global_shards

    return sorted(
        {int(found[1]) for s in global_shards(model.bare, model.groups) if (found := re.search(r"experts\.(\d+)\.", s.key))}
    )
