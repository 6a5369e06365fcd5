"""GSPO-token: the sequence's ratio for every token, and an advantage for each (Zheng et al., arXiv 2507.18071, section 4.3)."""

import torch

from moe_rl.algorithms.base import Constants, LossInputs, Objective, Ratios, log_difference, sequence_means, token_log_ratio
from moe_rl.algorithms.clipping import clip_pessimistically


def gspo_token(inputs: LossInputs, constants: Constants) -> Objective:
    """min(s_t A_t, clip(s_t) A_t) of each token, s_t = sg[s] x pi_t / sg[pi_t] (eq. 13 and 14), sg: without gradient.

    In value s_t is GSPO's s for every token of the sequence, and where A_t is the same for them, so are loss and gradient. The
    ratios of the metrics are those of tokens, each that of its sequence.
    """
    assert constants.clip is not None
    of_sequence = sequence_means(token_log_ratio(inputs), inputs).detach()[inputs.sequence]
    own = log_difference(inputs.train_logprobs, inputs.train_logprobs.detach(), inputs.mask)
    advantages = inputs.advantages.detach()
    found = clip_pessimistically(of_sequence + own, advantages, constants.clip)
    ratios = Ratios(of_sequence, advantages, inputs.mask, found.cut_low, found.cut_high)
    return Objective(torch.where(inputs.mask, found.exponent.exp(), 0.0) * advantages, ratios)
