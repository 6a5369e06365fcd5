"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups whose responses are all right or all wrong teach nothing, and
are replaced by others."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moe_rl.rollouts.collect import Batch
from moe_rl.types import Problem


@dataclass(frozen=True)
class Sampled:
    """kept: the batch to learn from. everything: all that was sampled, for metrics. problems: how many were drawn."""

    kept: Batch
    everything: Batch
    problems: int
    metrics: dict[str, float]


# (problems, number of the first response) -> batch
Collect = Callable[[Sequence[Problem], int], Batch]


def sample_groups(
    take: Callable[[int, int], Sequence[Problem]], collect: Collect, prompts: int, responses: int, rounds: int
) -> Sampled:
    """`prompts` groups of `responses` with 0 < correct < responses, in the order in which they were drawn.

    take(i, n): n problems, the first of them the i-th of this step. At most `rounds` rollouts: the first of `prompts`
    problems, the others of as many as the share kept so far makes likely to be needed. What is still missing then is filled up
    with the first groups that were dropped (sampling/filled_groups), so that a batch always has its size.
    """
    batches: list[Batch] = []
    drawn, mixed = 0, list[tuple[int, int]]()  # (round, group) of those to keep
    for number in range(rounds):
        missing = prompts - len(mixed)
        if missing <= 0:
            break
        share = len(mixed) / drawn if drawn else 1.0
        wanted = prompts if not drawn or not share else min(prompts, math.ceil(missing / share))
        batches.append(collect(take(drawn, wanted), drawn * responses))
        drawn += wanted
        mixed += [(number, group) for group in range(wanted) if _is_mixed(batches[-1], group, responses)]
    kept = mixed[:prompts]
    everywhere = [(r, g) for r, batch in enumerate(batches) for g in range(len(batch.rollouts) // responses)]
    dropped = sorted(set(everywhere) - set(mixed))
    filled = dropped[: prompts - len(kept)]
    metrics = {
        "sampling/kept_fraction": len(mixed) / drawn,
        "sampling/rounds": float(len(batches)),
        "sampling/filled_groups": float(len(filled)),
    }
    return Sampled(
        _select(batches, sorted([*kept, *filled]), responses), _select(batches, everywhere, responses), drawn, metrics
    )


def _is_mixed(batch: Batch, group: int, responses: int) -> bool:
    correct = sum(score.correct for score in batch.scores[group * responses : (group + 1) * responses])
    return 0 < correct < responses


def _select(batches: Sequence[Batch], groups: Sequence[tuple[int, int]], responses: int) -> Batch:
    """These groups as one batch, renumbered."""
    places = [(number, group * responses + i) for number, group in groups for i in range(responses)]
    rollouts = [replace(batches[number].rollouts[i], index=new) for new, (number, i) in enumerate(places)]
    known = all(batch.routes is not None for batch in batches)
    routes = {
        new: found[i] for new, (number, i) in enumerate(places) if (found := batches[number].routes) is not None and i in found
    }
    tokens = sum(len(rollout.response.token_ids) for rollout in rollouts)
    return Batch(rollouts, [batches[number].scores[i] for number, i in places], tokens, routes if known else None)
