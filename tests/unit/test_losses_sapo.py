"""SAPO by hand: sigmoid(tau (r - 1)) x 4 / tau x A, without a clip (arXiv 2511.20347)."""

import math

import pytest

from moe_rl.algorithms.base import Denominators
from moe_rl.algorithms.loss import policy_loss
from tests.losses import gradient, logs, make_inputs, settings


def test_value_and_gradient_by_hand() -> None:
    # A = 1, tau 1, r = 2: p = sigmoid(1) = 0.731058578630005; 4 p = 2.92423431452002; 4 p (1 - p) r = 1.572895465931
    # A = -1, tau 1.05, r = 3: p = sigmoid(2.1) = 0.890903178804; 4 p / 1.05 = 3.393916871636; 4 p (1 - p) r = 1.166336457608
    inputs = make_inputs([logs(2.0), logs(3.0)], [1.0, -1.0])
    loss, metrics = policy_loss(inputs, settings("sapo"), Denominators(2, 2))
    assert loss.item() == pytest.approx(-(2.92423431452002 - 3.393916871636) / 2, abs=1e-11)
    assert gradient(loss, inputs).tolist() == pytest.approx([-1.572895465931 / 2, 1.166336457608 / 2], abs=1e-9)
    means = metrics.means()
    assert means["ratio/mean"] == pytest.approx(2.5)
    assert not [key for key in means if key.startswith(("ratio/clip_fraction", "ratio/outside"))]


@pytest.mark.parametrize("advantage", [1.3, -0.6])
@pytest.mark.parametrize("ratio", [0.05, 0.7, 1.0, 1.6, 4.0])
def test_the_gradient_is_that_of_r_times_a_faded_by_sech_squared(advantage: float, ratio: float) -> None:
    # 4 p (1 - p) = sech^2(tau (r - 1) / 2): 1 at r = 1, less on either side
    tau = 1.0 if advantage > 0 else 1.05
    inputs = make_inputs([logs(ratio)], [advantage])
    loss, _ = policy_loss(inputs, settings("sapo"), Denominators(1, 1))
    assert loss.item() == pytest.approx(-advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1))), rel=1e-14)
    faded = 1 / math.cosh(tau * (ratio - 1) / 2) ** 2
    assert gradient(loss, inputs).item() == pytest.approx(-advantage * ratio * faded, rel=1e-13)


def test_negative_advantages_fade_sooner_and_each_has_its_tau() -> None:
    inputs = make_inputs([logs(2.0), logs(2.0)], [1.0, -1.0])
    loss, _ = policy_loss(inputs, settings("sapo"), Denominators(2, 2))
    positive, negative = (-gradient(loss, inputs)).tolist()
    assert positive > -negative > 0
    swapped = settings("sapo", sapo_tau_positive=1.05, sapo_tau_negative=1.0)
    other = -gradient(policy_loss(inputs, swapped, Denominators(2, 2))[0], inputs)
    assert other.tolist() == pytest.approx([-negative, -positive], rel=1e-14)
    # tau 3 and 0.5 at r = 2: sech^2(1.5) x 2 and sech^2(0.25) x 2, over 2 sequences
    wide = settings("sapo", sapo_tau_positive=3.0, sapo_tau_negative=0.5)
    found = -gradient(policy_loss(inputs, wide, Denominators(2, 2))[0], inputs)
    assert found.tolist() == pytest.approx([1 / math.cosh(1.5) ** 2, -1 / math.cosh(0.25) ** 2])


def test_a_mean_over_sequences_of_means_over_tokens() -> None:
    # At ratio 1 a term is 2 / tau x A: (2 x 3 tokens / 3 + 2 / 1.05 x -1) / 2
    inputs = make_inputs([[0.0] * 3, [0.0]], [1.0, -1.0])
    loss, _ = policy_loss(inputs, settings("sapo"), Denominators(2, 4))
    assert loss.item() == pytest.approx(-(2 - 2 / 1.05) / 2, abs=1e-12)


def test_the_router_shift_scales_the_ratio_inside_the_gate() -> None:
    # 2.5 x 0.8 = 2
    shifted = make_inputs([logs(2.5)], [1.0], log_router_shift=logs(0.8))
    plain = make_inputs([logs(2.0)], [1.0])
    losses = [policy_loss(inputs, settings("sapo"), Denominators(1, 1))[0] for inputs in (shifted, plain)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-14)
    assert gradient(losses[0], shifted).item() == pytest.approx(gradient(losses[1], plain).item(), rel=1e-14)
