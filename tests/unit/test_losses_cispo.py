"""CISPO by hand: the weight is clipped and has no gradient; every token keeps one (arXiv 2506.13585, eq. 4 and 5)."""

import math

import pytest

from moe_rl.algorithms.base import Denominators
from moe_rl.algorithms.loss import policy_loss
from tests.losses import gradient, logs, make_inputs, settings


def test_the_weight_is_capped_and_every_token_has_a_gradient() -> None:
    # Ratios 1, 8, 0.01 at A = 2 and 8 at A = -1, capped at 5 and not from below: weights 1, 5, 0.01, 5.
    # The term is weight x A x log pi, log pi = -1.5 + log r; the mean over 4 tokens.
    inputs = make_inputs([logs(1.0, 8.0, 0.01), logs(8.0)], [2.0, -1.0])
    loss, metrics = policy_loss(inputs, settings("cispo"), Denominators(2, 4))
    log_pi = [-1.5, -1.5 + math.log(8), -1.5 + math.log(0.01)]
    expected = 2 * log_pi[0] + 10 * log_pi[1] + 0.02 * log_pi[2] - 5 * log_pi[1]
    assert loss.item() == pytest.approx(-expected / 4, abs=1e-12)
    # through log pi alone; a weight with gradient would add weight x A x log pi
    assert gradient(loss, inputs).tolist() == pytest.approx([-2 / 4, -10 / 4, -0.02 / 4, 5 / 4], abs=1e-12)
    means = metrics.means()
    assert means["ratio/clip_fraction"] == means["ratio/clip_fraction_high"] == pytest.approx(2 / 4)  # of either sign
    assert means["ratio/clip_fraction_low"] == 0
    assert metrics.maxima()["ratio/max"] == pytest.approx(8)


def test_a_lower_bound_lifts_the_weight() -> None:
    # clip_low 0.2: ratio 0.01 weighs 0.8, of either sign
    inputs = make_inputs([logs(0.01, 0.9), logs(0.01)], [1.0, -1.0])
    loss, metrics = policy_loss(inputs, settings("cispo", clip_low=0.2), Denominators(2, 3))
    assert gradient(loss, inputs).tolist() == pytest.approx([-0.8 / 3, -0.9 / 3, 0.8 / 3])
    assert metrics.means()["ratio/clip_fraction_low"] == pytest.approx(2 / 3)


def test_the_cap_is_the_one_given() -> None:
    inputs = make_inputs([logs(1.9), logs(1.9)], [1.0, -1.0])
    loss, _ = policy_loss(inputs, settings("cispo", clip_high=0.5), Denominators(2, 2))
    assert gradient(loss, inputs).tolist() == pytest.approx([-1.5 / 2, 1.5 / 2])


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("token_mean", [1 / 3] * 3),
        ("seq_mean_token_mean", [1 / 4, 1 / 4, 1 / 2]),
        ("seq_mean_token_sum", [1 / 2] * 3),
        ("constant", [1 / 20] * 3),
    ],
)
def test_every_aggregation(kind: str, shares: list[float]) -> None:
    inputs = make_inputs([logs(2.0, 0.5), logs(6.0)], [1.0, -1.0])
    loss, _ = policy_loss(inputs, settings("cispo", aggregation=kind), Denominators(2, 3))
    expected = [-slope * share for slope, share in zip([2.0, 0.5, -5.0], shares, strict=True)]
    assert gradient(loss, inputs).tolist() == pytest.approx(expected)


def test_the_router_shift_scales_the_ratio_before_the_cap() -> None:
    # 8 x 0.5 = 4 lies under the cap of 5; 16 x 0.5 does not
    inputs = make_inputs([logs(8.0, 16.0)], [1.0], log_router_shift=logs(0.5, 0.5))
    loss, _ = policy_loss(inputs, settings("cispo"), Denominators(1, 2))
    assert gradient(loss, inputs).tolist() == pytest.approx([-4 / 2, -5 / 2])
