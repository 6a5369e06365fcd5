"""GMPO by hand: clipped token ratios, then their geometric mean (arXiv 2507.20673)."""

import math

import pytest

from moe_rl.algorithms.base import Denominators
from moe_rl.algorithms.loss import policy_loss
from tests.losses import gradient, logs, make_inputs, settings

OPEN = settings("gmpo", clip_low=0.9999, clip_high=1e4)


def test_clipped_in_log_space_for_both_signs() -> None:
    # The default range is log r in [-0.4, 0.4]. A = 2: 0.1, 0.9, -0.9 become 0.1, 0.4, -0.9, of mean -0.4 / 3.
    # A = -1: 0.5, -0.5 become 0.5, -0.4, of mean 0.05. Loss = -(2 e^(-0.4 / 3) - e^0.05) / 2.
    inputs = make_inputs([[0.1, 0.9, -0.9], [0.5, -0.5]], [2.0, -1.0])
    loss, metrics = policy_loss(inputs, settings("gmpo"), Denominators(2, 5))
    assert loss.item() == pytest.approx(-(2 * math.exp(-0.4 / 3) - math.exp(0.05)) / 2, abs=1e-12)
    # d loss / d train = -A x geometric mean / (tokens x 2 sequences) of tokens that are not cut
    of_first, of_second = -2 * math.exp(-0.4 / 3) / 6, math.exp(0.05) / 4
    found = gradient(loss, inputs).tolist()
    assert found == pytest.approx([of_first, 0, of_first, of_second, 0], abs=1e-12)
    assert found[1] == found[4] == 0
    means = metrics.means()
    assert means["ratio/clip_fraction_low"] == means["ratio/clip_fraction_high"] == pytest.approx(1 / 5)  # of tokens
    assert means["ratio/mean"] == pytest.approx(sum(math.exp(x) for x in (0.1, 0.9, -0.9, 0.5, -0.5)) / 5)
    assert metrics.maxima()["ratio/max"] == pytest.approx(math.exp(0.9))


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "cut"),
    [(1.0, 0.41, True), (1.0, 0.39, False), (1.0, -0.41, False)]
    + [(-1.0, -0.41, True), (-1.0, -0.39, False), (-1.0, 0.41, False)],
)
def test_each_side_is_cut_for_one_sign_only(advantage: float, log_ratio: float, cut: bool) -> None:
    inputs = make_inputs([[log_ratio]], [advantage])
    loss, _ = policy_loss(inputs, settings("gmpo"), Denominators(1, 1))
    exponent = math.copysign(0.4, log_ratio) if cut else log_ratio
    assert loss.item() == pytest.approx(-advantage * math.exp(exponent), abs=1e-12)
    assert (gradient(loss, inputs).item() == 0) == cut


def test_tokens_are_clipped_before_the_mean_and_not_after() -> None:
    # log r = 0.9, -0.9: clipped first, 0.4 - 0.9, of mean -0.25. The mean itself is 0, which no clip would touch.
    inputs = make_inputs([[0.9, -0.9]], [1.0])
    assert policy_loss(inputs, settings("gmpo"), Denominators(1, 2))[0].item() == pytest.approx(-math.exp(-0.25))


def test_without_a_cut_it_is_gspo_without_a_cut() -> None:
    inputs = make_inputs([[0.3, -0.1, 0.25], [-0.2, 0.1]], [1.5, -0.7])
    gmpo, _ = policy_loss(inputs, OPEN, Denominators(2, 5))
    gspo, _ = policy_loss(inputs, settings("gspo", clip_low=0.9999, clip_high=1e4), Denominators(2, 5))
    assert gmpo.item() == pytest.approx(gspo.item(), abs=1e-14)
    assert gradient(gmpo, inputs).tolist() == pytest.approx(gradient(gspo, inputs).tolist(), abs=1e-14)


@pytest.mark.parametrize("length", [1, 7, 1000])
def test_the_loss_does_not_scale_with_length(length: int) -> None:
    """Case 18."""
    inputs = make_inputs([[0.1] * length], [3.0])
    loss, _ = policy_loss(inputs, settings("gmpo"), Denominators(1, length))
    assert loss.item() == pytest.approx(-3 * math.exp(0.1))
    assert gradient(loss, inputs).sum().item() == pytest.approx(-3 * math.exp(0.1))


def test_sequences_are_not_weighted_by_length() -> None:
    """Case 19: (1 - e^0.3) / 2, and not (9 - e^0.3) / 10."""
    inputs = make_inputs([[0.0] * 9, [0.3]], [1.0, -1.0])
    assert policy_loss(inputs, settings("gmpo"), Denominators(2, 10))[0].item() == pytest.approx(-(1 - math.exp(0.3)) / 2)


def test_masked_tokens_do_not_count_in_the_geometric_mean() -> None:
    inputs = make_inputs([[0.2, 0.35, 0.4], [1.0, 1.0]], [2.0, 7.0], masked=[1, 3, 4])
    loss, _ = policy_loss(inputs, settings("gmpo"), Denominators(1, 2))
    assert loss.item() == pytest.approx(-2 * math.exp(0.3))


def test_the_router_shift_scales_each_token_before_its_clip() -> None:
    # gamma 0.8 and 1: log r = 0.5 becomes 0.5 + log 0.8 = 0.277, inside; 0.5 is cut at 0.4.
    inputs = make_inputs([[0.5, 0.5]], [1.0], log_router_shift=logs(0.8, 1.0))
    loss, _ = policy_loss(inputs, settings("gmpo"), Denominators(1, 2))
    whole = math.exp((0.5 + math.log(0.8) + 0.4) / 2)
    assert loss.item() == pytest.approx(-whole)
    assert gradient(loss, inputs).tolist() == pytest.approx([-whole / 2, 0])
