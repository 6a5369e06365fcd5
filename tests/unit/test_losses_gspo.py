import math
from collections.abc import Callable

import pytest
import torch

from moe_rl.algorithms import ClipRange, Denominators, LossInputs
from moe_rl.algorithms.gspo import gspo_loss

MakeInputs = Callable[..., LossInputs]
CLIP = ClipRange(3e-4, 4e-4)
WIDE = ClipRange(0.9, 9.0)


def test_clipped_on_both_sides_for_both_signs_by_hand(make_inputs: MakeInputs) -> None:
    # Mean log-ratios 0.001, -0.001, -0.001, 0.001 (lengths 2, 1, 2, 3), A = 1, 1, -1, -1.
    # A = 1: s = 1.0010005 is cut at 1.0004; s = e^-0.001 is the minimum. A = -1: s = e^-0.001 is cut at 0.9997; e^0.001 stands.
    inputs = make_inputs([[0.003, -0.001], [-0.001], [0.0, -0.002], [0.002, 0.0, 0.001]], [1.0, 1.0, -1.0, -1.0])
    loss, metrics = gspo_loss(inputs, CLIP, Denominators(4, 8))
    expected = -(1.0004 + math.exp(-0.001) - 0.9997 - math.exp(0.001)) / 4
    assert loss.item() == pytest.approx(expected, abs=1e-12)

    # d loss / d train = -A s / (tokens of the sequence x 4 sequences) where not clipped, else exactly 0.
    loss.backward()
    assert inputs.train_logprobs.grad is not None
    gradient = inputs.train_logprobs.grad.tolist()
    assert gradient == pytest.approx([0, 0, -math.exp(-0.001) / 4, 0, 0] + [math.exp(0.001) / 12] * 3, abs=1e-12)
    assert gradient[:2] == gradient[3:5] == [0, 0]

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


def test_the_ratio_is_a_geometric_mean_and_not_a_mean_of_ratios(make_inputs: MakeInputs) -> None:
    # Token ratios 2 and 0.5: geometric mean 1, arithmetic mean 1.25. A = 1, so the loss is -1 (and -1.25 if wrong).
    inputs = make_inputs([[math.log(2.0), math.log(0.5)]], [1.0])
    loss, metrics = gspo_loss(inputs, WIDE, Denominators(1, 2))
    assert loss.item() == pytest.approx(-1.0)
    assert metrics.means()["ratio/mean"] == pytest.approx(1.0)
    # The gradient is the same for both tokens, -A s / 2; a mean of ratios would give -A r_t / 2 = -1 and -0.25.
    loss.backward()
    assert inputs.train_logprobs.grad is not None
    assert inputs.train_logprobs.grad.tolist() == pytest.approx([-0.5, -0.5])


def test_the_published_code_sample_is_another_quantity(make_inputs: MakeInputs) -> None:
    # An article's sample takes (logprobs - logprobs.detach()).exp().mean(): 1 at every policy, and a mean of ratios besides.
    # Here old and new differ by 0.7 a token: s = e^0.7.
    inputs = make_inputs([[0.7, 0.7, 0.7]], [1.0])
    sample = (inputs.train_logprobs - inputs.train_logprobs.detach()).exp().mean()
    assert sample.item() == 1.0
    loss, _ = gspo_loss(inputs, WIDE, Denominators(1, 3))
    assert -loss.item() == pytest.approx(math.exp(0.7))


@pytest.mark.parametrize("length", [1, 7, 1000])
def test_the_loss_does_not_scale_with_length(make_inputs: MakeInputs, length: int) -> None:
    # Every token's ratio is e^0.1, so s = e^0.1 at any length; one term a sequence. The gradient's sum is -s A.
    inputs = make_inputs([[0.1] * length], [3.0])
    loss, _ = gspo_loss(inputs, WIDE, Denominators(1, length))
    assert loss.item() == pytest.approx(-3 * math.exp(0.1))
    loss.backward()
    assert inputs.train_logprobs.grad is not None
    assert inputs.train_logprobs.grad.sum().item() == pytest.approx(-3 * math.exp(0.1))


def test_sequences_are_not_weighted_by_length(make_inputs: MakeInputs) -> None:
    # A = 1 over 9 tokens with s = 1, A = -1 over 1 token with s = e^0.5: (1 - e^0.5) / 2.
    # A [B, 1] loss times a [B, T] mask would give (9 - e^0.5) / 10.
    inputs = make_inputs([[0.0] * 9, [0.5]], [1.0, -1.0])
    loss, _ = gspo_loss(inputs, WIDE, Denominators(2, 10))
    assert loss.item() == pytest.approx(-(1 - math.exp(0.5)) / 2)


def test_masked_tokens_do_not_count_in_the_geometric_mean(make_inputs: MakeInputs) -> None:
    # Sequence 0 keeps log-ratios 0.2 and 0.4: s = e^0.3. Sequence 1 is masked away and is not counted: loss = -2 e^0.3.
    inputs = make_inputs([[0.2, 5.0, 0.4], [1.0, 1.0]], [2.0, 7.0], masked=[1, 3, 4])
    loss, metrics = gspo_loss(inputs, WIDE, Denominators(1, 2))
    assert loss.item() == pytest.approx(-2 * math.exp(0.3))
    assert metrics.means()["ratio/mean"] == pytest.approx(math.exp(0.3))
    assert metrics.means()["loss/policy"] == pytest.approx(-2 * math.exp(0.3))
    assert metrics.maxima()["ratio/max"] == pytest.approx(math.exp(0.3))


def test_the_narrow_clip_is_resolved_in_float32(make_inputs: MakeInputs) -> None:
    # x = 5e-4 is above log(1.0004) = 3.9992e-4, x = 3e-4 is not; both at log-probabilities of float32.
    inputs = make_inputs([[5e-4] * 3, [3e-4] * 3], [1.0, 1.0], dtype=torch.float32)
    loss, metrics = gspo_loss(inputs, CLIP, Denominators(2, 6))
    assert metrics.means()["ratio/clip_fraction_high"] == 0.5
    assert loss.item() == pytest.approx(-(1.0004 + math.exp(3e-4)) / 2, abs=1e-6)
