"""What GRPO and GSPO share: the clipped objective, the sum over sequences, and the metrics."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.algorithms.base import (
    LOG_RATIO_BOUND,
    ClipRange,
    Denominators,
    KLTerm,
    LossInputs,
    log_difference,
    sequence_means,
    sequence_sizes,
)
from moe_rl.algorithms.kl import ESTIMATORS, k3
from moe_rl.metrics import Metrics


class Clipped(NamedTuple):
    """objective: [N] min(r A, clip(r) A). cut_low, cut_high: [N] where the clip took its gradient."""

    objective: Float[Tensor, " N"]
    cut_low: Bool[Tensor, " N"]
    cut_high: Bool[Tensor, " N"]


def clipped_objective(log_ratio: Float[Tensor, " N"], advantages: Float[Tensor, " N"], clip: ClipRange) -> Clipped:
    """min(r A, clip(r, 1 - low, 1 + high) A) for r = exp(log_ratio), decided before any exp (arXiv 1707.06347, eq. 7).

    The minimum is the clipped branch exactly where A > 0 and r > 1 + high, or A < 0 and r < 1 - low. Elsewhere r A stands,
    with log r at most LOG_RATIO_BOUND. A zero advantage has no gradient to cut.
    """
    log_low, log_high = math.log1p(-clip.low), math.log1p(clip.high)
    cut_low = (advantages < 0) & (log_ratio < log_low)
    cut_high = (advantages > 0) & (log_ratio > log_high)
    bounded = log_ratio.clamp(max=LOG_RATIO_BOUND)
    exponent = torch.where(cut_low, log_low, torch.where(cut_high, log_high, bounded))
    return Clipped(exponent.exp() * advantages, cut_low, cut_high)


def ratio_metrics(log_ratio: Float[Tensor, " N"], clipped: Clipped, counted: Bool[Tensor, " N"]) -> Metrics:
    """Of the N tokens (GRPO) or sequences (GSPO) that count. Ratios are shown up to exp(LOG_RATIO_BOUND).

    ratio/tail_fraction: share with max(r, 1 / r) > 2.
    """
    log_ratio = log_ratio.detach().double()
    ratio = log_ratio.clamp(max=LOG_RATIO_BOUND).exp()
    metrics = Metrics()
    for key, values in {
        "ratio/mean": ratio,
        "ratio/log_abs_mean": log_ratio.abs(),
        "ratio/tail_fraction": log_ratio.abs() > math.log(2),
        "ratio/clip_fraction": clipped.cut_low | clipped.cut_high,
        "ratio/clip_fraction_low": clipped.cut_low,
        "ratio/clip_fraction_high": clipped.cut_high,
    }.items():
        _add_mean(metrics, key, values, counted)
    _add_max(metrics, "ratio/max", ratio, counted)
    return metrics


def token_metrics(inputs: LossInputs) -> Metrics:
    """Means over unmasked tokens that do not depend on the algorithm; each optional input brings its keys.

    kl/old_new estimates KL(old || new), and kl/ref KL(new || reference), both by k3 whatever the loss uses.
    rollout/logprob_gap is |old - rollout|: what the engine and the trainer disagree by with the same weights.
    """
    metrics, mask = Metrics(), inputs.mask
    train, old = inputs.train_logprobs.detach().double(), inputs.old_logprobs.double()
    _add_mean(metrics, "kl/old_new", k3(log_difference(old, train, mask)), mask)
    if inputs.ref_logprobs is not None:
        _add_mean(metrics, "kl/ref", k3(log_difference(train, inputs.ref_logprobs.double(), mask)), mask)
    if inputs.rollout_logprobs is not None:
        gap = log_difference(old, inputs.rollout_logprobs.double(), mask).abs()
        _add_mean(metrics, "rollout/logprob_gap_mean", gap, mask)
        _add_max(metrics, "rollout/logprob_gap_max", gap, mask)
    if inputs.entropy is not None:
        _add_mean(metrics, "entropy/mean", inputs.entropy, mask)
    return metrics


def sequence_loss(
    inputs: LossInputs, objective: Float[Tensor, " B"], denominators: Denominators, kl: KLTerm | None
) -> tuple[Float[Tensor, ""], Metrics]:
    """-(sum of the sequences' objectives) + coefficient x KL, over the GLOBAL number of sequences.

    KL: sequence mean of token means, like the objective. A sequence without unmasked tokens gives 0 and is not counted.
    loss/policy + loss/kl = loss/total; each is a mean over sequences, so the reduced loss/total is the global loss:
    the sum of what this returns over microbatches and ranks.
    """
    present = sequence_sizes(inputs) > 0
    total = -torch.where(present, objective, 0.0).sum()
    parts = {"loss/policy": total}
    if kl is not None:
        if inputs.ref_logprobs is None:
            raise ValueError("ref_logprobs: none given, but there is a KL term; must be the reference's log-probabilities")
        log_ratio = log_difference(inputs.train_logprobs, inputs.ref_logprobs.detach(), inputs.mask)
        parts["loss/kl"] = kl.coefficient * sequence_means(ESTIMATORS[kl.estimator](log_ratio), inputs).sum()
        total = total + parts["loss/kl"]
    metrics = token_metrics(inputs)
    for key, part in {**parts, "loss/total": total}.items():
        metrics.add(key, part, present.sum())
    return total / max(denominators.sequences, 1), metrics


def _add_mean(metrics: Metrics, key: str, values: Tensor, counted: Tensor) -> None:
    metrics.add(key, torch.where(counted, values.detach().double(), 0.0).sum(), counted.sum())


def _add_max(metrics: Metrics, key: str, values: Tensor, counted: Tensor) -> None:
    nothing = values.new_full((1,), -math.inf)
    metrics.add_max(key, torch.cat([torch.where(counted, values, -math.inf), nothing]).amax())
