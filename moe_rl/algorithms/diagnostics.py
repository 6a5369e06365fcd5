"""The metrics of a loss: importance ratios, and what of the tokens does not depend on the algorithm."""

import math

import torch
from torch import Tensor

from moe_rl.algorithms.base import LOG_RATIO_BOUND, ClipRange, LossInputs, Ratios, log_difference
from moe_rl.algorithms.clipping import log_bounds
from moe_rl.algorithms.kl import k3
from moe_rl.metrics import Metrics

_MEAN, _SECOND = "ratio/mean", "ratio/second_moment"


def ratio_metrics(ratios: Ratios, clip: ClipRange | None) -> Metrics:
    """Of the ratios (of tokens, or of sequences) that the objective used. They are shown up to exp(LOG_RATIO_BOUND).

    ratio/second_moment: mean of r^2. ratio/tail_fraction: share with max(r, 1 / r) > 2. ratio/clip_fraction(_low|_high): share
    where the clip took effect. ratio/outside/{low|high}/{positive|negative}: share, of those whose advantage has that sign,
    that lie below or above the clip range, whether or not it cuts there.
    """
    log_ratio = ratios.log_ratio.double()
    ratio = log_ratio.clamp(max=LOG_RATIO_BOUND).exp()
    metrics, counted = Metrics(), ratios.counted
    means = {
        _MEAN: ratio,
        _SECOND: ratio.square(),
        "ratio/log_abs_mean": log_ratio.abs(),
        "ratio/tail_fraction": log_ratio.abs() > math.log(2),
    }
    if ratios.cut_low is not None and ratios.cut_high is not None:
        means |= {
            "ratio/clip_fraction": ratios.cut_low | ratios.cut_high,
            "ratio/clip_fraction_low": ratios.cut_low,
            "ratio/clip_fraction_high": ratios.cut_high,
        }
    for key, values in means.items():
        _add_mean(metrics, key, values, counted)
    if clip is not None:
        low, high = log_bounds(clip)
        for sign, signed in (("positive", ratios.advantages > 0), ("negative", ratios.advantages < 0)):
            _add_mean(metrics, f"ratio/outside/low/{sign}", log_ratio < low, counted & signed)
            _add_mean(metrics, f"ratio/outside/high/{sign}", log_ratio > high, counted & signed)
    _add_max(metrics, "ratio/max", ratio, counted)
    return metrics


def derived_ratio_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """What follows from reduced moments. ratio/variance = E[r^2] - E[r]^2; ratio/effective_sample_share = E[r]^2 / E[r^2], the
    effective sample size (Kish) over the number of ratios: 1 where they are equal."""
    if _MEAN not in metrics:
        return {}
    mean, second = metrics[_MEAN], metrics[_SECOND]
    return {
        "ratio/variance": max(second - mean * mean, 0.0),
        "ratio/effective_sample_share": min(mean * mean / second, 1.0) if second else 0.0,
    }


def token_metrics(inputs: LossInputs) -> Metrics:
    """Means over unmasked tokens that do not depend on the algorithm; each optional input brings its keys.

    kl/old_new estimates KL(old || new), and kl/ref KL(new || reference), both by k3 whatever the loss uses.
    rollout/logprob_gap is |old - rollout|: what the engine and the trainer disagree by with the same weights.
    router_shift/factor_mean: RSPO's factor on the ratio.
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
    if inputs.log_router_shift is not None:
        _add_mean(metrics, "router_shift/factor_mean", inputs.log_router_shift.exp(), mask)
    return metrics


def _add_mean(metrics: Metrics, key: str, values: Tensor, counted: Tensor) -> None:
    metrics.add(key, torch.where(counted, values.detach().double(), 0.0).sum(), counted.sum())


def _add_max(metrics: Metrics, key: str, values: Tensor, counted: Tensor) -> None:
    nothing = values.new_full((1,), -math.inf)
    metrics.add_max(key, torch.cat([torch.where(counted, values, -math.inf), nothing]).amax())
