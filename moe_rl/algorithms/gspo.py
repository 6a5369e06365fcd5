"""Group Sequence Policy Optimization: one importance ratio a sequence (Zheng et al., arXiv 2507.18071)."""

from moe_rl.algorithms.base import Constants, LossInputs, Objective, Ratios, sequence_means, sequence_sizes, token_log_ratio
from moe_rl.algorithms.clipping import clip_pessimistically


def gspo(inputs: LossInputs, constants: Constants) -> Objective:
    """min(s A, clip(s) A) of each sequence, s = exp(mean over its tokens of (train - old)) (eq. 5 and 7).

    s is the geometric mean of the token ratios, so it does not grow with length. ONE term a sequence, whatever its length.
    """
    assert constants.clip is not None
    log_ratio = sequence_means(token_log_ratio(inputs), inputs)
    advantages = sequence_means(inputs.advantages.detach(), inputs)
    found = clip_pessimistically(log_ratio, advantages, constants.clip)
    counted = sequence_sizes(inputs) > 0
    ratios = Ratios(log_ratio.detach(), advantages, counted, found.cut_low, found.cut_high)
    return Objective(found.exponent.exp() * advantages, ratios, by_sequence=True)
