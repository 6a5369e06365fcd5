"""The loss of PPO's value model: squared error to the returns, with values clipped around those of the rollout."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from moe_rl.metrics import Metrics


def value_loss(
    values: Float[Tensor, " T"],
    old_values: Float[Tensor, " T"],
    returns: Float[Tensor, " T"],
    mask: Bool[Tensor, " T"],
    clip: float | None,
    tokens: int | float,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Mean over unmasked tokens of max((v - R)^2, (old + clamp(v - old, -clip, clip) - R)^2) / 2, a share of the global one.

    The form of OpenAI's baselines (ppo2), which the paper (arXiv 1707.06347, eq. 9) leaves open; clip None: the plain error.
    values: with gradient; old_values: before the step's updates. tokens: GLOBAL number of unmasked tokens.

    Metrics: critic/loss, critic/value_mean, critic/clip_fraction, and moments of which `explained_variance` is made: of the old
    values, which have not seen these returns.
    """
    old, target = torch.where(mask, old_values, 0.0).detach(), torch.where(mask, returns, 0.0).detach()
    now = torch.where(mask, values, 0.0)
    error = (now - target).square()
    cut = torch.zeros_like(mask)
    if clip is not None:
        limited = (old + (now - old).clamp(-clip, clip) - target).square()
        # inside the range both are the same value but for its rounding
        cut = mask & ((now - old).abs() > clip) & (limited > error)
        error = torch.maximum(error, limited)
    total = error.sum() / 2
    metrics, count = Metrics(), mask.sum()
    metrics.add("critic/loss", total, count)
    metrics.add("critic/value_mean", now.double().sum(), count)
    metrics.add("critic/clip_fraction", cut.sum(), count)
    for key, moment in _moments(old.double(), target.double()).items():
        metrics.add(key, moment.sum(), count)
    return total / max(tokens, 1), metrics


# Of these only the mean return says something by itself
HELPERS = ("critic/return_second_moment", "critic/residual_mean", "critic/residual_second_moment")
_RETURN, _RETURN_2, _RESIDUAL, _RESIDUAL_2 = (
    "critic/return_mean",
    "critic/return_second_moment",
    "critic/residual_mean",
    "critic/residual_second_moment",
)


def _moments(values: Tensor, returns: Tensor) -> dict[str, Tensor]:
    residual = returns - values
    return {_RETURN: returns, _RETURN_2: returns.square(), _RESIDUAL: residual, _RESIDUAL_2: residual.square()}


def explained_variance(metrics: dict[str, float]) -> dict[str, float]:
    """critic/explained_variance = 1 - Var(R - v) / Var(R), from reduced moments: 1 is perfect, 0 no better than a constant,
    below 0 worse. Left out where the returns do not vary (but for rounding)."""
    if _RETURN not in metrics:
        return {}
    of_returns = metrics[_RETURN_2] - metrics[_RETURN] ** 2
    of_residuals = metrics[_RESIDUAL_2] - metrics[_RESIDUAL] ** 2
    return {"critic/explained_variance": 1 - of_residuals / of_returns} if of_returns > 1e-12 * metrics[_RETURN_2] else {}
