import math

import pytest
import torch

from moe_rl.advantages import group_advantages


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def groups(*labels: int) -> torch.Tensor:
    return torch.tensor(labels, dtype=torch.int64)


def test_two_groups_by_hand() -> None:
    # Group 0: rewards 1, 0, 0, 1: mean 0.5, deviation 0.5 -> +-1. Group 1: 3, 0, 0: mean 1, deviation sqrt((4 + 1 + 1) / 3) =
    # sqrt 2 -> sqrt 2, -1 / sqrt 2, -1 / sqrt 2.
    advantages, metrics = group_advantages(double(1, 0, 0, 1, 3, 0, 0), groups(0, 0, 0, 0, 1, 1, 1), std=True)
    assert advantages.tolist() == pytest.approx([1, -1, -1, 1, math.sqrt(2), -math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-5)
    assert metrics.means()["reward/group_std"] == pytest.approx((0.5 + math.sqrt(2)) / 2)
    assert metrics.means()["reward/equal_group_fraction"] == 0


def test_the_deviation_divides_by_g() -> None:
    # G = 2: mean 0.5, deviation 0.5 -> +-1. With G - 1 it would be +-sqrt(0.5).
    advantages, _ = group_advantages(double(1, 0), groups(0, 0), std=True)
    assert advantages.tolist() == pytest.approx([1, -1], abs=1e-5)


def test_without_the_deviation_only_the_mean_is_taken_off() -> None:
    advantages, metrics = group_advantages(double(3, 0, 0), groups(4, 4, 4), std=False)
    assert advantages.tolist() == pytest.approx([2, -1, -1])
    assert metrics.means()["reward/group_std"] == pytest.approx(math.sqrt(2))  # still measured


def test_epsilon_is_added_to_the_deviation() -> None:
    advantages, _ = group_advantages(double(1, 0), groups(0, 0), std=True, epsilon=0.5)
    assert advantages.tolist() == pytest.approx([0.5, -0.5])


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("reward", "size"), [(0.1, 3), (0.1, 6), (0.7, 7), (1 / 3, 11), (1e9 + 0.1, 3), (-0.1, 3), (0.0, 4), (0.3, 1)]
)
def test_equal_rewards_give_exactly_zero(std: bool, dtype: torch.dtype, reward: float, size: int) -> None:
    # The mean of 0.1 three times is not 0.1 in floating point: the difference divided by epsilon would be noise.
    advantages, metrics = group_advantages(torch.full((size,), reward, dtype=dtype), groups(*[0] * size), std=std)
    assert advantages.dtype == dtype
    assert advantages.tolist() == [0.0] * size
    assert metrics.means() == {"reward/group_std": 0.0, "reward/equal_group_fraction": 1.0}


def test_the_example_of_equal_rewards_is_one_with_rounding() -> None:
    rewards = double(0.1, 0.1, 0.1)
    assert (rewards - rewards.sum() / 3).abs().max() > 0


def test_groups_with_equal_rewards_are_counted_among_all() -> None:
    # Groups 2 (0.1 twice) and 9 (alone) of three; deviations 0, 0, 0.5.
    advantages, metrics = group_advantages(double(0.1, 1, 5, 0.1, 0), groups(2, 7, 9, 2, 7), std=True)
    assert advantages.tolist() == pytest.approx([0, 1, 0, 0, -1], abs=1e-5)
    assert metrics.means()["reward/equal_group_fraction"] == pytest.approx(2 / 3)
    assert metrics.means()["reward/group_std"] == pytest.approx(0.5 / 3)
    sums, _ = metrics.vector()
    assert sums.tolist() == pytest.approx([2, 0.5, 3, 3])  # equal groups, deviations, and groups twice


def test_order_and_labels_of_groups_do_not_matter() -> None:
    rewards, labels = double(1, 2, 4, 7, 3, 0), groups(0, 0, 0, 1, 1, 1)
    straight, _ = group_advantages(rewards, labels, std=True)
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    mixed, _ = group_advantages(rewards[order], (labels * 100 - 7)[order], std=True)
    assert mixed.tolist() == pytest.approx(straight[order].tolist(), abs=1e-12)


def test_no_sequences() -> None:
    advantages, metrics = group_advantages(torch.zeros(0), groups(), std=True)
    assert advantages.shape == (0,)
    assert metrics.means() == {}


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_an_error(reward: float) -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\]=.*: must be finite"):
        group_advantages(double(1, reward), groups(0, 0), std=True)
