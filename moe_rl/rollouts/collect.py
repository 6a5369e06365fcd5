"""Prompts -> responses -> rewards: one rollout batch, the same on every rank in the end, whatever the layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moe_rl.collectives import from_model_main, gather_over_data
from moe_rl.replay import check_rollout_routes
from moe_rl.rollouts.engine import Request, sample_seed
from moe_rl.rollouts.stopping import before_stop
from moe_rl.session import Session
from moe_rl.stopwatch import Stopwatch
from moe_rl.tasks import Score, score_response
from moe_rl.types import Problem, Response, Rollout, Sampling


@dataclass(frozen=True)
class Batch:
    """rollouts[i].index == i; responses to one problem stand together."""

    rollouts: list[Rollout]
    scores: list[Score]
    tokens: int  # generated
    routes: dict[int, Tensor] | None = None  # of the rollouts sampled on this data-parallel rank, of this stage's layers


def collect(
    session: Session,
    problems: Sequence[Problem],
    responses: int,
    sampling: Sampling,
    purpose: str,
    step: int,
    watch: Stopwatch,
    *,
    routes: bool = False,
    first: int = 0,
) -> Batch:
    """Samples `responses` responses to each problem and scores them (collective). `purpose`, `step` and a response's number
    seed it; `first`: the number of the first one.

    The text that is rewarded is without the token that ended it, and ends before a stop text; the response keeps both.
    routes: have the engine record them. Raises ValueError where it did not, or not rightly.
    """
    groups, tokenizer = session.groups, session.tokenizer
    prompts = [session.encoder.prompt(problem) for problem in problems]
    mine = range(len(problems) * responses)[groups.data.rank :: groups.data.size]
    seed = session.config.run.seed
    with watch("rollout"):
        requests = [Request(prompts[i // responses], sample_seed(seed, purpose, step, first + i)) for i in mine]
        sampled = session.engine.generate(requests, sampling, routes=routes)
        kept = _take_routes(session, mine, requests, sampled) if routes else None
        sampled = [replace(response, routes=None) for response in sampled]  # they are not for every rank
    with watch("reward"):
        texts = [before_stop(tokenizer.decode(_without_stop(r.token_ids, sampling)), sampling.stop) for r in sampled]
        scores = None
        if groups.is_model_main:  # once a model copy: a user's reward may be costly, or not repeat itself
            on_error = session.config.task.on_reward_error
            scores = []
            for text, i in zip(texts, mine, strict=True):
                scores.append(score_response(session.task, text, problems[i // responses], on_error))
                session.progress("reward")
        scores = from_model_main(scores, groups)
        here = [
            Rollout(i, problems[i // responses], prompts[i // responses], response, text, score.value, dict(score.parts))
            for i, response, text, score in zip(mine, sampled, texts, scores, strict=True)
        ]
        pairs = gather_over_data(list(zip(here, scores, strict=True)), groups)
    pairs.sort(key=lambda pair: pair[0].index)
    return Batch([r for r, _ in pairs], [s for _, s in pairs], sum(len(r.response.token_ids) for r, _ in pairs), kept)


def _take_routes(
    session: Session, samples: Sequence[int], requests: Sequence[Request], responses: Sequence[Response]
) -> dict[int, Tensor]:
    model = session.model.config
    return {
        i: check_rollout_routes(
            response.routes,
            i,
            len(request.prompt_ids) + len(response.token_ids) - 1,
            session.model.moe_layers,
            model.topk,
            model.experts,
        )
        for i, request, response in zip(samples, requests, responses, strict=True)
    }


def _without_stop(token_ids: list[int], sampling: Sampling) -> list[int]:
    """What the reward sees: the response without the token that ended it."""
    return token_ids[:-1] if token_ids and token_ids[-1] in sampling.stop_token_ids else token_ids


def reward_metrics(batch: Batch) -> dict[str, float]:
    """Of a rollout batch. Lengths in tokens."""
    rewards = [r.reward for r in batch.rollouts]
    lengths = [len(r.response.token_ids) for r in batch.rollouts]
    count, mean = len(rewards), sum(rewards) / len(rewards)
    metrics = {
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / count) ** 0.5,
        "reward/correct_fraction": sum(s.correct for s in batch.scores) / count,
        "reward/failed": float(sum(s.failed for s in batch.scores)),
        "response/length_mean": sum(lengths) / count,
        "response/length_max": float(max(lengths)),
        "response/stopped_fraction": sum(r.response.finish_reason == "stop" for r in batch.rollouts) / count,
    }
    for name in sorted({name for r in batch.rollouts for name in r.parts}):
        values = [r.parts[name] for r in batch.rollouts if name in r.parts]
        metrics[f"reward/parts/{name}"] = sum(values) / len(values)
    return metrics
