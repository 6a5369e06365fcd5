"""Samples in some layout and recomputes what was sampled: tokens, log-probabilities and routes, by global sequence."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from models.model import MoEModel
from models.stream import pack_sequences
from moe_rl.rollouts.embedded import EmbeddedEngine
from moe_rl.rollouts.engine import Request, sample_seed
from moe_rl.types import Response, Sampling
from parallel.runtime import Runtime
from tests.distributed.passes import Case, _routes, built, streams_here


@dataclass(frozen=True)
class Job:
    """What to sample. case.budget: sequences at once. lengths: of the prompts, one after the other.

    second: requests that the second data-parallel rank has at most, so that it ends early, or has nothing to do.
    """

    case: Case
    sampling: Sampling
    lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1)
    second: int = 2

    @property
    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.case.seed)
        vocabulary = self.case.config.vocab_size
        return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in self.lengths]


def generated(runtime: Runtime, jobs: list[Job]) -> list[dict[str, Any]]:
    return [_generate(runtime, job) for job in jobs]


def _generate(runtime: Runtime, job: Job) -> dict[str, Any]:
    with built(job.case, runtime) as model:
        prompts, data = job.prompts, model.groups.data
        mine = list(range(len(prompts)))[data.rank :: data.size]
        if data.rank == 1:
            mine = mine[: job.second]
        engine = EmbeddedEngine(model, max_batch=job.case.budget)
        requests = [Request(prompts[i], sample_seed(job.case.seed, "test", 0, i)) for i in mine]
        here = dict(zip(mine, engine.generate(requests, job.sampling), strict=True))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, here)
        responses: dict[int, Response] = {}
        for part in gathered:
            for i, response in part.items():
                assert i not in responses or responses[i].token_ids == response.token_ids
                responses[i] = response
        return {
            "tokens": {i: responses[i].token_ids for i in sorted(responses)},
            "finish": {i: responses[i].finish_reason for i in sorted(responses)},
            "logprobs": {i: responses[i].logprobs for i in sorted(responses)},
            **_recomputed(model, job, responses),
        }


def _recomputed(model: MoEModel, job: Job, responses: dict[int, Response]) -> dict[str, Any]:
    """Largest gap of log-probabilities to a plain forward, and how many choices of experts differ from its."""
    prompts, order = job.prompts, sorted(responses)
    sequences = [prompts[i] + responses[i].token_ids for i in order]
    streams, packs = streams_here(model, sequences, [len(prompts[i]) for i in order], budget=40)
    for stream in streams:
        stream.temperature = job.sampling.temperature or 1.0
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
        engine_routes = responses[order[j]].routes
        assert engine_routes is not None and len(engine_routes) == len(rows)
        place = job.case.config.moe_layers.index(layer)
        wrong += int((engine_routes[:, place].long().sort(-1).values != rows)[seen].sum())
        routes += int(seen.sum())
    gaps = torch.tensor([gap])
    dist.all_reduce(gaps, dist.ReduceOp.MAX)
    counts = torch.tensor([wrong, routes, compared])
    dist.all_reduce(counts)
    wrong, routes, compared = counts.tolist()
    return {"gap": float(gaps), "wrong_routes": wrong, "routes": routes, "compared": compared}


def argmaxes(runtime: Runtime, job: Job, tokens: dict[int, list[int]]) -> dict[int, list[int]]:
    """The likeliest token of a plain forward before each of `tokens`, and the margin to the next."""
    with built(job.case, runtime) as model, torch.no_grad():
        found = {}
        for i, response in tokens.items():
            sequence, prompt = job.prompts[i] + response, len(job.prompts[i])
            size = -(-(len(sequence) - 1) // model.groups.tensor.size) * model.groups.tensor.size
            stream = pack_sequences([sequence], [prompt], size, model.device)
            stream.targets = None
            logits = model.next_token_logits(stream)
            assert logits is not None
            found[i] = logits[:, : job.case.config.vocab_size].argmax(-1).tolist()
        return found


def permuted(runtime: Runtime, job: Job) -> list[list[int]]:
    """The same requests in another order, some of them twice and among others: responses in the order of `job`."""
    with built(job.case, runtime) as model:
        engine = EmbeddedEngine(model, max_batch=job.case.budget)
        requests = [Request(p, sample_seed(job.case.seed, "test", 0, i)) for i, p in enumerate(job.prompts)]
        others = [Request([7, 7, 7], seed) for seed in range(3)]
        mixed = [*others, *reversed(requests), *requests[:2]]
        out = engine.generate(mixed, job.sampling, routes=False)
        assert all(response.routes is None for response in out)
        assert [out[-2].token_ids, out[-1].token_ids] == [out[-3].token_ids, out[-4].token_ids]
        return [response.token_ids for response in reversed(out[3:-2])]
