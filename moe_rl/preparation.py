"""A rollout batch as this rank's microbatches, with what their losses need of the rollout."""

from collections.abc import Sequence

import torch

from models.model import MoEModel
from moe_rl.algorithms.base import Denominators
from moe_rl.algorithms.config import AlgorithmSection
from moe_rl.batching import split_minibatches
from moe_rl.microbatches import Microbatch, Minibatch, Prepared, Scored, cut
from moe_rl.replay import Routes, exchange_routes, stream_routes
from moe_rl.types import Rollout


def prepare(
    model: MoEModel, rollouts: Sequence[Rollout], algorithm: AlgorithmSection, temperature: float, seed: int, step: int
) -> list[Minibatch]:
    """Cuts the batch into minibatches, and this data-parallel rank's share of each into microbatches (collective)."""
    sequences = [Scored(r.prompt_ids, r.response.token_ids) for r in rollouts]
    minibatches = []
    for places in split_minibatches(len(rollouts), algorithm.minibatches, seed, step):
        microbatches = cut(model, sequences, places, algorithm.microbatch_tokens, temperature)
        minibatches.append(
            Minibatch(
                places,
                [_prepared(model, microbatch, rollouts) for microbatch in microbatches],
                Denominators(len(places), sum(len(sequences[i].response_ids) for i in places)),
                sum(sequences[i].entering for i in places),
            )
        )
    return minibatches


def _prepared(model: MoEModel, microbatch: Microbatch, rollouts: Sequence[Rollout]) -> Prepared:
    device, members = model.device, [rollouts[i].response for i in microbatch.members]
    lengths = torch.tensor([len(response.token_ids) for response in members], dtype=torch.int64)
    rollout = torch.tensor([p for r in members for p in r.logprobs], dtype=torch.float32, device=device)
    return Prepared(
        microbatch,
        sequence=torch.arange(len(members)).repeat_interleave(lengths).to(device),
        rollout_logprobs=rollout,
        advantages=torch.zeros_like(rollout),
    )


def lay_out(model: MoEModel, parts: Sequence[Prepared], routes: Routes) -> None:
    """Brings each sample's rollout routes to the ranks that train on it, laid out like the stream's tokens (collective)."""
    mine = [i for part in parts for i in part.microbatch.members]
    here = exchange_routes(routes, mine, model.groups, model.device)
    for part in parts:
        members = part.microbatch.members
        if lacking := [i for i in members if i not in here]:
            raise ValueError(f"rollout routes, sample {lacking[0]}: no rank has them")
        stream, config = part.microbatch.stream, model.config
        part.rollout_routes = stream_routes(stream, members, here, config.topk, config.experts, len(model.moe_layers))
