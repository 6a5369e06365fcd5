"""The loss of a value model by hand, with values clipped either way, and what it explains."""

import math

import pytest
import torch
from torch import Tensor

from moe_rl.algorithms.value import explained_variance, value_loss
from moe_rl.metrics import Metrics

# value, old value, return; the clip is 0.2
#   1.0  0.5   2: error 1, clipped 0.7: 1.69, the larger: cut. Gradient 0.
#   1.0  0.5   0: error 1, clipped 0.7: 0.49. The plain error stands: the value has moved away. Gradient v - R = 1.
#   0.0  0.5  -1: error 1, clipped 0.3: 1.69: cut from below. Gradient 0.
#   0.0  0.5   1: error 1, clipped 0.3: 0.49. Stands. Gradient -1.
#   0.6  0.5   1: 0.16 either way. Gradient -0.4.
VALUES, OLD, RETURNS = [1.0, 1.0, 0.0, 0.0, 0.6], [0.5] * 5, [2.0, 0.0, -1.0, 1.0, 1.0]


def tensors(*columns: list[float]) -> list[Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in columns]


def loss_of(
    values: list[float],
    old: list[float],
    returns: list[float],
    clip: float | None,
    masked: tuple[int, ...] = (),
    tokens: int = 5,
) -> tuple[Tensor, Tensor, Metrics]:
    now, before, target = tensors(values, old, returns)
    mask = torch.ones(len(values), dtype=torch.bool)
    mask[list(masked)] = False
    loss, metrics = value_loss(now.requires_grad_(), before, target, mask, clip, tokens)
    return loss, torch.autograd.grad(loss, now)[0], metrics


def test_clipped_both_ways_by_hand() -> None:
    loss, gradient, metrics = loss_of(VALUES, OLD, RETURNS, 0.2)
    assert loss.item() == pytest.approx((1.69 + 1 + 1.69 + 1 + 0.16) / 2 / 5)
    assert gradient.tolist() == pytest.approx([0, 1 / 5, 0, -1 / 5, -0.4 / 5])
    means = metrics.means()
    assert means["critic/loss"] == pytest.approx(loss.item())
    assert means["critic/value_mean"] == pytest.approx(2.6 / 5)
    assert means["critic/clip_fraction"] == pytest.approx(2 / 5)


def test_without_a_clip_it_is_half_the_mean_squared_error() -> None:
    loss, gradient, metrics = loss_of(VALUES, OLD, RETURNS, None)
    assert loss.item() == pytest.approx(4.16 / 2 / 5)
    assert gradient.tolist() == pytest.approx([-1 / 5, 1 / 5, 1 / 5, -1 / 5, -0.4 / 5])
    assert metrics.means()["critic/clip_fraction"] == 0


def test_rounding_inside_the_range_is_no_clip() -> None:
    # old + (v - old) is v but for rounding, so many of these would seem cut
    generator = torch.Generator().manual_seed(0)
    old, values, returns = 0.02 * torch.randn(3, 1000, generator=generator)
    assert (values - old).abs().max() < 0.2
    assert int(((old + (values - old) - returns).square() > (values - returns).square()).sum()) > 20
    _, metrics = value_loss(values, old, returns, torch.ones(1000, dtype=torch.bool), 0.2, 1000)
    assert metrics.means()["critic/clip_fraction"] == 0


@pytest.mark.parametrize("junk", [math.inf, -math.inf, math.nan])
def test_masked_tokens_are_absent_whatever_they_hold(junk: float) -> None:
    values, old, returns = ([junk, *column, -junk] for column in (VALUES, OLD, RETURNS))
    loss, gradient, metrics = loss_of(values, old, returns, 0.2, masked=(0, 6))
    clean_loss, clean_gradient, clean = loss_of(VALUES, OLD, RETURNS, 0.2)
    assert loss.item() == clean_loss.item()
    assert gradient.tolist() == [0.0, *clean_gradient.tolist(), 0.0]
    assert metrics.means() == pytest.approx(clean.means())


def test_parts_sum_to_the_whole() -> None:
    """Case 21, for the value model: 5 tokens globally, in parts of 2, 3 and none."""
    whole, gradient, metrics = loss_of(VALUES, OLD, RETURNS, 0.2)
    parts = [loss_of(VALUES[part], OLD[part], RETURNS[part], 0.2, tokens=5) for part in (slice(0, 2), slice(2, 5), slice(5, 5))]
    assert sum(loss.item() for loss, _, _ in parts) == pytest.approx(whole.item())
    assert torch.cat([found for _, found, _ in parts]).tolist() == pytest.approx(gradient.tolist())
    merged = Metrics()
    for _, _, found in parts:
        merged.merge(found)
    assert merged.means() == pytest.approx(metrics.means())
    assert explained_variance(merged.means()) == pytest.approx(explained_variance(metrics.means()))


def test_explained_variance_by_hand() -> None:
    # Returns 2, 0, -1, 1, 1: mean 0.6, variance 7 / 5 - 0.36 = 1.04. R - v = 1, -1, -1, 1, 0.4: mean 0.08, variance 0.8256.
    # v: of the weights before the step's updates, whatever they say after.
    _, _, metrics = loss_of(OLD, VALUES, RETURNS, 0.2)
    assert explained_variance(metrics.means()) == pytest.approx({"critic/explained_variance": 1 - 0.8256 / 1.04})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([2.0, 0.0, -1.0, 1.0, 1.0], 1.0),
        ([5.0, 3.0, 2.0, 4.0, 4.0], 1.0),  # a constant offset leaves nothing unexplained
        ([0.7] * 5, 0.0),
        ([-2.0, 0.0, 1.0, -1.0, -1.0], -3.0),  # R - v = 2 R, of 4 times the variance
    ],
)
def test_explained_variance_at_its_marks(values: list[float], expected: float) -> None:
    _, _, metrics = loss_of(values, values, RETURNS, 0.2)
    assert explained_variance(metrics.means())["critic/explained_variance"] == pytest.approx(expected, abs=1e-12)


def test_explained_variance_is_left_out_where_there_is_none() -> None:
    assert explained_variance({}) == {}
    assert explained_variance(loss_of(VALUES, OLD, [0.3] * 5, 0.2)[2].means()) == {}


def test_finite_differences() -> None:
    values, old, returns = tensors(VALUES, OLD, RETURNS)
    mask = torch.tensor([True, True, True, False, True])
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, mask, 0.2, 4)[0], (values.requires_grad_(),))
