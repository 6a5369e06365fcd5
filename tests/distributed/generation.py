"""Samples in some layout and recomputes what was sampled: tokens, log-probabilities and routes, by global sequence."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rl.rollouts.embedded import EmbeddedEngine
from moe_rl.rollouts.engine import Request, sample_seed
from moe_rl.types import Response, Sampling
from parallel.runtime import Runtime
from tests.distributed.passes import Case, _routes, built, streams_here


def letters(ids: Sequence[int]) -> str:
    """A text of one letter a token, of few kinds, so that a stop text of three turns up."""
    return "".join("abcd"[i % 4] for i in ids)


def generated(runtime: Runtime, cases: list[tuple[Case, Sampling]]) -> list[dict[str, Any]]:
    return [_generate(runtime, case, sampling) for case, sampling in cases]


def _generate(runtime: Runtime, case: Case, sampling: Sampling, count: int = 11) -> dict[str, Any]:
    with built(case, runtime) as model:
        generator = torch.Generator().manual_seed(case.seed)
        prompts = [torch.randint(0, case.config.vocab_size, (1 + i % 5,), generator=generator).tolist() for i in range(count)]
        mine = list(range(count))[model.groups.data.rank :: model.groups.data.size]
        if model.groups.data.rank == 1:
            mine = mine[:2]  # ends early, while the others go on
        engine = EmbeddedEngine(model, case.budget, letters)
        requests = [Request(prompts[i], sample_seed(case.seed, "test", 0, i)) for i in mine]
        here = dict(zip(mine, engine.generate(requests, sampling), strict=True))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (here, model.moe_layers))
        responses: dict[int, Response] = {}
        routed: dict[tuple[int, int], Tensor] = {}  # (request, layer): each stage knows its own layers
        for part, layers in gathered:
            for i, response in part.items():
                assert i not in responses or responses[i].token_ids == response.token_ids
                responses[i] = response
                assert response.routes is not None
                routed |= {(i, layer): response.routes[:, place] for place, layer in enumerate(layers)}
        order = sorted(responses)
        sequences = [prompts[i] + responses[i].token_ids for i in order]
        streams, packs = streams_here(model, sequences, [len(prompts[i]) for i in order], budget=40)
        for stream in streams:
            stream.temperature = sampling.temperature or 1.0
        scores = model.score(streams)
        gap, compared = 0.0, 0
        for scored, members in zip(scores, packs, strict=False):
            sampled = torch.tensor([p for j in members for p in responses[order[j]].logprobs])
            if len(sampled):
                gap = max(gap, float((scored.logprobs - sampled).abs().max()))
                compared += len(sampled)
        wrong, routes = 0, 0
        for (j, layer), rows in _routes(model, streams, packs).items():
            seen = rows[:, 0] >= 0
            engine_routes = routed[order[j], layer]
            assert len(engine_routes) == len(rows)
            wrong += int((engine_routes.long().sort(-1).values != rows)[seen].sum())
            routes += int(seen.sum())
        totals = torch.tensor([gap, -gap])
        dist.all_reduce(totals, dist.ReduceOp.MAX)
        counts = torch.tensor([wrong, routes, compared])
        dist.all_reduce(counts)
        return {
            "tokens": {i: responses[i].token_ids for i in order},
            "finish": {i: responses[i].finish_reason for i in order},
            "gap": float(totals[0]),
            "wrong_routes": int(counts[0]),
            "routes": int(counts[1]),
            "compared": int(counts[2]),
        }
