"""Where TRL defines a thing otherwise: both sides' numbers, worked out by hand. docs/comparison_with_trl.md says why."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_rl.advantages import group_advantages, group_batch_advantages
from moe_rl.algorithms.config import AlgorithmSection, CorrectionSection
from moe_rl.corrections import correction_weights
from tests.comparison import trl_side
from tests.comparison.agreements import gradients, our_loss
from tests.comparison.batches import Batch, batch_of

WIDE = {"epsilon_low": 0.2, "epsilon_high": 0.28}


def exactly(number: float | list[float]) -> Any:
    return pytest.approx(number, abs=1e-12)


def ours(batch: Batch, **settings: Any) -> Tensor:
    return our_loss(batch, AlgorithmSection.model_validate(settings))[0]


def theirs(batch: Batch, **settings: Any) -> Tensor:
    return trl_side.loss(batch, num_generations=len(batch.advantages), **settings)


def their_advantages(rewards: Tensor, responses: int, **settings: Any) -> list[float]:
    batch = batch_of([[0.0]] * len(rewards), [0.0] * len(rewards))
    return trl_side.score(batch, rewards, num_generations=responses, **settings)["advantages"].tolist()


def test_the_groups_deviation_divides_by_g_here_and_by_g_minus_1_there() -> None:
    """Rewards 1, 0, 0, 0: variance 3/16 over 4 and 1/4 over 3."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    found = group_advantages(rewards, torch.zeros(4, dtype=torch.int64), std=True)
    assert float(found[0]) == exactly(0.75 / (math.sqrt(3) / 4 + 1e-6))
    assert their_advantages(rewards, 4)[0] == exactly(0.75 / (0.5 + 1e-4))


def test_equal_rewards_are_exactly_0_here_and_a_rounding_error_there() -> None:
    """Float32, as TRL holds them: the mean of eight 0.7 is off by 6e-8, which 1e-4 divides."""
    rewards = torch.full((8,), 0.7)
    found = group_advantages(rewards, torch.zeros(8, dtype=torch.int64), std=True)
    assert found.tolist() == [0.0] * 8
    assert 1e-4 < max(map(abs, their_advantages(rewards, 8))) < 1e-3


def test_over_the_batch_their_deviation_holds_the_differences_between_groups() -> None:
    """Groups (1, 0) and (11, 10). Around their means: 0.5 everywhere. Around 5.5: 4.5 and 5.5, squares 101 over 3."""
    rewards = torch.tensor([1.0, 0.0, 11.0, 10.0], dtype=torch.float64)
    found = group_batch_advantages(rewards, torch.tensor([0, 0, 1, 1]))
    assert float(found[0]) == exactly(0.5 / (0.5 + 1e-6))
    assert their_advantages(rewards, 2, scale_rewards="batch")[0] == exactly(0.5 / (math.sqrt(101 / 3) + 1e-4))


def test_cispos_upper_bound_is_1_plus_epsilon_here_and_epsilon_itself_there() -> None:
    """A ratio of 8, one token, A = 1, log pi = -1.5 + log 8: its gradient is the weight."""
    batch = batch_of([[math.log(8)]], [1.0])
    of_token = gradients(ours(batch, name="cispo", clip_high=4.0), batch)[0, 0, 0]
    assert float(of_token) == exactly(-5.0)
    of_token = gradients(theirs(batch, loss_type="cispo", epsilon_low=0.2, epsilon_high=4.0), batch)[0, 0, 0]
    assert float(of_token) == exactly(-4.0)


def test_off_policy_rloo_clips_tokens_here_and_the_whole_response_there() -> None:
    """Two tokens, each 0.15 above old: ratios 1.16 inside the range, their product 1.35 outside."""
    batch = batch_of([[0.15, 0.15]], [1.0])
    assert gradients(ours(batch, name="rloo", clip_low=0.2, clip_high=0.28), batch)[0, 0].tolist() == exactly(
        [-math.exp(0.15)] * 2
    )
    assert gradients(theirs(batch, trainer="RLOOTrainer", **WIDE), batch)[0, 0].tolist() == [0.0, 0.0]
    # and inside both ranges the gradients are the ratios: of the token, and of the response
    batch = batch_of([[0.1, 0.1]], [1.0])
    assert gradients(ours(batch, name="rloo"), batch)[0, 0].tolist() == exactly([-math.exp(0.1)] * 2)
    assert gradients(theirs(batch, trainer="RLOOTrainer", **WIDE), batch)[0, 0].tolist() == exactly([-math.exp(0.2)] * 2)


def test_rloos_value_at_ratio_1_sums_over_tokens_here_alone() -> None:
    batch = batch_of([[0.0], [0.0, 0.0, 0.0]], [1.0, 1.0])
    assert float(ours(batch, name="rloo").detach()) == exactly(-(1 + 3) / 2)
    assert float(theirs(batch, trainer="RLOOTrainer", **WIDE).detach()) == exactly(-1.0)


def test_a_response_without_counted_tokens_is_left_out_here_and_counted_there() -> None:
    batch = batch_of([[0.0], [0.0]], [1.0, 1.0], uncounted=[1])
    assert float(ours(batch, name="grpo").detach()) == exactly(-1.0)
    assert float(theirs(batch, **WIDE).detach()) == exactly(-0.5)


def test_their_kl_term_is_weighed_with_the_ratio_unless_told_not_to() -> None:
    """One token of ratio 2, log 2 above the reference, A = 0: k3 = 1/2 - 1 + log 2."""
    batch, k3 = batch_of([[math.log(2)]], [0.0], above_ref=math.log(2)), math.log(2) - 0.5
    assert float(ours(batch, name="grpo", kl_coefficient=1.0).detach()) == exactly(k3)
    assert float(theirs(batch, beta=1.0, use_bias_correction_kl=False, **WIDE).detach()) == exactly(k3)
    assert float(theirs(batch, beta=1.0, use_bias_correction_kl=True, **WIDE).detach()) == exactly(2 * k3)


def test_the_entropy_bonus_is_aggregated_like_the_loss_here_and_over_tokens_there() -> None:
    """Entropies 1 | 2, 2, 2: mean of means 1.5, mean over tokens 7/4."""
    batch = batch_of([[0.0], [0.0, 0.0, 0.0]], [0.0, 0.0], entropy=[[1.0], [2.0, 2.0, 2.0]])
    assert float(ours(batch, name="grpo", entropy_coefficient=1.0).detach()) == exactly(-1.5)
    assert float(theirs(batch, entropy_coef=1.0, **WIDE).detach()) == exactly(-1.75)


def test_sequence_mask_is_the_geometric_mean_here_and_the_product_there() -> None:
    """Two tokens, old - rollout = 0.5 each: product e, geometric mean e^0.5. Ours keeps or drops; theirs keeps the ratio."""
    batch = batch_of([[0.0, 0.0]], [1.0], gaps=[[0.5, 0.5]])
    packed = batch.packed()
    found, _ = correction_weights(
        packed["old"], packed["rollout"], packed["sequence"], 1, packed["counted"], CorrectionSection(mode="sequence_mask")
    )
    assert found.tolist() == [0.0, 0.0]
    settings = {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0}
    ratio = trl_side.score(batch, batch.advantages, num_generations=1, **settings)["importance_sampling_ratio"]
    assert ratio.tolist() == [[exactly(math.e)]]
