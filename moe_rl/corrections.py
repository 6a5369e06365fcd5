"""Weights for the gap between the engine that sampled and the trainer, with the same weights: old / rollout probability.

tis: truncated importance sampling, min(r, high) (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training", 2025). mis: masked importance sampling, r where r <= high, else 0 (Liu, Li et al., "When Speed Kills Stability",
2025). icepop: r inside [low, high], else 0 (arXiv 2510.18855). sequence_mask: 1 for sequences whose geometric mean of ratios
lies inside [low, high], else 0 (the rejection by geometric mean of the authors of mis). All are decided in log space.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_rl.algorithms.base import LOG_RATIO_BOUND
from moe_rl.algorithms.config import CorrectionSection
from moe_rl.metrics import Metrics


def correction_weights(
    old_logprobs: Float[Tensor, " T"],
    rollout_logprobs: Float[Tensor, " T"],
    sequence: Int[Tensor, " T"],
    sequences: int,
    mask: Bool[Tensor, " T"],
    section: CorrectionSection,
) -> tuple[Float[Tensor, " T"], Metrics]:
    """A weight for each token, 0 where masked; all 1 with mode off. A weight of 0 takes a token out of the loss and leaves it
    in the loss's denominator (as IcePop does; verl shrinks the denominator).

    Metrics: correction/touched_fraction: share of the tokens (of the sequences, where those are decided about) that were cut
    or masked; correction/weight_mean over tokens; correction/ratio_max, shown up to e^20.
    """
    metrics = Metrics()
    if section.mode == "off":
        return mask.to(old_logprobs.dtype), metrics
    low, high = section.bounds
    log_low, log_high = -math.inf if low is None else math.log(low), math.log(high)
    of_token = torch.where(mask, old_logprobs.detach().double() - rollout_logprobs.detach().double(), 0.0)
    by_sequence = section.mode == "sequence_mask" or section.level == "sequence"
    log_ratio = of_token
    sizes = torch.zeros(sequences, dtype=torch.float64, device=mask.device).index_add(0, sequence, mask.double())
    if by_sequence:
        log_ratio = torch.zeros_like(sizes).index_add(0, sequence, of_token)
        if section.mode == "sequence_mask":
            log_ratio = log_ratio / sizes.clamp(min=1)
    outside = (log_ratio > log_high) | (log_ratio < log_low)
    if section.mode == "tis":
        weights = log_ratio.clamp(max=log_high).exp()
    elif section.mode == "sequence_mask":
        weights = (~outside).double()
    else:
        weights = torch.where(outside, -math.inf, log_ratio).exp()
    counted = sizes > 0 if by_sequence else mask
    metrics.add("correction/touched_fraction", (outside & counted).sum(), counted.sum())
    shown = torch.where(counted, log_ratio.clamp(max=LOG_RATIO_BOUND).exp(), -math.inf)
    metrics.add_max("correction/ratio_max", torch.cat([shown, shown.new_full((1,), -math.inf)]).amax())
    found = torch.where(mask, weights[sequence] if by_sequence else weights, 0.0)
    metrics.add("correction/weight_mean", found.sum(), mask.sum())
    return found.to(old_logprobs.dtype), metrics
