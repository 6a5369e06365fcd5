"""Advantages of single tokens: a reward at the response's end and a penalty at every token, discounted backwards. Packed
tokens: those of a sequence stand together, in order. T or the number of sequences may be 0."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor


class Moments(NamedTuple):
    """Of numbers that several ranks hold: their sum, the sum of their squares, how many they are. Adds up."""

    total: float
    squares: float
    number: float

    @property
    def mean(self) -> float:
        return self.total / max(self.number, 1)

    @property
    def std(self) -> float:
        """Divides by their number."""
        return max(self.squares / max(self.number, 1) - self.mean**2, 0.0) ** 0.5


def token_rewards(
    rewards: Float[Tensor, " B"], penalties: Float[Tensor, " T"], sequence: Int[Tensor, " T"]
) -> Float64[Tensor, " T"]:
    """-penalty at every token (a KL term, in reward units), and the response's reward at its last one."""
    values = -penalties.double()
    last = torch.ones_like(sequence, dtype=torch.bool)
    last[:-1] = sequence[1:] != sequence[:-1]
    return values + torch.where(last, rewards.double()[sequence], 0.0)


def gae(
    rewards: Float[Tensor, " T"], values: Float[Tensor, " T"], sequence: Int[Tensor, " T"], gamma: float, lam: float
) -> tuple[Float64[Tensor, " T"], Float64[Tensor, " T"]]:
    """(advantages, returns) by generalised advantage estimation (arXiv 1506.02438, eq. 16):

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return = A + V; values: of the state before each
    token. What follows the last token is worth nothing, also where the response was cut short by its length limit.
    """
    rows, value = _rows(rewards.double(), sequence), _rows(values.double(), sequence)
    advantages, after = torch.zeros_like(rows), torch.zeros(rows.shape[0], dtype=torch.float64, device=rows.device)
    following = torch.zeros_like(after)
    for t in reversed(range(rows.shape[1])):
        # beyond a sequence's end everything is 0, so nothing reaches back from there
        after = rows[:, t] + gamma * following - value[:, t] + gamma * lam * after
        advantages[:, t], following = after, value[:, t]
    flat = advantages[_places(sequence)]
    return flat, flat + values.double()


def returns_to_go(rewards: Float[Tensor, " T"], sequence: Int[Tensor, " T"]) -> Float64[Tensor, " T"]:
    """Sum of a token's reward and those after it (REINFORCE++, arXiv 2501.03262, eq. 7), undiscounted."""
    return gae(rewards, torch.zeros_like(rewards), sequence, 1.0, 1.0)[0]


def moments(values: Float[Tensor, " T"]) -> Float64[Tensor, "3"]:
    """As a vector that ranks add up: Moments(*vector.tolist())."""
    values = values.double()
    return torch.stack([values.sum(), values.square().sum(), values.new_tensor(float(values.numel()))])


def normalised(values: Float[Tensor, " T"], whole: Moments, epsilon: float = 1e-6) -> Float[Tensor, " T"]:
    """(value - mean) / (standard deviation + epsilon) with the moments of all ranks' tokens; 0 where nothing varies."""
    return (values - whole.mean) / (whole.std + epsilon)


def _places(sequence: Tensor) -> tuple[Tensor, Tensor]:
    """(row, column) of each token in a matrix with a row a run of equal `sequence`."""
    if not len(sequence):
        return sequence, sequence
    row = torch.cat([sequence.new_zeros(1), (sequence[1:] != sequence[:-1]).long().cumsum(0)])
    starts = torch.cat([sequence.new_zeros(1), torch.bincount(row).cumsum(0)[:-1]])
    return row, torch.arange(len(sequence), device=sequence.device) - starts[row]


def _rows(values: Tensor, sequence: Tensor) -> Tensor:
    row, column = _places(sequence)
    if not len(sequence):
        return values.new_zeros(0, 0)
    matrix = values.new_zeros(int(row[-1]) + 1, int(column.max()) + 1)
    matrix[row, column] = values
    return matrix
