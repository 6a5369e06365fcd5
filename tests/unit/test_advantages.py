"""Advantages of whole responses: each estimator by hand, equal groups exactly 0, order, sizes and labels."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_rl.advantages import group_advantages, group_batch_advantages, group_metrics, leave_one_out_advantages
from moe_rl.metrics import Metrics


def without_deviation(rewards: torch.Tensor, group: torch.Tensor) -> Any:
    return group_advantages(rewards, group, std=False)


def with_deviation(rewards: torch.Tensor, group: torch.Tensor) -> Any:
    return group_advantages(rewards, group, std=True)


ESTIMATORS: list[Callable[..., Any]] = [
    with_deviation,
    without_deviation,
    leave_one_out_advantages,
    group_batch_advantages,
]
each_estimator = pytest.mark.parametrize("estimate", ESTIMATORS, ids=lambda f: f.__name__)


def both(
    estimate: Callable[..., Any], rewards: torch.Tensor, group: torch.Tensor, **settings: Any
) -> tuple[torch.Tensor, Metrics]:
    return estimate(rewards, group, **settings), group_metrics(rewards, group)


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def groups(*labels: int) -> torch.Tensor:
    return torch.tensor(labels, dtype=torch.int64)


def test_two_groups_by_hand() -> None:
    # Group 0: rewards 1, 0, 0, 1: mean 0.5, deviation 0.5 -> +-1. Group 1: 3, 0, 0: mean 1, deviation sqrt((4 + 1 + 1) / 3) =
    # sqrt 2 -> sqrt 2, -1 / sqrt 2, -1 / sqrt 2.
    advantages, metrics = both(group_advantages, double(1, 0, 0, 1, 3, 0, 0), groups(0, 0, 0, 0, 1, 1, 1), std=True)
    assert advantages.tolist() == pytest.approx([1, -1, -1, 1, math.sqrt(2), -math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-5)
    assert metrics.means()["reward/group_std"] == pytest.approx((0.5 + math.sqrt(2)) / 2)
    assert metrics.means()["reward/equal_group_fraction"] == 0


def test_the_deviation_divides_by_g() -> None:
    # G = 2: mean 0.5, deviation 0.5 -> +-1. With G - 1 it would be +-sqrt(0.5).
    advantages, _ = both(group_advantages, double(1, 0), groups(0, 0), std=True)
    assert advantages.tolist() == pytest.approx([1, -1], abs=1e-5)


def test_without_the_deviation_only_the_mean_is_taken_off() -> None:
    advantages, metrics = both(group_advantages, double(3, 0, 0), groups(4, 4, 4), std=False)
    assert advantages.tolist() == pytest.approx([2, -1, -1])
    assert metrics.means()["reward/group_std"] == pytest.approx(math.sqrt(2))  # still measured


def test_epsilon_is_added_to_the_deviation() -> None:
    advantages, _ = both(group_advantages, double(1, 0), groups(0, 0), std=True, epsilon=0.5)
    assert advantages.tolist() == pytest.approx([0.5, -0.5])


def test_leave_one_out_by_hand() -> None:
    # 3, 1, 2: the others' means are 1.5, 2.5, 2. Group of two: 5 - 1, 1 - 5. Alone: nothing to compare with.
    rewards, labels = double(3, 5, 1, 9, 2, 1), groups(0, 1, 0, 7, 0, 1)
    advantages, metrics = both(leave_one_out_advantages, rewards, labels)
    assert advantages.tolist() == pytest.approx([1.5, 4, -1.5, 0, 0, -4], abs=1e-12)
    assert advantages[3] == 0
    # deviations: sqrt((1 + 1 + 0) / 3), 2; the one alone is no group to count
    assert metrics.means()["reward/group_std"] == pytest.approx((math.sqrt(2 / 3) + 2) / 2)
    assert metrics.means()["reward/equal_group_fraction"] == 0


@pytest.mark.parametrize("size", [2, 3, 8])
def test_leave_one_out_is_the_mean_of_the_others_taken_one_by_one(size: int) -> None:
    rewards = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    others = [rewards[i] - torch.cat([rewards[:i], rewards[i + 1 :]]).mean() for i in range(size)]
    advantages, _ = both(leave_one_out_advantages, rewards, groups(*[3] * size))
    assert advantages.tolist() == pytest.approx(torch.stack(others).tolist(), abs=1e-12)


def test_group_batch_divides_by_the_batchs_deviation() -> None:
    # Centred: 0.5, -0.5 and 2, -1, -1: mean 0, mean of squares (0.25 + 0.25 + 4 + 1 + 1) / 5 = 1.3.
    advantages, metrics = both(group_batch_advantages, double(1, 0, 3, 0, 0), groups(0, 0, 1, 1, 1))
    assert advantages.tolist() == pytest.approx([x / math.sqrt(1.3) for x in (0.5, -0.5, 2, -1, -1)], abs=1e-5)
    assert advantages.square().mean() == pytest.approx(1, abs=1e-5)
    assert metrics.means()["reward/group_std"] == pytest.approx((0.5 + math.sqrt(2)) / 2)


def test_group_batch_does_not_blow_up_a_rare_miss() -> None:
    # 15 right, 1 wrong: alone they have deviation sqrt(15) / 16, so that group's estimator gives the miss -sqrt(15). Beside a
    # group of which half is right (squares: 16 x 15/256 and 16 x 1/4, over 32) it weighs -15/16 over sqrt(79/512) = -2.39.
    rewards, labels = double(*[1] * 15, 0, *[1, 0] * 8), groups(*[0] * 16, *[1] * 16)
    assert with_deviation(rewards, labels)[15] == pytest.approx(-math.sqrt(15), abs=1e-4)
    assert group_batch_advantages(rewards, labels)[15] == pytest.approx(-15 / 16 / math.sqrt(79 / 512), abs=1e-4)


def test_group_batch_of_an_equal_group_is_0_beside_others() -> None:
    advantages, metrics = both(group_batch_advantages, torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0]), groups(5, 5, 5, 2, 2))
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    # the equal group counts in the batch: squares 3 x 0 + 2 x 0.25, over 5
    assert advantages[3:].tolist() == pytest.approx([0.5 / math.sqrt(0.1), -0.5 / math.sqrt(0.1)], rel=1e-4)
    assert metrics.means()["reward/equal_group_fraction"] == 0.5


@each_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("reward", "size"), [(0.1, 3), (0.1, 6), (0.7, 7), (1 / 3, 11), (1e9 + 0.1, 3), (-0.1, 3), (0.0, 4), (0.3, 1)]
)
def test_equal_rewards_give_exactly_zero(estimate: Callable[..., Any], dtype: torch.dtype, reward: float, size: int) -> None:
    # The mean of 0.1 three times is not 0.1 in floating point: the difference divided by epsilon would be noise.
    advantages, metrics = both(estimate, torch.full((size,), reward, dtype=dtype), groups(*[0] * size))
    assert advantages.dtype == dtype
    assert advantages.tolist() == [0.0] * size
    # a group of one has no deviation: to a watch over it, 0 would say that there is nothing to learn from
    wanted = {"reward/group_std": 0.0, "reward/equal_group_fraction": 1.0} if size > 1 else {}
    assert metrics.means() == wanted


@each_estimator
def test_float32_rewards_are_worked_on_in_float64(estimate: Callable[..., Any]) -> None:
    """Rewards that float32 holds and whose sums it does not: as float64, and rounded once at the end."""
    rewards = 1e6 + torch.rand(96, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(96) // 32
    advantages, _ = both(estimate, rewards, labels)
    assert advantages.dtype == torch.float32
    assert torch.equal(advantages, estimate(rewards.double(), labels).float())


def test_the_example_of_equal_rewards_is_one_with_rounding() -> None:
    rewards = double(0.1, 0.1, 0.1)
    assert (rewards - rewards.sum() / 3).abs().max() > 0


def test_groups_with_equal_rewards_are_counted_among_all() -> None:
    # Of groups 2 (0.1 twice) and 7; 9 is alone and not counted. Deviations 0, 0.5.
    advantages, metrics = both(group_advantages, double(0.1, 1, 5, 0.1, 0), groups(2, 7, 9, 2, 7), std=True)
    assert advantages.tolist() == pytest.approx([0, 1, 0, 0, -1], abs=1e-5)
    assert metrics.means()["reward/equal_group_fraction"] == pytest.approx(1 / 2)
    assert metrics.means()["reward/group_std"] == pytest.approx(0.5 / 2)
    sums, _ = metrics.vector()
    assert sums.tolist() == pytest.approx([1, 0.5, 2, 2])  # equal groups, deviations, and groups twice


@each_estimator
def test_order_and_labels_of_groups_do_not_matter(estimate: Callable[..., Any]) -> None:
    rewards, labels = double(1, 2, 4, 7, 3), groups(0, 0, 0, 1, 1)
    straight = estimate(rewards, labels)
    order = torch.tensor([4, 0, 3, 1, 2])
    mixed = estimate(rewards[order], (labels * 100 - 7)[order])
    assert mixed.tolist() == pytest.approx(straight[order].tolist(), abs=1e-12)
    assert straight.abs().min() > 0.1


@each_estimator
def test_advantages_of_a_group_sum_to_zero(estimate: Callable[..., Any]) -> None:
    rewards = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advantages, _ = both(estimate, rewards, groups(0, 0, 1, 1, 1, 1, 0, 2, 2))
    for label in range(3):
        mine = advantages[groups(0, 0, 1, 1, 1, 1, 0, 2, 2) == label]
        assert float(mine.sum()) == pytest.approx(0, abs=1e-12) and float(mine.abs().sum()) > 0.1


@each_estimator
def test_no_sequences(estimate: Callable[..., Any]) -> None:
    advantages, metrics = both(estimate, torch.zeros(0), groups())
    assert advantages.shape == (0,)
    assert metrics.means() == {}


@each_estimator
@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_an_error(estimate: Callable[..., Any], reward: float) -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\]=.*: must be finite"):
        estimate(double(1, reward), groups(0, 0))
