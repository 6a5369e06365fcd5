"""Rewards shaped before they become advantages: for length, and for how evenly sure the policy was. `reward/mean` stays the
task's own."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_rl.metrics import Metrics
from moe_rl.shaping_config import ShapingSection


def overlong_penalty(lengths: Int[Tensor, " B"], longest: int, buffer: int) -> Float[Tensor, " B"]:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to longest - buffer tokens, then linearly down to -1
    at `longest`; -1 beyond."""
    over = (lengths - (longest - buffer)).double() / buffer
    return -over.clamp(0, 1).float()


def length_factor(lengths: Int[Tensor, " B"], target: int, power: float) -> Float[Tensor, " B"]:
    """min(1, (target / length)^power): 1 up to `target` tokens, then falling."""
    return (target / lengths.clamp(min=1).double()).pow(power).clamp(max=1).float()


def logprob_spread(logprobs: list[list[float]]) -> Float[Tensor, " B"]:
    """Standard deviation (over the count) of each response's log-probabilities, in nats; 0 for one token."""
    return torch.tensor([float(torch.tensor(p, dtype=torch.float64).std(correction=0)) if p else 0.0 for p in logprobs])


def shaped_rewards(
    rewards: Float[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    logprobs: list[list[float]],
    section: ShapingSection,
    longest: int,
    overlong_buffer: int,
) -> tuple[Float[Tensor, " B"], Metrics]:
    """Rewards after all shaping that is on. lengths: response tokens. logprobs: the engine's, of each response.

    A length factor scales rewards above 0 alone: it would make a punishment smaller. overlong_buffer: tokens; 0: off.
    Metrics: reward/shaped_mean, and reward/shaping/{length|overlong|spread}, each the mean of what it added.
    """
    shaped, metrics, parts = rewards, Metrics(), dict[str, Tensor]()
    if section.length_target is not None:
        factor = length_factor(lengths, section.length_target, section.length_power)
        parts["length"] = torch.where(rewards > 0, rewards * (factor - 1), 0.0)
    if overlong_buffer:
        parts["overlong"] = section.overlong_penalty * overlong_penalty(lengths, longest, overlong_buffer)
    if section.spread_penalty:
        parts["spread"] = -section.spread_penalty * logprob_spread(logprobs).to(rewards.dtype)
    for name, part in parts.items():
        shaped = shaped + part
        metrics.add(f"reward/shaping/{name}", part.sum(), len(rewards))
    if parts:
        metrics.add("reward/shaped_mean", shaped.sum(), len(rewards))
    return shaped, metrics
