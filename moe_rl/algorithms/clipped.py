"""The objective of PPO, GRPO and their kin: one importance ratio a token, clipped (arXiv 1707.06347, 2402.03300)."""

from moe_rl.algorithms.base import Constants, LossInputs, Objective, Ratios, token_log_ratio
from moe_rl.algorithms.clipping import clip_pessimistically


def clipped(inputs: LossInputs, constants: Constants) -> Objective:
    """min(w A, clip(w) A) of each token, w = exp(train - old) (arXiv 1707.06347, eq. 7; arXiv 2402.03300, eq. 3)."""
    assert constants.clip is not None
    log_ratio, advantages = token_log_ratio(inputs), inputs.advantages.detach()
    found = clip_pessimistically(log_ratio, advantages, constants.clip)
    ratios = Ratios(log_ratio.detach(), advantages, inputs.mask, found.cut_low, found.cut_high)
    return Objective(found.exponent.exp() * advantages, ratios)
