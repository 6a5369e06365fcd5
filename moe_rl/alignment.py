"""Whether the log-probabilities that an engine reported belong to the tokens that it reported them for.

A shift by one token leaves every number plausible, so it is looked for: the trainer's log-probabilities with the same weights
are compared with the engine's of the same token, of the one before and of the one after. What precision, another kernel, top-p
or stale weights do to the engine's does not move them to a neighbour's place.
"""

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

# Fewer neighbours than these could fit a wrong place by chance
_LEAST_PAIRS = 32
# Nats a token. The embedded engine on a CPU stays below 3e-6, in float32 as in bfloat16; a shift leaves 0.7 to 1.8 of fresh
# weights of different sizes, less the surer a policy is
_NEGLIGIBLE = 1e-3
# At a neighbour's place log-probabilities lie further away than at their own: 1.0 (top_k=1, which reports 0 everywhere) to 10
# times under top-p and top-k, 1e5 times and more without. After a shift it is less than 1e-5 times as far
_SHARE = 0.5


def neighbour_gaps(
    old_logprobs: Float[Tensor, " T"], rollout_logprobs: Float[Tensor, " T"], sequence: Int[Tensor, " T"]
) -> Float64[Tensor, "5"]:
    """Sums over neighbours (a, b) of a sequence, which ranks add up: |old - rollout| of a, and of b; |old of b - rollout of a|,
    |old of a - rollout of b|; and how many pairs these are. Tokens of a sequence stand together, in order."""
    old, rollout = old_logprobs.double(), rollout_logprobs.double()
    pair = sequence[1:] == sequence[:-1]
    own = (old - rollout).abs()
    gaps = [own[:-1], own[1:], (old[1:] - rollout[:-1]).abs(), (old[:-1] - rollout[1:]).abs(), torch.ones_like(own[1:])]
    return torch.stack([gap[pair].sum() for gap in gaps])


def check_alignment(sums: Float64[Tensor, "5"]) -> None:
    """Raises ValueError where the engine's log-probabilities fit a neighbour's place far better than their own.

    Both tokens of a pair must say so: were only the first token of responses off, one of them would.
    """
    first, second, early, late, pairs = sums.tolist()
    own, shifted = min(first, second), min(early, late)
    if pairs < _LEAST_PAIRS or own <= _NEGLIGIBLE * pairs or not shifted < _SHARE * own:
        return
    where = "after" if early < late else "before"
    raise ValueError(
        f"rollout log-probabilities: shifted by one token: on average {own / pairs:.3g} nats from the trainer's, with the same "
        f"weights, and {shifted / pairs:.3g} from the trainer's of the token {where}; the engine must report as "
        "logprobs[i] that of token_ids[i]"
    )
