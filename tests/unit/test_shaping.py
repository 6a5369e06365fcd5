"""Shaped rewards: each part by hand, and what is off changes nothing."""

import math
from typing import Any

import pytest
import torch

from models.presets import PRESETS
from moe_rl.config import RunConfig
from moe_rl.shaping import length_factor, logprob_spread, overlong_penalty, shaped_rewards
from moe_rl.shaping_config import ShapingSection


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def shaped(
    rewards: list[float], sizes: list[int], section: ShapingSection, buffer: int = 0, logprobs: list[list[float]] | None = None
) -> Any:
    """With a longest response of 20."""
    given = logprobs or [[-1.0] * n for n in sizes]
    return shaped_rewards(torch.tensor(rewards), lengths(*sizes), given, section, 20, buffer)


def test_the_overlong_penalty_at_the_corners_of_its_definition() -> None:
    # Longest 20, buffer 4: 0 up to 16, then a quarter a token, -1 at 20 and beyond.
    assert overlong_penalty(lengths(1, 15, 16, 17, 18, 19, 20, 21, 500), 20, 4).tolist() == [
        0, 0, 0, -0.25, -0.5, -0.75, -1, -1, -1,
    ]  # fmt: skip


def test_the_papers_own_numbers() -> None:
    """DAPO, section 4.1: a longest response of 20480 with a buffer of 4096, punished from 16384 on."""
    found = overlong_penalty(lengths(16_384, 16_385, 18_432, 20_480), 20_480, 4096)
    assert found.tolist() == pytest.approx([0, -1 / 4096, -0.5, -1], abs=1e-7)


def test_the_length_factor_by_hand() -> None:
    assert length_factor(lengths(1, 8, 32, 128), 8, 0.5).tolist() == pytest.approx([1, 1, 0.5, 0.25])
    assert length_factor(lengths(8, 16, 32), 8, 1.0).tolist() == pytest.approx([1, 0.5, 0.25])
    assert length_factor(lengths(0), 8, 1.0).tolist() == [1]


def test_the_spread_of_log_probabilities_by_hand() -> None:
    # -1, -3: mean -2, deviation 1. -1, -1, -4: mean -2, sqrt((1 + 1 + 4) / 3). One token, and none: 0.
    found = logprob_spread([[-1.0, -3.0], [-1.0, -1.0, -4.0], [-7.0], [], [-0.1] * 5])
    assert found.tolist() == pytest.approx([1, math.sqrt(2), 0, 0, 0], abs=1e-7)


def test_what_is_off_changes_nothing_and_says_nothing() -> None:
    rewards = torch.tensor([0.1, -0.7, 1.0])
    found, metrics = shaped_rewards(rewards, lengths(1, 20, 400), [[-1.0], [-2.0], [-3.0]], ShapingSection(), 20, 0)
    assert torch.equal(found, rewards) and metrics.means() == {}


def test_length_scales_rewards_above_0_alone() -> None:
    """A long punished response is not punished less."""
    section = ShapingSection(length_target=5, length_power=1.0)
    found, metrics = shaped([1.0, 2.0, -1.0, 0.0, 1.0], [5, 10, 20, 20, 20], section)
    assert found.tolist() == pytest.approx([1, 1, -1, 0, 0.25])
    assert metrics.means() == pytest.approx({"reward/shaping/length": -1.75 / 5, "reward/shaped_mean": 1.25 / 5})


def test_the_overlong_penalty_has_its_own_size() -> None:
    found, metrics = shaped([1.0, 1.0, 0.0], [10, 18, 20], ShapingSection(overlong_penalty=0.5), buffer=4)
    assert found.tolist() == pytest.approx([1, 0.75, -0.5])
    assert metrics.means() == pytest.approx({"reward/shaping/overlong": -0.75 / 3, "reward/shaped_mean": 1.25 / 3})


def test_spread_is_subtracted() -> None:
    found, metrics = shaped([1.0, 1.0], [2, 2], ShapingSection(spread_penalty=0.3), logprobs=[[-1.0, -3.0], [-1.0, -1.0]])
    assert found.tolist() == pytest.approx([0.7, 1])
    assert metrics.means() == pytest.approx({"reward/shaping/spread": -0.15, "reward/shaped_mean": 0.85})


def test_parts_add_up_from_the_tasks_own_reward() -> None:
    """2 x (10 / 20) is 1 less; the penalty of 20 tokens 1; 0.1 x a deviation of 1."""
    section = ShapingSection(length_target=10, length_power=1.0, spread_penalty=0.1)
    found, metrics = shaped([2.0], [20], section, buffer=4, logprobs=[[-1.0, -3.0] * 10])
    assert found.tolist() == pytest.approx([-0.1], abs=1e-6)
    means = metrics.means()
    assert sum(value for key, value in means.items() if key.startswith("reward/shaping/")) == pytest.approx(-2.1)
    assert means["reward/shaped_mean"] == pytest.approx(-0.1, abs=1e-6)


def run(**sections: Any) -> RunConfig:
    tiny = dict(PRESETS["tiny_moe"])
    return RunConfig.model_validate({"model": tiny, **sections})


def test_the_zone_of_the_penalty_is_a_fifth_in_dapo_and_nothing_elsewhere() -> None:
    longest = {"max_response_tokens": 40}
    assert run(algorithm={"name": "dapo"}, rollout=longest).overlong_buffer == 8
    assert run(algorithm={"name": "dapo"}, rollout={"max_response_tokens": 3}).overlong_buffer == 1
    assert run(algorithm={"name": "dapo"}, rollout={"max_response_tokens": 1}).overlong_buffer == 0
    assert run(algorithm={"name": "dapo"}, rollout=longest, shaping={"overlong_buffer": 0}).overlong_buffer == 0
    assert run(algorithm={"name": "grpo"}, rollout=longest).overlong_buffer == 0
    assert run(algorithm={"name": "grpo"}, rollout=longest, shaping={"overlong_buffer": 5}).overlong_buffer == 5
