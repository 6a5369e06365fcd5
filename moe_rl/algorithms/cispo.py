"""Clipped IS-weight Policy Optimization (MiniMax, arXiv 2506.13585): the weight is clipped, never the gradient."""

import torch

from moe_rl.algorithms.base import Constants, LossInputs, Objective, Ratios, log_difference, token_log_ratio
from moe_rl.algorithms.clipping import log_bounds


def cispo(inputs: LossInputs, constants: Constants) -> Objective:
    """sg[clip(w, 1 - low, 1 + high)] A log pi of each token, w = exp(train - old), sg: without gradient (eq. 4 and 5).

    Every token keeps a gradient, whatever its ratio. The paper sets no lower bound (low = 1).
    """
    assert constants.clip is not None
    log_ratio, advantages = token_log_ratio(inputs).detach(), inputs.advantages.detach()
    log_low, log_high = log_bounds(constants.clip)
    weight = log_ratio.clamp(log_low, log_high).exp()
    ratios = Ratios(log_ratio, advantages, inputs.mask, log_ratio < log_low, log_ratio > log_high)
    logprobs = log_difference(inputs.train_logprobs, torch.zeros_like(inputs.train_logprobs), inputs.mask)
    return Objective(weight * advantages * logprobs, ratios)
