"""The same tensors give the same losses, gradients, advantages and weights as in TRL where the definitions are the same."""

import pytest
import torch

from moe_rl.advantages import group_advantages, leave_one_out_advantages
from moe_rl.algorithms.config import CorrectionSection
from moe_rl.algorithms.kl import k1
from moe_rl.corrections import correction_weights
from moe_rl.shaping import overlong_penalty
from tests.comparison import trl_side
from tests.comparison.agreements import AGREEMENTS, SEEDS, deviation
from tests.comparison.batches import random_batch

TOLERANCE = 1e-13  # float64; values and gradients are of order 0.01 to 1
GROUP = torch.arange(8) // 4


@pytest.mark.parametrize("name", AGREEMENTS)
def test_losses_and_gradients_agree(name: str) -> None:
    agreement = AGREEMENTS[name]
    found = [deviation(agreement, seed) for seed in SEEDS]
    assert max(one.gradient for one in found) < TOLERANCE
    if agreement.value:
        assert max(one.value for one in found) < TOLERANCE
    assert min(one.scale for one in found) > 1e-3, "a gradient of 0 agrees with any other of 0"
    for direction in agreement.cuts:
        assert any(one.metrics[f"ratio/clip_fraction_{direction}"] > 0 for one in found)
    if "correction" in agreement.ours:
        assert any(0 < one.metrics["correction/touched_fraction"] < 1 for one in found)


@pytest.mark.parametrize("seed", SEEDS)
def test_leave_one_out_advantages_agree_also_with_a_kl_penalty_in_the_reward(seed: int) -> None:
    batch = random_batch(seed, 0.0, tool_tokens=False)
    rewards = batch.advantages
    theirs = trl_side.score(batch, rewards, "RLOOTrainer")["advantages"]
    torch.testing.assert_close(leave_one_out_advantages(rewards, GROUP), theirs, rtol=0, atol=TOLERANCE)
    penalised = rewards - 0.05 * torch.where(batch.present, k1(batch.old - batch.ref), 0.0).sum(1)
    theirs = trl_side.score(batch, rewards, "RLOOTrainer", beta=0.05)["advantages"]
    torch.testing.assert_close(leave_one_out_advantages(penalised, GROUP), theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_group_advantages_agree_once_the_deviation_is_scaled(seed: int) -> None:
    batch = random_batch(seed, 0.0)
    rewards = batch.advantages
    centred = trl_side.score(batch, rewards, scale_rewards="none")["advantages"]
    torch.testing.assert_close(group_advantages(rewards, GROUP, std=False), centred, rtol=0, atol=TOLERANCE)
    theirs = trl_side.score(batch, rewards)["advantages"]
    deviations = rewards.view(2, 4).std(1, correction=1).repeat_interleave(4)
    # theirs over G - 1 with 1e-4 added, ours over G with 1e-6
    scaled = theirs * (deviations + 1e-4) / (deviations * (3 / 4) ** 0.5 + 1e-6)
    torch.testing.assert_close(group_advantages(rewards, GROUP, std=True), scaled, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token_truncate", {"mode": "tis"}),
        ("token_mask", {"mode": "mis"}),
        ("sequence_truncate", {"mode": "tis", "level": "sequence"}),
        ("sequence_mask", {"mode": "mis", "level": "sequence"}),
    ],
)
def test_the_weights_of_corrections_agree(theirs: str, ours: dict[str, str]) -> None:
    section = CorrectionSection.model_validate({**ours, "high": 1.3})
    for seed in SEEDS:
        batch, packed = random_batch(seed, 0.0), random_batch(seed, 0.0).packed()
        settings = {"vllm_importance_sampling_mode": theirs, "vllm_importance_sampling_clip_max": 1.3}
        weights = trl_side.score(batch, batch.advantages, **settings)["importance_sampling_ratio"].expand(batch.old.shape)
        found, _ = correction_weights(packed["old"], packed["rollout"], packed["sequence"], 8, packed["counted"], section)
        own = packed["counted"]
        torch.testing.assert_close(found[own], weights[batch.present][own], rtol=0, atol=TOLERANCE)


def test_dapos_overlong_penalty_agrees_at_every_length() -> None:
    theirs = trl_side.function("trl.rewards", "get_soft_overlong_punishment")(max_completion_len=20, soft_punish_cache=4)
    lengths = list(range(1, 24))
    expected = torch.tensor(theirs(completion_ids=[[0] * length for length in lengths]))
    torch.testing.assert_close(overlong_penalty(torch.tensor(lengths), longest=20, buffer=4), expected, rtol=0, atol=1e-7)
    assert expected.min() == -1 and expected.max() == 0
