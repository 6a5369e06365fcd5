"""PPO, GRPO, Dr. GRPO, DAPO, RLOO and REINFORCE++: one clipped ratio a token, by hand."""

import math

import pytest

from moe_rl.algorithms.base import Denominators
from moe_rl.algorithms.loss import policy_loss
from tests.losses import counts, gradient, logs, make_inputs, settings

# Sequence 0, A = 2, ratios 1, 1.5, 0.5. Sequence 1, A = -1, ratios 1.5, 0.5. The minimum of r A and clip(r) A is
#   2, (1 + high) x 2 (cut), 1 (below the range, but r A is the minimum) | -1.5 (above it, the same), -0.8 (cut).
RATIOS = [logs(1.0, 1.5, 0.5), logs(1.5, 0.5)]
# d objective / d train = r A where nothing is cut
SLOPES = [2.0, 0.0, 1.0, -1.5, 0.0]


@pytest.mark.parametrize(
    ("name", "section", "expected", "shares"),
    [
        # high 0.27: 2 + 2.54 + 1 = 5.54 | -2.3; a mean over sequences of means over tokens
        ("grpo", {}, (5.54 / 3 - 1.15) / 2, [1 / 6] * 3 + [1 / 4] * 2),
        # high 0.2: 2 + 2.4 + 1 = 5.4 | -2.3; divided by 10 tokens a sequence, whatever its length
        ("dr_grpo", {}, (0.54 - 0.23) / 2, [1 / 20] * 5),
        ("dr_grpo", {"aggregation": "seq_mean_token_sum"}, (5.4 - 2.3) / 2, [1 / 2] * 5),
        # high 0.28: 2 + 2.56 + 1 - 2.3 = 3.26 over 5 tokens
        ("dapo", {}, 3.26 / 5, [1 / 5] * 5),
        # high 0.2: 5.4 - 2.3 = 3.1 over 5 tokens
        ("ppo", {}, 3.1 / 5, [1 / 5] * 5),
        ("reinforce_plus_plus", {}, 3.1 / 5, [1 / 5] * 5),
        ("reinforce_plus_plus_baseline", {}, 3.1 / 5, [1 / 5] * 5),
        # high 0.2, summed over tokens: the gradient of log pi of the whole response
        ("rloo", {}, 3.1 / 2, [1 / 2] * 5),
    ],
)
def test_value_and_gradient_of_each(name: str, section: dict[str, str], expected: float, shares: list[float]) -> None:
    inputs = make_inputs(RATIOS, [2.0, -1.0])
    loss, metrics = policy_loss(inputs, settings(name, **section), Denominators(2, 5))
    assert loss.item() == pytest.approx(-expected, abs=1e-12)
    found = gradient(loss, inputs).tolist()
    assert found == pytest.approx([-slope * share for slope, share in zip(SLOPES, shares, strict=True)], abs=1e-12)
    assert found[1] == found[4] == 0
    means = metrics.means()
    assert means["loss/policy"] == means["loss/total"] == pytest.approx(loss.item())
    assert means["ratio/clip_fraction_low"] == means["ratio/clip_fraction_high"] == pytest.approx(1 / 5)


def test_every_token_may_have_its_own_advantage() -> None:
    # PPO: A = 1, -1, 2 at ratios 1.5, 1.5, 0.5: 1.2 (cut), -1.5, 1. The sum 0.7 over 3 tokens.
    inputs = make_inputs([logs(1.5, 1.5, 0.5)], [[1.0, -1.0, 2.0]])
    loss, _ = policy_loss(inputs, settings("ppo"), Denominators(1, 3))
    assert loss.item() == pytest.approx(-0.7 / 3)
    assert gradient(loss, inputs).tolist() == pytest.approx([0, 1.5 / 3, -1 / 3])


