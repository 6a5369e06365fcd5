"""GSPO by hand: one ratio a sequence, the geometric mean of its tokens' (arXiv 2507.18071, eq. 5 and 7)."""

import math

import pytest
import torch

from moe_rl.algorithms.base import Denominators
from moe_rl.algorithms.loss import policy_loss
from tests.losses import counts, gradient, make_inputs, settings

NARROW = settings("gspo")
WIDE = settings("gspo", clip_low=0.9, clip_high=9.0)


def test_clipped_on_both_sides_for_both_signs() -> None:
    # Mean log-ratios 0.001, -0.001, -0.001, 0.001 (lengths 2, 1, 2, 3), A = 1, 1, -1, -1.
    # A = 1: s = 1.0010005 is cut at 1.0004; s = e^-0.001 is the minimum. A = -1: s = e^-0.001 is cut at 0.9997; e^0.001 stands.
    inputs = make_inputs([[0.003, -0.001], [-0.001], [0.0, -0.002], [0.002, 0.0, 0.001]], [1.0, 1.0, -1.0, -1.0])
    loss, metrics = policy_loss(inputs, NARROW, Denominators(4, 8))
    expected = -(1.0004 + math.exp(-0.001) - 0.9997 - math.exp(0.001)) / 4
    assert loss.item() == pytest.approx(expected, abs=1e-12)

    # d loss / d train = -A s / (tokens of the sequence x 4 sequences) where not clipped, else exactly 0.
    found = gradient(loss, inputs).tolist()
    assert found == pytest.approx([0, 0, -math.exp(-0.001) / 4, 0, 0] + [math.exp(0.001) / 12] * 3, abs=1e-12)
    assert found[:2] == found[3:5] == [0, 0]

    means = metrics.means()
    assert means["ratio/mean"] == pytest.approx((2 * math.exp(0.001) + 2 * math.exp(-0.001)) / 4)
    assert metrics.maxima()["ratio/max"] == pytest.approx(math.exp(0.001))
    assert means["ratio/clip_fraction"] == pytest.approx(2 / 4)  # of sequences
    assert means["ratio/clip_fraction_low"] == means["ratio/clip_fraction_high"] == pytest.approx(1 / 4)
    assert means["ratio/log_abs_mean"] == pytest.approx(0.001)
    # over the 8 tokens: mean of e^x - 1 - x
    tokens = [0.003, -0.001, -0.001, 0.0, -0.002, 0.002, 0.0, 0.001]
    assert means["kl/old_new"] == pytest.approx(sum(math.expm1(x) - x for x in tokens) / 8)
    assert means["loss/total"] == pytest.approx(loss.item())


def test_the_ratio_is_a_geometric_mean_and_not_a_mean_of_ratios() -> None:
    # Token ratios 2 and 0.5: geometric mean 1, arithmetic mean 1.25. A = 1, so the loss is -1 (and -1.25 if wrong).
    inputs = make_inputs([[math.log(2.0), math.log(0.5)]], [1.0])
    loss, metrics = policy_loss(inputs, WIDE, Denominators(1, 2))
    assert loss.item() == pytest.approx(-1.0)
    assert metrics.means()["ratio/mean"] == pytest.approx(1.0)
    # The gradient is the same for both tokens, -A s / 2; a mean of ratios would give -A r_t / 2 = -1 and -0.25.
    assert gradient(loss, inputs).tolist() == pytest.approx([-0.5, -0.5])


def test_the_published_code_sample_is_another_quantity() -> None:
    # An article's sample takes (logprobs - logprobs.detach()).exp().mean(): 1 at every policy, and a mean of ratios besides.
    # Here old and new differ by 0.7 a token: s = e^0.7.
    inputs = make_inputs([[0.7, 0.7, 0.7]], [1.0])
    sample = (inputs.train_logprobs - inputs.train_logprobs.detach()).exp().mean()
    assert sample.item() == 1.0
    loss, _ = policy_loss(inputs, WIDE, Denominators(1, 3))
    assert -loss.item() == pytest.approx(math.exp(0.7))


