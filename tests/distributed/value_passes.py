"""One batch through a value model in some layout: everything that must not depend on the layout, gathered on rank 0."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.config import OptimizerConfig
from models.initialise import global_shards
from models.model import MoEModel
from models.optimizer import Optimizer
from models.stream import Stream, pack_sequences
from models.transformer import HeadLoss, Transformer
from models.value import ValueModel
from parallel.runtime import Runtime
from tests.distributed.passes import Case, _gradients, _routes, built, gather_global, merge, sample_batch, streams_here


@contextlib.contextmanager
def both(case: Case, runtime: Runtime) -> Iterator[tuple[MoEModel, ValueModel]]:
    """A policy and a critic on the same ranks, with different weights."""
    with built(case, runtime) as policy:
        yield policy, ValueModel(case.config, policy.groups, runtime.device, case.seed + 50)


@torch.no_grad()
def set_head(critic: ValueModel, seed: int) -> Tensor:
    """Gives the head, on the ranks that have it, random weights [hidden], which are handed back everywhere."""
    weight = 0.1 * torch.randn(critic.config.hidden, generator=torch.Generator().manual_seed(seed))
    for chunk in critic.bare:
        if chunk.post_process:
            chunk.output_layer.weight.copy_(weight)
    return weight


def weights(model: Transformer) -> dict[str, Tensor]:
    """Copies of this rank's shards, by global names."""
    return {shard.key: shard.data.clone() for shard in global_shards(model.bare, model.groups)}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


def squared_errors(members: list[int], sequences: list[list[int]], prompts: list[int], weights: list[float]) -> Any:
    """Of values and a target that falls along a response, weighed by sequence; its sum is the same however it is split."""
    counts = [len(sequences[i]) - prompts[i] for i in members]
    each = torch.cat([torch.full((n,), abs(weights[i])) for i, n in zip(members, counts, strict=True)] or [torch.zeros(0)])
    target = torch.cat([weights[i] / torch.arange(1.0, n + 1) for i, n in zip(members, counts, strict=True)] or [each])

    def loss(values: Tensor) -> tuple[Tensor, float]:
        value = (each * (values - target).square()).sum() / 100
        return value, float(value.detach())

    return loss


def update_policy(policy: MoEModel, optimizer: Optimizer, seed: int) -> float:
    """As update_values."""
    return _update(policy, optimizer, seed, lambda scores: (-scores.logprobs.sum() / 7, None))


def update_values(critic: ValueModel, optimizer: Optimizer, seed: int) -> float:
    """One step on one sequence for each microbatch that the schedule needs, the same on every data-parallel rank. Returns its
    gradient norm."""
    return _update(critic, optimizer, seed, lambda values: ((values - 1).square().sum() / 7, None))


def _update(model: Any, optimizer: Optimizer, seed: int, loss: HeadLoss) -> float:
    streams = [one_sequence(model.device, seed + 100 * i) for i in range(model.microbatch_count(1))]
    optimizer.zero_grad()
    model.accumulate_gradients(streams, [loss] * len(streams), sum(stream.real for stream in streams))
    return optimizer.step()


def one_sequence(device: torch.device, seed: int) -> Stream:
    """A prompt of 2 tokens and a response of 7."""
    sequence = torch.randint(0, 259, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
    return pack_sequences([sequence], [2], 8, device)


def one_pass(runtime: Runtime, case: Case) -> dict[str, Any]:
    """As passes.one_pass, of a critic whose trunk is the policy's; "logprobs" are values, and "policy" is its weights."""
    with both(case, runtime) as (policy, critic):
        critic.copy_trunk(policy)
        set_head(critic, case.seed)
        sequences, prompts, weights = sample_batch(case.config, case.seed)
        streams, packs = streams_here(policy, sequences, prompts, case.budget, case.shares)
        initial, trunk = gather_global(critic, {}), gather_global(policy, {})
        counts = [[len(sequences[i]) - prompts[i] for i in members] for members in packs]
        values: dict[int, Tensor] = {}
        for found, members, sizes in zip(critic.values(streams), packs, counts, strict=False):
            assert found.dtype == torch.float32
            _assert_same_on_tensor_ranks(critic, found)
            values.update(zip(members, found.split(sizes), strict=True))
        routes = _routes(critic, streams, packs)
        # a large epsilon: the first step of Adam is the sign of a gradient, and next to 0 that is noise
        optimizer = critic.optimizer(OptimizerConfig(lr=1e-3, grad_clip=1.0, epsilon=1e-5), total_updates=10)
        optimizer.zero_grad()
        losses = [squared_errors(part, sequences, prompts, weights) for part in packs]
        results = critic.accumulate_gradients(streams, losses, sum(len(s) - 1 for s in sequences))
        loss = torch.tensor([float(sum(results)) if critic.groups.is_last_stage and critic.groups.tensor.rank == 0 else 0.0])
        dist.all_reduce(loss)
        gradients = gather_global(critic, _gradients(critic))
        norm = optimizer.step()
        after = gather_global(critic, {})
        pieces = {"logprobs": values, "routes": routes, "loss": loss.item(), "norm": norm}
        out = merge(pieces | {"initial": initial, "gradients": gradients, "after": after})
        other = merge(pieces | {"initial": trunk, "gradients": {}, "after": {}})
        return out | {"policy": other["initial"]} if out else {}


def _assert_same_on_tensor_ranks(critic: ValueModel, values: Tensor) -> None:
    tensor = critic.groups.tensor
    if tensor.size > 1:
        copies = [torch.empty_like(values) for _ in range(tensor.size)]
        dist.all_gather(copies, values, group=tensor.group)
        assert all(torch.equal(copy, values) for copy in copies), "values differ between tensor ranks"


def passes(runtime: Runtime, cases: list[Case]) -> list[dict[str, Any]]:
    return [one_pass(runtime, case) for case in cases]
