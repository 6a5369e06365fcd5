"""Advantages within a group of responses to the same prompt."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_rl.metrics import Metrics


def group_advantages(
    rewards: Float[Tensor, " B"], group: Int[Tensor, " B"], std: bool, epsilon: float = 1e-6
) -> tuple[Float[Tensor, " B"], Metrics]:
    """(reward - group mean) / (group standard deviation + epsilon), for outcome rewards (arXiv 2402.03300, section 4.1.2).

    std False leaves out the division (Dr. GRPO, arXiv 2503.20783). group: any label a group, in any order; sizes may differ.
    The deviation divides by G, not by G - 1: the paper takes the deviation of the G rewards themselves, and the result then
    has unit variance at any G. Toolkits that use torch.std's G - 1 get advantages smaller by sqrt((G - 1) / G).
    Equal rewards, and a group of one, give exactly 0: the comparison is of the rewards, before any rounding.

    Metrics: reward/group_std (mean over groups) and reward/equal_group_fraction (its sum and count are the numbers of
    groups with equal rewards and of groups). Raises ValueError at a reward that is not finite.
    """
    if not rewards.isfinite().all():
        index = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"rewards[{index}]={float(rewards[index])}: must be finite")
    labels, position = torch.unique(group, return_inverse=True)
    values = rewards.double()
    zeros = values.new_zeros(len(labels))
    sizes = zeros.index_add(0, position, torch.ones_like(values))
    centred = values - (zeros.index_add(0, position, values) / sizes)[position]
    deviations = (zeros.index_add(0, position, centred.square()) / sizes).sqrt()
    lowest = zeros.scatter_reduce(0, position, values, "amin", include_self=False)
    equal = lowest == zeros.scatter_reduce(0, position, values, "amax", include_self=False)
    deviations = torch.where(equal, 0.0, deviations)

    scaled = centred / (deviations[position] + epsilon) if std else centred
    metrics = Metrics()
    metrics.add("reward/group_std", deviations.sum(), len(labels))
    metrics.add("reward/equal_group_fraction", equal.sum(), len(labels))
    return torch.where(equal[position], 0.0, scaled).to(rewards.dtype), metrics
