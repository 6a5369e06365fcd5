import math
from collections.abc import Callable

import pytest

from moe_rl.algorithms import ClipRange, Denominators, LossInputs
from moe_rl.algorithms.grpo import grpo_loss

MakeInputs = Callable[..., LossInputs]
CLIP = ClipRange(0.2, 0.27)


def logs(*ratios: float) -> list[float]:
    return [math.log(ratio) for ratio in ratios]


def test_clipped_on_both_sides_for_both_signs_by_hand(make_inputs: MakeInputs) -> None:
    # Sequence 0, A = 2, ratios 1, 1.5, 0.5: min gives 2 (inside), 1.27 x 2 = 2.54 (clipped), 0.5 x 2 = 1 (below the range,
    # but r A is the minimum). Mean 5.54 / 3.
    # Sequence 1, A = -1, ratios 1.5, 0.5: -1.5 (above the range, r A is the minimum), -0.8 (clipped). Mean -1.15.
    # Loss = -(5.54 / 3 - 1.15) / 2.
    inputs = make_inputs([logs(1.0, 1.5, 0.5), logs(1.5, 0.5)], [2.0, -1.0])
    loss, metrics = grpo_loss(inputs, CLIP, Denominators(2, 5))
    assert loss.item() == pytest.approx(-(5.54 / 3 - 1.15) / 2, abs=1e-12)

    # d loss / d train = -A r / (tokens of the sequence x 2 sequences) where not clipped, else exactly 0.
    loss.backward()
    assert inputs.train_logprobs.grad is not None
    gradient = inputs.train_logprobs.grad.tolist()
    assert gradient == pytest.approx([-2 / 6, 0, -1 / 6, 1.5 / 4, 0], abs=1e-12)
    assert gradient[1] == gradient[4] == 0

    means = metrics.means()
    assert means["loss/policy"] == means["loss/total"] == pytest.approx(loss.item())
    assert means["ratio/mean"] == pytest.approx(1.0)  # (1 + 1.5 + 0.5 + 1.5 + 0.5) / 5
    assert metrics.maxima() == {"ratio/max": pytest.approx(1.5)}
    assert means["ratio/clip_fraction"] == pytest.approx(2 / 5)
    assert means["ratio/clip_fraction_low"] == means["ratio/clip_fraction_high"] == pytest.approx(1 / 5)
    assert means["ratio/log_abs_mean"] == pytest.approx((2 * math.log(1.5) + 2 * math.log(2)) / 5)
    # k3 with r = new / old: mean(r) - 1 - mean(log r) = 0 - 2 (log 1.5 + log 0.5) / 5
    assert means["kl/old_new"] == pytest.approx(-2 * math.log(0.75) / 5)


def test_clip_fractions_name_the_side(make_inputs: MakeInputs) -> None:
    # Three tokens cut above (A > 0), one cut below (A < 0), of 8.
    inputs = make_inputs([logs(1.3, 1.4, 1.5, 1.0), logs(0.7, 0.9, 1.0, 1.5)], [1.0, -1.0])
    means = grpo_loss(inputs, CLIP, Denominators(2, 8))[1].means()
    assert means["ratio/clip_fraction_high"] == pytest.approx(3 / 8)
    assert means["ratio/clip_fraction_low"] == pytest.approx(1 / 8)
    assert means["ratio/clip_fraction"] == pytest.approx(4 / 8)


def test_the_clip_limits_are_those_given(make_inputs: MakeInputs) -> None:
    # A = 1, r = 1.26: stands under 0.27, cut at 1.25 under 0.25. A = -1, r = 0.81: stands under 0.2, cut at 0.85 under 0.15.
    inputs = make_inputs([logs(1.26), logs(0.81)], [1.0, -1.0])
    assert grpo_loss(inputs, CLIP, Denominators(2, 2))[0].item() == pytest.approx(-(1.26 - 0.81) / 2)
    assert grpo_loss(inputs, ClipRange(0.15, 0.25), Denominators(2, 2))[0].item() == pytest.approx(-(1.25 - 0.85) / 2)


def test_masked_tokens_do_not_count_in_the_sequence_mean(make_inputs: MakeInputs) -> None:
    # Sequence 0 without its token 1: (2 + 1) / 2 = 1.5. Sequence 1 is masked away, so one sequence counts. Loss = -1.5.
    inputs = make_inputs([logs(1.0, 1.5, 0.5), logs(1.5, 0.5)], [2.0, -1.0], masked=[1, 3, 4])
    loss, metrics = grpo_loss(inputs, CLIP, Denominators(1, 2))
    assert loss.item() == pytest.approx(-1.5)
    means = metrics.means()
    assert means["loss/policy"] == pytest.approx(-1.5)
    assert means["ratio/mean"] == pytest.approx(0.75)
    assert means["ratio/clip_fraction"] == 0
    assert metrics.maxima()["ratio/max"] == pytest.approx(1.0)


def test_each_sequence_weighs_the_same_whatever_its_length(make_inputs: MakeInputs) -> None:
    # A = 1 over 9 tokens and A = -1 over 1 token, ratio 1: 1 - 1 = 0. Weighted by tokens it would be -(9 - 1) / 10 = -0.8.
    inputs = make_inputs([[0.0] * 9, [0.0]], [1.0, -1.0])
    assert grpo_loss(inputs, CLIP, Denominators(2, 10))[0].item() == pytest.approx(0, abs=1e-15)


def test_tails_are_ratios_beyond_two_either_way(make_inputs: MakeInputs) -> None:
    inputs = make_inputs([logs(1.9, 2.1, 1.0), logs(0.45, 0.55)], [1.0, 1.0])
    assert grpo_loss(inputs, CLIP, Denominators(2, 5))[1].means()["ratio/tail_fraction"] == pytest.approx(2 / 5)
