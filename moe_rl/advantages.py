"""Advantages of whole responses, from their rewards: the response is one action, and all of its tokens have its advantage."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from moe_rl.metrics import Metrics


def group_advantages(
    rewards: Float[Tensor, " B"], group: Int[Tensor, " B"], std: bool, epsilon: float = 1e-6
) -> Float[Tensor, " B"]:
    """(reward - group mean) / (group standard deviation + epsilon), for outcome rewards (arXiv 2402.03300, section 4.1.2).

    std False leaves out the division (Dr. GRPO, arXiv 2503.20783). group: any label a group, in any order; sizes may differ.
    The deviation divides by G, not by G - 1: the paper takes the deviation of the G rewards themselves, and the result then
    has unit variance at any G. Toolkits that use torch.std's G - 1 get advantages smaller by sqrt((G - 1) / G).
    Equal rewards, and a group of one, give exactly 0: the comparison is of the rewards, before any rounding. Raises ValueError
    at a reward that is not finite.
    """
    found = _groups(rewards, group)
    scaled = found.centred / (found.deviations[found.position] + epsilon) if std else found.centred
    return torch.where(found.equal[found.position], 0.0, scaled).to(rewards.dtype)


def leave_one_out_advantages(rewards: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """reward - mean of the others of its group (RLOO, arXiv 2402.14740, section 3.3): G / (G - 1) x (reward - group mean).

    A group of one has nothing to compare with and gives 0. Errors: as `group_advantages`.
    """
    found = _groups(rewards, group)
    sizes = found.sizes[found.position]
    scaled = found.centred * sizes / (sizes - 1).clamp(min=1)
    return torch.where(found.equal[found.position], 0.0, scaled).to(rewards.dtype)


def group_batch_advantages(
    rewards: Float[Tensor, " B"], group: Int[Tensor, " B"], epsilon: float = 1e-6
) -> Float[Tensor, " B"]:
    """(reward - group mean) / (standard deviation of that over the whole batch + epsilon) (REINFORCE++-baseline,
    arXiv 2501.03262): an easy group's rare miss is not blown up by its own small deviation.

    Equal rewards in a group give exactly 0. Errors: as `group_advantages`.
    """
    found = _groups(rewards, group)
    centred = torch.where(found.equal[found.position], 0.0, found.centred)
    deviation = centred.square().mean().sqrt() if len(centred) else centred.sum()  # its mean is 0
    return (centred / (deviation + epsilon)).to(rewards.dtype)


def group_metrics(rewards: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Metrics:
    """Of the groups with more than one response: reward/group_std, their mean deviation, and reward/equal_group_fraction, the
    share whose rewards are all the same (its sum and count are numbers of groups)."""
    found, metrics = _groups(rewards, group), Metrics()
    several = found.sizes > 1
    metrics.add("reward/group_std", found.deviations[several].sum(), several.sum())
    metrics.add("reward/equal_group_fraction", found.equal[several].sum(), several.sum())
    return metrics


class _Groups(NamedTuple):
    position: Int[Tensor, " B"]  # which of the groups
    centred: Float64[Tensor, " B"]  # reward - mean of its group
    deviations: Float64[Tensor, " N"]  # by group; 0 where equal
    sizes: Float64[Tensor, " N"]
    equal: Bool[Tensor, " N"]  # all rewards are the same


def _groups(rewards: Tensor, group: Tensor) -> _Groups:
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
    return _Groups(position, centred, torch.where(equal, 0.0, deviations), sizes, equal)