@pytest.mark.parametrize("length", [1, 7, 1000])
def test_the_loss_does_not_scale_with_length(length: int) -> None:
    """Case 18: every token's ratio is e^0.1, so s = e^0.1 at any length; one term a sequence. The gradient's sum is -s A."""
    inputs = make_inputs([[0.1] * length], [3.0])
    loss, _ = policy_loss(inputs, WIDE, Denominators(1, length))
    assert loss.item() == pytest.approx(-3 * math.exp(0.1))
    assert gradient(loss, inputs).sum().item() == pytest.approx(-3 * math.exp(0.1))


def test_sequences_are_not_weighted_by_length() -> None:
    """Case 19: a [B, 1] loss times a [B, T] mask would give (9 - e^0.5) / 10."""
    # A = 1 over 9 tokens with s = 1, A = -1 over 1 token with s = e^0.5: (1 - e^0.5) / 2
    inputs = make_inputs([[0.0] * 9, [0.5]], [1.0, -1.0])
    loss, _ = policy_loss(inputs, WIDE, Denominators(2, 10))
    assert loss.item() == pytest.approx(-(1 - math.exp(0.5)) / 2)


def test_masked_tokens_do_not_count_in_the_geometric_mean() -> None:
    # Sequence 0 keeps log-ratios 0.2 and 0.4: s = e^0.3. Sequence 1 is masked away and is not counted: loss = -2 e^0.3.
    inputs = make_inputs([[0.2, 5.0, 0.4], [1.0, 1.0]], [2.0, 7.0], masked=[1, 3, 4])
    loss, metrics = policy_loss(inputs, WIDE, Denominators(1, 2))
    assert loss.item() == pytest.approx(-2 * math.exp(0.3))
    assert metrics.means()["ratio/mean"] == pytest.approx(math.exp(0.3))
    assert metrics.means()["loss/policy"] == pytest.approx(-2 * math.exp(0.3))
    assert metrics.maxima()["ratio/max"] == pytest.approx(math.exp(0.3))


def test_the_narrow_clip_is_resolved_in_float32() -> None:
    # x = 5e-4 is above log(1.0004) = 3.9992e-4, x = 3e-4 is not; both at log-probabilities of float32.
    inputs = make_inputs([[5e-4] * 3, [3e-4] * 3], [1.0, 1.0], dtype=torch.float32)
    loss, metrics = policy_loss(inputs, NARROW, Denominators(2, 6))
    assert metrics.means()["ratio/clip_fraction_high"] == 0.5
    assert loss.item() == pytest.approx(-(1.0004 + math.exp(3e-4)) / 2, abs=1e-6)


def test_the_mean_over_thousands_of_tokens_is_resolved_in_float32() -> None:
    # 10,000 tokens of 1 + 2 x 3.9e-4, then as many of -1: the mean 3.9e-4 is inside, 4.1e-4 is not. A float32 sum near 10,000
    # moves in steps of 9.8e-4, so that each 1 + 7.8e-4 would count as 1 + 9.8e-4, and the mean as 4.9e-4: cut.
    half = 10_000
    for mean, cut in ((4.1e-4, 1.0), (3.9e-4, 0.0)):
        inputs = make_inputs([[1.0 + 2 * mean] * half + [-1.0] * half], [1.0], dtype=torch.float32)
        assert policy_loss(inputs, NARROW, counts(inputs))[1].means()["ratio/clip_fraction"] == cut


def test_the_router_shift_scales_the_ratio_by_its_geometric_mean() -> None:
    # log gamma = -0.2, -0.1, 0: s = e^0.3 x e^-0.1. Every token's gradient is -A s / 3: the factor is a constant.
    inputs = make_inputs([[0.1, 0.6, 0.2]], [2.0], log_router_shift=[-0.2, -0.1, 0.0])
    loss, metrics = policy_loss(inputs, WIDE, Denominators(1, 3))
    assert loss.item() == pytest.approx(-2 * math.exp(0.2))
    assert gradient(loss, inputs).tolist() == pytest.approx([-2 * math.exp(0.2) / 3] * 3)
    assert metrics.means()["ratio/mean"] == pytest.approx(math.exp(0.2))
    assert metrics.means()["router_shift/factor_mean"] == pytest.approx((math.exp(-0.2) + math.exp(-0.1) + 1) / 3)
    # before the clip: log s = 5e-4 - 3e-4 lies inside, 5e-4 does not
    narrow = make_inputs([[5e-4]], [1.0], log_router_shift=[-3e-4])
    assert policy_loss(narrow, NARROW, Denominators(1, 1))[1].means()["ratio/clip_fraction"] == 0
