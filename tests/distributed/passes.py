"""One batch through the model in some layout: everything that must not depend on the layout, gathered on rank 0."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.config import ModelConfig, OptimizerConfig
from models.initialise import global_shards
from models.model import MoEModel, Scores
from models.presets import PRESETS
from models.routing import Replay
from models.stream import Stream, pack_sequences
from models.transformer import Transformer
from moe_rl.batching import assign_to_ranks, pack
from moe_rl.replay import stream_routes
from parallel.config import ParallelConfig
from parallel.groups import process_groups
from parallel.runtime import Runtime


@dataclass(frozen=True)
class Case:
    """A layout, a model and a microbatch budget. shares: as how many data-parallel ranks one cuts its microbatches.
    replay: forced routes, drawn for each token and layer, most of them not what the live routers choose."""

    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    budget: int = 10_000
    seed: int = 0
    shares: int = 1
    replay: bool = False

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(**self.layout)

    @property
    def config(self) -> ModelConfig:
        small: dict[str, Any] = dict(layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, moe_ffn=48, init_std=0.1)
        return ModelConfig.model_validate(PRESETS["tiny_moe"] | small | self.model)


def sample_batch(config: ModelConfig, seed: int, count: int = 13) -> tuple[list[list[int]], list[int], list[float]]:
    """Sequences of unequal length, prompt lengths, and a weight for each."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, 24, (count,), generator=generator).tolist()
    sequences = [torch.randint(0, config.vocab_size, (n,), generator=generator).tolist() for n in sizes]
    prompts = [1 + int(torch.randint(0, n - 1, (1,), generator=generator)) for n in sizes]
    weights = torch.randn(count, generator=generator).tolist()
    return sequences, prompts, weights


@contextlib.contextmanager
def built(case: Case, runtime: Runtime) -> Iterator[MoEModel]:
    with process_groups(case.parallel) as groups:
        yield MoEModel(case.config, groups, runtime.device, case.seed)


def streams_here(
    model: MoEModel, sequences: list[list[int]], prompts: list[int], budget: int, shares: int = 1
) -> tuple[list[Stream], list[list[int]]]:
    """This data-parallel rank's share (or all shares, each by itself) as filled-up streams, and which sequences each holds."""
    data = model.groups.data
    packs = [
        [mine[i] for i in part]
        for mine in assign_to_ranks([len(s) - 1 for s in sequences], data.size * shares)[data.rank :: data.size]
        for part in pack([len(sequences[i]) - 1 for i in mine], budget)
    ]
    packs += [[] for _ in range(model.microbatch_count(len(packs)) - len(packs))]
    sizes = model.stream_sizes([sum(len(sequences[i]) - 1 for i in part) for part in packs])
    streams = [
        pack_sequences(
            [sequences[i] for i in part],
            [prompts[i] for i in part],
            size,
            model.device,
            samples=part,
            part=(model.groups.tensor.rank, model.groups.tensor.size),
        )
        for part, size in zip(packs, sizes, strict=True)
    ]
    return streams, packs


def one_pass(runtime: Runtime, case: Case) -> dict[str, Any]:
    """Scores, routes, loss, gradient norm, every gradient and the weights after one update; by global names."""
    with built(case, runtime) as model:
        sequences, prompts, weights = sample_batch(case.config, case.seed)
        streams, packs = streams_here(model, sequences, prompts, case.budget, case.shares)
        initial = gather_global(model, {})
        replay = _forced(model, streams, packs, sequences, case.seed) if case.replay else None
        scores = model.score(streams, replay)
        logprobs = {
            i: part
            for scored, members in zip(scores, packs, strict=False)
            for i, part in zip(members, scored.logprobs.split([len(sequences[i]) - prompts[i] for i in members]), strict=True)
        }
        routes = _routes(model, streams, packs)
        # a large epsilon: the first step of Adam is the sign of a gradient, and next to 0 that is noise
        optimizer = model.optimizer(OptimizerConfig(lr=1e-3, grad_clip=1.0, epsilon=1e-5), total_updates=10)
        optimizer.zero_grad()
        tokens = sum(len(s) - 1 for s in sequences)
        losses = [_weighted_loss(part, sequences, prompts, weights) for part in packs]
        results = model.accumulate_gradients(streams, losses, tokens, replay)
        loss = torch.tensor([float(sum(results)) if model.groups.is_last_stage and model.groups.tensor.rank == 0 else 0.0])
        dist.all_reduce(loss)
        gradients = gather_global(model, _gradients(model))
        norm = optimizer.step()
        after = gather_global(model, {})
        return merge(
            {
                "logprobs": logprobs,
                "routes": routes,
                "loss": loss.item(),
                "norm": norm,
                "initial": initial,
                "gradients": gradients,
                "after": after,
            }
        )


