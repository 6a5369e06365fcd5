"""Soft Adaptive Policy Optimization (Qwen, arXiv 2511.20347): a soft gate in place of the hard clip."""

import torch

from moe_rl.algorithms.base import LOG_RATIO_BOUND, Constants, LossInputs, Objective, Ratios, token_log_ratio


def sapo(inputs: LossInputs, constants: Constants) -> Objective:
    """sigmoid(tau (w - 1)) x 4 / tau x A of each token, w = exp(train - old); tau by the sign of A.

    The gradient is that of w A times 4 p (1 - p), p the sigmoid: 1 at w = 1, less the further w is away, in either direction.
    A larger tau for negative advantages lets their gradients fade sooner.
    """
    log_ratio, advantages = token_log_ratio(inputs), inputs.advantages.detach()
    ratio = log_ratio.clamp(max=LOG_RATIO_BOUND).exp()
    # filled in the ratio's own precision: two numbers in a torch.where come out as float32
    tau = torch.full_like(ratio, constants.tau_negative).masked_fill(advantages > 0, constants.tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return Objective(gate * advantages, Ratios(log_ratio.detach(), advantages, inputs.mask))
