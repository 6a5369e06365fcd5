"""Geometric-Mean Policy Optimization: token ratios clipped, then their geometric mean (Zhao et al., arXiv 2507.20673)."""

from moe_rl.algorithms.base import Constants, LossInputs, Objective, Ratios, sequence_means, token_log_ratio
from moe_rl.algorithms.clipping import clip_pessimistically


def gmpo(inputs: LossInputs, constants: Constants) -> Objective:
    """A x (product over tokens of the ratio that min(w A, clip(w) A) takes)^(1 / tokens), one term a sequence.

    The paper's objective with its clip range (e^-0.4, e^0.4), written out for either sign of A: the clip cuts above where
    A > 0 and below where A < 0. The ratios of the metrics are those of tokens.
    """
    assert constants.clip is not None
    log_ratio, of_token = token_log_ratio(inputs), inputs.advantages.detach()
    advantages = sequence_means(of_token, inputs)
    found = clip_pessimistically(log_ratio, advantages[inputs.sequence], constants.clip)
    ratios = Ratios(log_ratio.detach(), of_token, inputs.mask, found.cut_low, found.cut_high)
    return Objective(sequence_means(found.exponent, inputs).exp() * advantages, ratios, by_sequence=True)
