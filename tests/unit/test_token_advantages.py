"""Advantages of single tokens: against the definition as a double sum, by hand, packed, and split over ranks."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moe_rl.token_advantages import Moments, gae, moments, normalised, returns_to_go, token_rewards


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of(*lengths: int) -> Tensor:
    """Which sequence each token belongs to."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))


def defined(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """One sequence: A_t = sum over l of (gamma lam)^l delta_{t+l}, V after the end 0 (arXiv 1506.02438, eq. 16)."""
    n, v = len(rewards), [*values, 0.0]
    deltas = [rewards[t] + gamma * v[t + 1] - v[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


def test_gae_by_hand() -> None:
    # gamma 0.5, lambda 0.5; rewards 0, 0, 4, values 1, 2, 3.
    # delta: 0 + 0.5 x 2 - 1 = 0; 0 + 0.5 x 3 - 2 = -0.5; 4 - 3 = 1. A: 1; -0.5 + 0.25 x 1 = -0.25; 0 + 0.25 x -0.25 = -0.0625.
    advantages, returns = gae(double(0, 0, 4), double(1, 2, 3), of(3), 0.5, 0.5)
    assert advantages.tolist() == pytest.approx([-0.0625, -0.25, 1], abs=1e-12)
    assert returns.tolist() == pytest.approx([0.9375, 1.75, 4], abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (0.99, 0.0), (0.8, 1.0), (1.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gae_of_packed_sequences_is_the_definition_of_each(seed: int, gamma: float, lam: float, dtype: torch.dtype) -> None:
    generator, lengths = torch.Generator().manual_seed(seed), [3, 1, 7, 2, 1, 4]
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=dtype)
    advantages, returns = gae(rewards, values, of(*lengths), gamma, lam)
    wanted = [
        advantage
        for r, v in zip(rewards.split(lengths), values.split(lengths), strict=True)
        for advantage in defined(r.tolist(), v.tolist(), gamma, lam)
    ]
    assert advantages.tolist() == pytest.approx(wanted, abs=1e-12)
    assert returns.tolist() == pytest.approx((double(*wanted) + values.double()).tolist(), abs=1e-12)


def test_lambda_0_is_the_one_step_error() -> None:
    # r + 0.9 V' - V: 1 + 0.9 x 5 - 2, 0 + 0.9 x 0 - 5; the second sequence does not see the first.
    advantages, _ = gae(double(1, 0, 10), double(2, 5, 7), of(2, 1), 0.9, 0.0)
    assert advantages.tolist() == pytest.approx([3.5, -5, 3], abs=1e-12)


def test_lambda_1_is_the_return_minus_the_value() -> None:
    # Returns at gamma 0.5: 1 + 0.5 (2 + 0.5 x 4) = 3, 2 + 0.5 x 4 = 4, 4; values cancel but for their own.
    advantages, returns = gae(double(1, 2, 4), double(10, 20, 30), of(3), 0.5, 1.0)
    assert returns.tolist() == pytest.approx([3, 4, 4], abs=1e-12)
    assert advantages.tolist() == pytest.approx([-7, -16, -26], abs=1e-12)


def test_values_that_are_right_leave_no_advantage_whatever_lambda() -> None:
    """V_t = the return that follows: every delta is 0."""
    for lam in (0.0, 0.5, 1.0):
        advantages, returns = gae(double(1, 2, 4), double(7, 6, 4), of(3), 1.0, lam)
        assert advantages.tolist() == [0, 0, 0] and returns.tolist() == [7, 6, 4]


def test_neighbours_with_the_same_reward_do_not_run_into_each_other() -> None:
    """A sequence keeps its advantages in whatever company."""
    alone, _ = gae(double(0, 0, 1), double(0.2, 0.5, 0.1), of(3), 1.0, 0.95)
    rewards, values = double(9, 9, 0, 0, 1, 9, 9, 9, 9), double(8, 8, 0.2, 0.5, 0.1, 8, 8, 8, 8)
    among, _ = gae(rewards, values, of(2, 3, 4), 1.0, 0.95)
    assert among[2:5].tolist() == alone.tolist()


def test_no_tokens() -> None:
    nothing, none = double(), of()
    advantages, returns = gae(nothing, nothing, none, 1.0, 0.95)
    assert advantages.tolist() == returns.tolist() == returns_to_go(nothing, none).tolist() == []
    assert token_rewards(nothing, nothing, none).tolist() == []
    assert normalised(nothing, Moments(0.0, 0.0, 0.0)).tolist() == [] and moments(nothing).tolist() == [0, 0, 0]


def test_the_reward_stands_at_the_last_token_and_the_penalty_at_each() -> None:
    penalties = double(0.5, -1, 0.25, 2)
    assert token_rewards(double(3, 7), penalties, of(3, 1)).tolist() == [-0.5, 1, 2.75, 5]
    # float32 in, float64 out: 3 - 1e-8 is not 3
    small = token_rewards(torch.tensor([3.0]), torch.tensor([1e-8]), of(1))
    assert small.dtype == torch.float64 and float(small) == pytest.approx(3 - 1e-8, abs=1e-12) and float(small) < 3


def test_sequences_are_counted_by_their_number_even_where_one_is_missing() -> None:
    """A microbatch numbers those that it holds; one without tokens has no last one."""
    assert token_rewards(double(3, 100, 7), double(0, 0, 0), torch.tensor([0, 0, 2])).tolist() == [0, 3, 7]


def test_returns_to_go_with_a_token_penalty() -> None:
    """REINFORCE++: reward minus the KL of this token and those after it."""
    rewards = token_rewards(double(1, 2), double(0.1, 0.2, 0.3, 0.5, 0.25), of(3, 2))
    assert returns_to_go(rewards, of(3, 2)).tolist() == pytest.approx([0.4, 0.5, 0.7, 1.25, 1.75], abs=1e-12)


def test_without_a_penalty_every_token_has_the_whole_reward() -> None:
    rewards = token_rewards(double(1, -2), torch.zeros(5, dtype=torch.float64), of(2, 3))
    assert returns_to_go(rewards, of(2, 3)).tolist() == [1, 1, -2, -2, -2]


def test_moments_by_hand() -> None:
    whole = Moments(*moments(double(1, 2, 6)).tolist())
    assert whole == (9, 41, 3)
    assert whole.mean == 3 and whole.std == pytest.approx(math.sqrt(41 / 3 - 9))


@pytest.mark.parametrize("cut", [0, 1, 5, 9])
def test_two_ranks_normalise_as_one(cut: int) -> None:
    """Also where one has nothing, or one token."""
    values = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3 + 7
    whole = Moments(*moments(values).tolist())
    summed = Moments(*(moments(values[:cut]) + moments(values[cut:])).tolist())
    assert summed == pytest.approx(whole, abs=1e-9)
    together = normalised(values, whole)
    apart = torch.cat([normalised(values[:cut], summed), normalised(values[cut:], summed)])
    assert apart.tolist() == pytest.approx(together.tolist(), abs=1e-9)
    assert float(together.mean()) == pytest.approx(0, abs=1e-9)
    assert float(together.square().mean()) == pytest.approx(1, abs=1e-5)


def test_normalised_by_hand() -> None:
    # mean 3, deviation sqrt((4 + 1 + 9) / 3); epsilon is added to it
    deviation = math.sqrt(14 / 3)
    values, whole = double(1, 2, 6), Moments(9.0, 41.0, 3.0)
    assert normalised(values, whole, epsilon=0.0).tolist() == pytest.approx([x / deviation for x in (-2, -1, 3)])
    assert normalised(values, whole, epsilon=1.0).tolist() == pytest.approx([x / (deviation + 1) for x in (-2, -1, 3)])


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -7.3, 1e4 + 0.1])
@pytest.mark.parametrize("count", [1, 3, 7, 1000])
def test_what_does_not_vary_has_no_advantage(value: float, count: int) -> None:
    """Rounding of the moments, divided by epsilon, must not become a signal."""
    values = torch.full((count,), value, dtype=torch.float64)
    assert normalised(values, Moments(*moments(values).tolist())).abs().max() < 1e-5