@pytest.mark.parametrize(
    ("advantage", "ratio", "cut"),
    [
        (1.0, 1.27 - 1e-6, False),
        (1.0, 1.27 + 1e-6, True),
        (-1.0, 1.27 + 1e-6, False),
        (-1.0, 0.8 + 1e-6, False),
        (-1.0, 0.8 - 1e-6, True),
        (1.0, 0.8 - 1e-6, False),
    ],
)
def test_each_side_is_cut_for_one_sign_only(advantage: float, ratio: float, cut: bool) -> None:
    inputs = make_inputs([logs(ratio)], [advantage])
    loss, metrics = policy_loss(inputs, settings("grpo"), Denominators(1, 1))
    assert loss.item() == pytest.approx(-advantage * ratio, abs=2e-6)
    assert gradient(loss, inputs).item() == pytest.approx(0 if cut else -advantage * ratio, abs=1e-12)
    assert metrics.means()["ratio/clip_fraction"] == cut


def test_the_clip_limits_are_those_given() -> None:
    # A = 1, r = 1.26: stands under 0.27, cut at 1.25 under 0.25. A = -1, r = 0.81: stands under 0.2, cut at 0.85 under 0.15.
    inputs = make_inputs([logs(1.26), logs(0.81)], [1.0, -1.0])
    assert policy_loss(inputs, settings("grpo"), counts(inputs))[0].item() == pytest.approx(-(1.26 - 0.81) / 2)
    other = settings("grpo", clip_low=0.15, clip_high=0.25)
    assert policy_loss(inputs, other, counts(inputs))[0].item() == pytest.approx(-(1.25 - 0.85) / 2)


def test_masked_tokens_do_not_count_in_the_sequence_mean() -> None:
    # Sequence 0 without its token 1: (2 + 1) / 2 = 1.5. Sequence 1 is masked away, so one sequence counts. Loss = -1.5.
    inputs = make_inputs(RATIOS, [2.0, -1.0], masked=[1, 3, 4])
    loss, metrics = policy_loss(inputs, settings("grpo"), Denominators(1, 2))
    assert loss.item() == pytest.approx(-1.5)
    means = metrics.means()
    assert means["loss/policy"] == pytest.approx(-1.5)
    assert means["ratio/mean"] == pytest.approx(0.75)
    assert means["ratio/clip_fraction"] == 0
    assert metrics.maxima()["ratio/max"] == pytest.approx(1.0)


def test_length_weighs_only_where_the_algorithm_says_so() -> None:
    # A = 1 over 9 tokens and A = -1 over 1, ratio 1. GRPO: 1 - 1 = 0. DAPO: (9 - 1) / 10. Dr. GRPO: (9 - 1) / 10 / 2.
    inputs = make_inputs([[0.0] * 9, [0.0]], [1.0, -1.0])
    losses = {name: -policy_loss(inputs, settings(name), counts(inputs))[0].item() for name in ("grpo", "dapo", "dr_grpo")}
    assert losses == pytest.approx({"grpo": 0.0, "dapo": 0.8, "dr_grpo": 0.4}, abs=1e-15)


def test_the_router_shift_scales_the_ratio_before_the_clip() -> None:
    # gamma = 0.8. A = 1, r = 1.5: 1.2 is inside and keeps its gradient (1.5 is cut). A = -1, r = 0.9: 0.72 is cut at 0.8
    # (0.9 is not).
    inputs = make_inputs([logs(1.5), logs(0.9)], [1.0, -1.0], log_router_shift=logs(0.8, 0.8))
    loss, metrics = policy_loss(inputs, settings("grpo"), Denominators(2, 2))
    assert loss.item() == pytest.approx(-(1.2 - 0.8) / 2)
    assert gradient(loss, inputs).tolist() == pytest.approx([-1.2 / 2, 0])
    means = metrics.means()
    assert means["ratio/mean"] == pytest.approx((1.2 + 0.72) / 2)
    assert means["router_shift/factor_mean"] == pytest.approx(0.8)
    # k3 of the log-probabilities alone: mean(r) - 1 - mean(log r)
    assert means["kl/old_new"] == pytest.approx(0.2 - math.log(1.5 * 0.9) / 2)
