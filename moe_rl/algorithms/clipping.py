"""The clipped objective of PPO, decided in log space."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.algorithms.base import LOG_RATIO_BOUND, ClipRange


class Clipped(NamedTuple):
    """exponent: [N] log of the ratio that the minimum takes. cut_low, cut_high: [N] where the clip took its gradient."""

    exponent: Float[Tensor, " N"]
    cut_low: Bool[Tensor, " N"]
    cut_high: Bool[Tensor, " N"]


def log_bounds(clip: ClipRange) -> tuple[float, float]:
    """(log(1 - low), log(1 + high)); minus infinity where there is no lower bound."""
    return math.log1p(-clip.low) if clip.low < 1 else -math.inf, math.log1p(clip.high)


def clip_pessimistically(log_ratio: Float[Tensor, " N"], advantages: Float[Tensor, " N"], clip: ClipRange) -> Clipped:
    """log of the ratio in min(r A, clip(r, 1 - low, 1 + high) A), r = exp(log_ratio) (arXiv 1707.06347, eq. 7).

    The minimum is the clipped branch exactly where A > 0 and r > 1 + high, or A < 0 and r < 1 - low. Elsewhere r A stands,
    with log r at most LOG_RATIO_BOUND. A zero advantage has no gradient to cut.
    """
    log_low, log_high = log_bounds(clip)
    cut_low = (advantages < 0) & (log_ratio < log_low)
    cut_high = (advantages > 0) & (log_ratio > log_high)
    bounded = log_ratio.clamp(max=LOG_RATIO_BOUND)
    return Clipped(torch.where(cut_low, log_low, torch.where(cut_high, log_high, bounded)), cut_low, cut_high)
