"""KL divergences estimated from sampled tokens, and the adaptive coefficient.

Estimators: J. Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html. Each takes
d = log p(x) - log q(x) of tokens x sampled from p, in nats, and estimates KL(p || q) token by token.

As a loss term p is the trained policy, and only the VALUES of k1 and k3 estimate KL(p || q) without bias (k2's bias is small
near p = q). The GRADIENT through log p(x) of the tokens is something else:
- k1: its expectation is 0 (the score function), so it pushes in no direction and only adds noise.
- k2: d x grad log p, whose expectation is the gradient of KL(p || q).
- k3: (1 - q/p) x grad log p, whose expectation is the gradient of the other direction, KL(q || p). It is the term of
  GRPO (arXiv 2402.03300, eq. 4).
All of this holds for tokens sampled from p itself. After the first update of a rollout batch they come from an older policy,
and no importance weight corrects for that here (as in GRPO).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.algorithms.base import LOG_RATIO_BOUND
from moe_rl.algorithms.table import KLEstimator


def k1(log_ratio: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """d: unbiased, often negative, of high variance."""
    return log_ratio


def k2(log_ratio: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """d^2 / 2: biased, never negative, of low variance."""
    return log_ratio.square() / 2


def k3(log_ratio: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """exp(-d) - 1 + d: unbiased, never negative, of low variance.

    d is clamped from below at -LOG_RATIO_BOUND as a whole: were only the exponent clamped, what is left (+d) would push p
    further away from q.
    """
    bounded = log_ratio.clamp(min=-LOG_RATIO_BOUND)
    return torch.expm1(-bounded) + bounded


ESTIMATORS: dict[KLEstimator, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def next_coefficient(
    coefficient: float, mean_kl: float, target: float, horizon: float, sequences: int, limit: float = 0.2
) -> float:
    """The KL coefficient after a step of `sequences` sequences (Ziegler et al., arXiv 1909.08593, section 2.2).

    coefficient x (1 + error x sequences / horizon), error = mean_kl / target - 1 clipped to +-limit; horizon in sequences.
    A step longer than the horizon counts as one horizon, so that the coefficient changes by `limit` at most and stays positive.
    """
    error = min(max(mean_kl / target - 1, -limit), limit)
    return coefficient * (1 + error * min(sequences / horizon, 1.0))