def _forced(
    model: MoEModel, streams: list[Stream], packs: list[list[int]], sequences: list[list[int]], seed: int
) -> list[Replay]:
    """Random distinct experts for every token and layer of every sequence; of these, what falls to this rank."""
    config = model.config
    generator = torch.Generator().manual_seed(seed + 1000)
    drawn = [
        torch.rand(len(s) - 1, len(config.moe_layers), config.experts, generator=generator)
        .topk(config.topk)
        .indices.sort(-1)[0]
        for s in sequences
    ]
    places = [config.moe_layers.index(layer) for layer in model.moe_layers]
    routes = {i: rows[:, places].sort(-1).values.to(torch.uint8) for i, rows in enumerate(drawn)}
    return [
        Replay(stream_routes(stream, members, routes, config.topk, config.experts, len(places)))
        for stream, members in zip(streams, packs, strict=True)
    ]


def _weighted_loss(members: list[int], sequences: list[list[int]], prompts: list[int], weights: list[float]) -> Any:
    """A loss with a term a token, through log-probabilities and entropies; its sum is the same however it is split."""

    def loss(scores: Scores) -> tuple[Tensor, float]:
        each = torch.cat([torch.full((len(sequences[i]) - prompts[i],), weights[i]) for i in members] or [torch.zeros(0)])
        value = (each * (scores.logprobs + 0.1 * scores.entropy)).sum() / 100
        return value, float(value.detach())

    return loss


def _routes(model: Transformer, streams: list[Stream], packs: list[list[int]]) -> dict[tuple[int, int], Tensor]:
    """(sequence, layer) -> sorted expert ids [tokens, K]; only this rank's tokens, -1 elsewhere."""
    out = {}
    tensor = model.groups.tensor
    for stream, members in zip(streams, packs, strict=True):
        assert stream.routes is not None
        for layer, chosen in stream.routes.choice.items():
            whole = torch.full((stream.size, chosen.shape[1]), -1, dtype=torch.int64)
            part = stream.size // tensor.size
            whole[tensor.rank * part : (tensor.rank + 1) * part] = chosen.sort(-1).values
            for i, rows in zip(members, whole[: stream.real].split(stream.lengths), strict=True):
                out[i, layer] = rows
    return out


def _gradients(model: Transformer) -> dict[int, Tensor]:
    """Data pointer of each parameter -> its whole gradient (the distributed optimizer leaves each rank only a shard)."""
    for chunk in model.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):  # pyright: ignore[reportGeneralTypeIssues]
            size, rank = dist.get_world_size(buffer.data_parallel_group), dist.get_rank(buffer.data_parallel_group)
            for bucket in buffer.buckets:
                shard = bucket.grad_data.view(size, -1)[rank].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=buffer.data_parallel_group)
    return {p.data_ptr(): p.main_grad for chunk in model.bare for p in chunk.parameters()}


def gather_global(model: Transformer, instead: dict[int, Tensor]) -> dict[tuple[str, Any], tuple[Any, Any]]:
    """(name, offset) -> (whole shape, values) of this rank's shards; `instead` replaces parameters by other tensors."""
    saved = {}
    for chunk in model.bare:
        for p in chunk.parameters():
            if p.data_ptr() in instead:
                saved[p] = p.data.clone(), instead[p.data_ptr()]
    with torch.no_grad():
        for p, (_, other) in saved.items():
            p.data.copy_(other)
        out = {  # numpy: it pickles fast; a copy in float32, which holds bfloat16 exactly
            (s.key, s.global_offset): (s.global_shape, s.data.detach().to(torch.float32, copy=True).numpy())
            for s in global_shards(model.bare, model.groups)
        }
        for p, (own, _) in saved.items():
            p.data.copy_(own)
    return out


def merge(mine: dict[str, Any]) -> dict[str, Any]:
    """All ranks' pieces on rank 0 (collective): log-probabilities by sequence, whole routes, whole tensors by name."""
    everything: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everything)
    if everything is None:
        return {}
    whole: dict[str, Any] = {"loss": mine["loss"], "norm": mine["norm"], "logprobs": {}, "routes": {}}
    for piece in everything:
        whole["logprobs"].update(piece["logprobs"])
        for key, rows in piece["routes"].items():
            whole["routes"][key] = torch.maximum(whole["routes"].get(key, rows), rows)
    for name in ("initial", "gradients", "after"):
        tensors: dict[str, Tensor] = {}
        for piece in everything:
            for (key, offset), (shape, values) in piece[name].items():
                target = tensors.setdefault(key, torch.full(shape, float("nan")))
                where = tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))
                part = torch.from_numpy(values)
                assert target[where].isnan().all() or torch.equal(target[where], part), f"{name} of {key}: copies differ"
                target[where] = part
        whole[name] = tensors
    return whole


def passes(runtime: Runtime, cases: list[Case]) -> list[dict[str, Any]]:
    return [one_pass(runtime, case) for case in cases]
