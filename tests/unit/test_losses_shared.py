"""What holds for every loss of the table alike."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from moe_rl.algorithms import (
    ALGORITHMS,
    Algorithm,
    ClipRange,
    Denominators,
    KLTerm,
    LossInputs,
)
from moe_rl.algorithms.base import Estimator
from moe_rl.metrics import Metrics

MakeInputs = Callable[..., LossInputs]
INF = float("inf")
MILD = ClipRange(0.05, 0.08)
LOG_RATIOS = [[0.01, -0.02, 0.03], [0.2, 0.1], [-0.3], [-0.2, 0.1, 0.0, -0.3], [0.02, 0.5]]
ADVANTAGES = [1.0, 0.7, -2.0, -0.5, 0.0]
REFERENCE = [-1.4, -1.7, -1.5, -0.9, -2.0, -1.1, -1.6, -1.5, -1.2, -3.0, -1.3, -1.4]

every_loss = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)


def gradient(loss: Tensor, inputs: LossInputs) -> Tensor:
    return torch.autograd.grad(loss, inputs.train_logprobs)[0]


def select(inputs: LossInputs, sequences: Sequence[int]) -> LossInputs:
    """A microbatch of these sequences, renumbered, in this order."""
    places = torch.cat([(inputs.sequence == s).nonzero()[:, 0] for s in sequences]) if sequences else torch.zeros(0).long()
    numbers = {old: new for new, old in enumerate(sequences)}
    renumbered = torch.tensor([numbers[int(s)] for s in inputs.sequence[places]], dtype=torch.int64)
    chosen = {
        field.name: value[list(sequences) if field.name == "advantages" else places]
        for field in dataclasses.fields(inputs)
        if (value := getattr(inputs, field.name)) is not None
    }
    return LossInputs(**{**chosen, "sequence": renumbered})


def full_inputs(make_inputs: MakeInputs, masked: Sequence[int] = (1, 5, 7)) -> LossInputs:
    """Five sequences of unequal length; sequence 2 (token 5) is masked away. All optional inputs are there."""
    return make_inputs(
        LOG_RATIOS,
        ADVANTAGES,
        masked=masked,
        ref_logprobs=REFERENCE,
        rollout_logprobs=[-1.5 + 0.01 * i for i in range(12)],
        entropy=[0.1 * i for i in range(12)],
    )


@every_loss
def test_microbatches_and_ranks_sum_to_the_whole(algorithm: Algorithm, make_inputs: MakeInputs) -> None:
    inputs, denominators, kl = full_inputs(make_inputs), Denominators(4, 9), KLTerm("k3", 0.3)
    whole, whole_metrics = algorithm.loss(inputs, MILD, denominators, kl)
    whole_gradient = gradient(whole, inputs)
    for split in ([[0, 1], [2, 3, 4]], [[0], [1], [2], [3], [4]], [[0, 1, 2, 3, 4], []]):
        results = [algorithm.loss(select(inputs, part), MILD, denominators, kl) for part in split]
        total = torch.stack([loss for loss, _ in results]).sum()
        assert total.item() == pytest.approx(whole.item(), abs=1e-12)
        assert torch.allclose(gradient(total, inputs), whole_gradient, atol=1e-12, rtol=0)
        merged = Metrics()
        for _, metrics in results:
            merged.merge(metrics)
        assert merged.means() == pytest.approx(whole_metrics.means(), abs=1e-12)
        assert merged.maxima() == pytest.approx(whole_metrics.maxima(), abs=1e-12)
        assert merged.means()["loss/total"] == pytest.approx(whole.item(), abs=1e-12)


@every_loss
def test_response_and_token_order_do_not_matter(algorithm: Algorithm, make_inputs: MakeInputs) -> None:
    inputs, denominators, kl = full_inputs(make_inputs), Denominators(4, 9), KLTerm("k2", 0.3)
    whole, metrics = algorithm.loss(inputs, MILD, denominators, kl)
    shuffled = select(inputs, [3, 0, 4, 2, 1])
    backwards = {
        field.name: value if field.name == "advantages" else value.flip(0)
        for field in dataclasses.fields(shuffled)
        if (value := getattr(shuffled, field.name)) is not None
    }
    other, other_metrics = algorithm.loss(LossInputs(**backwards), MILD, denominators, kl)
    assert other.item() == pytest.approx(whole.item(), abs=1e-12)
    assert torch.allclose(gradient(other, inputs), gradient(whole, inputs), atol=1e-12, rtol=0)
    assert other_metrics.means() == pytest.approx(metrics.means(), abs=1e-12)


@every_loss
@pytest.mark.parametrize("kl", [None, KLTerm("k1", 0.5), KLTerm("k2", 0.5), KLTerm("k3", 0.5)], ids=["none", "k1", "k2", "k3"])
def test_gradient_against_finite_differences(algorithm: Algorithm, make_inputs: MakeInputs, kl: KLTerm | None) -> None:
    inputs = full_inputs(make_inputs)

    def loss(train: Tensor) -> Tensor:
        return algorithm.loss(dataclasses.replace(inputs, train_logprobs=train), MILD, Denominators(4, 9), kl)[0]

    assert torch.autograd.gradcheck(loss, (inputs.train_logprobs,), eps=1e-7, atol=1e-6)
    clipped = algorithm.loss(inputs, MILD, Denominators(4, 9))[1].means()
    assert clipped["ratio/clip_fraction_low"] > 0 and clipped["ratio/clip_fraction_high"] > 0


@every_loss
def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(algorithm: Algorithm, make_inputs: MakeInputs) -> None:
    # -(1 / N) sum over sequences of A x mean over tokens of log pi
    inputs = make_inputs([[0.0] * 3, [0.0], [0.0] * 4], [1.5, -0.5, 2.0], masked=[1])
    loss, _ = algorithm.loss(inputs, ClipRange(algorithm.clip_low, algorithm.clip_high), Denominators(3, 7))
    expected = [-1.5 / (2 * 3), 0, -1.5 / (2 * 3), 0.5 / 3] + [-2.0 / (4 * 3)] * 4
    assert gradient(loss, inputs).tolist() == pytest.approx(expected, abs=1e-15)


@every_loss
@pytest.mark.parametrize("junk", [INF, -INF, float("nan"), 1e30])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_masked_tokens_are_absent_whatever_they_hold(
    algorithm: Algorithm, make_inputs: MakeInputs, junk: float, estimator: Estimator
) -> None:
    inputs, kl, denominators = full_inputs(make_inputs), KLTerm(estimator, 0.3), Denominators(4, 9)
    clean, clean_metrics = algorithm.loss(inputs, MILD, denominators, kl)
    clean_gradient = gradient(clean, inputs)
    spoilt: dict[str, Tensor] = {}
    for name in ("train_logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy"):
        for value in (junk, -junk):  # differences of one sign and of the other
            spoilt[name] = torch.where(inputs.mask, getattr(inputs, name).detach(), value)
            if name == "train_logprobs":
                spoilt[name].requires_grad_()
            dirty_inputs = dataclasses.replace(inputs, **spoilt)
            dirty, metrics = algorithm.loss(dirty_inputs, MILD, denominators, kl)
            assert dirty.item() == clean.item()
            dirty_gradient = gradient(dirty, dirty_inputs)
            assert dirty_gradient[~inputs.mask].tolist() == [0.0] * 3
            assert torch.equal(dirty_gradient, clean_gradient)
            assert metrics.means() == clean_metrics.means() and metrics.maxima() == clean_metrics.maxima()


@every_loss
@pytest.mark.parametrize("size", [200.0, 1e4])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_huge_log_ratios_stay_finite(algorithm: Algorithm, make_inputs: MakeInputs, size: float, estimator: Estimator) -> None:
    log_ratios = [[sign * size] * 2 for sign in (1, -1) for _ in range(3)]
    reference = [-1.5 + sign * size for sign in (1, -1)] * 6
    inputs = make_inputs(log_ratios, [1.0, -1.0, 0.0] * 2, dtype=torch.float32, ref_logprobs=reference)
    loss, metrics = algorithm.loss(inputs, MILD, Denominators(6, 12), KLTerm(estimator, 0.1))
    assert math.isfinite(loss.item())
    assert gradient(loss, inputs).isfinite().all()
    assert all(math.isfinite(value) for value in [*metrics.means().values(), *metrics.maxima().values()])


@every_loss
def test_huge_ratios_have_the_documented_values(algorithm: Algorithm, make_inputs: MakeInputs) -> None:
    # Log-ratio 200. A = 1: clipped, 1.08. A = -1: r A with log r bounded by 20, gradient 0.  Log-ratio -200. A = 1: e^-200.
    # A = -1: clipped, 0.95 x -1.
    high, low = [(200, 1, 1.08), (200, -1, -math.exp(20))], [(-200, 1, math.exp(-200)), (-200, -1, -0.95)]
    for log_ratio, advantage, objective in high + low:
        inputs = make_inputs([[float(log_ratio)]], [float(advantage)])
        loss, metrics = algorithm.loss(inputs, MILD, Denominators(1, 1))
        assert loss.item() == pytest.approx(-objective, rel=1e-12)
        assert gradient(loss, inputs).item() == pytest.approx(0, abs=1e-80)
        assert metrics.maxima()["ratio/max"] == pytest.approx(math.exp(min(log_ratio, 20)))
    # Inside the bound a negative advantage keeps its whole gradient: A = -1, log-ratio 10: d loss / d train = e^10.
    inputs = make_inputs([[10.0]], [-1.0])
    assert gradient(algorithm.loss(inputs, MILD, Denominators(1, 1))[0], inputs).item() == pytest.approx(math.exp(10))


@every_loss
def test_a_zero_advantage_gives_no_gradient_and_is_not_clipped(algorithm: Algorithm, make_inputs: MakeInputs) -> None:
    inputs = make_inputs([[1.0, 1.0], [-1.0]], [0.0, 0.0])
    loss, metrics = algorithm.loss(inputs, MILD, Denominators(2, 3))
    assert loss.item() == 0
    assert gradient(loss, inputs).tolist() == [0, 0, 0]
    assert metrics.means()["ratio/clip_fraction"] == 0
    assert metrics.means()["ratio/log_abs_mean"] == pytest.approx(1.0)


@every_loss
@pytest.mark.parametrize("sequences", [0, 3], ids=["no sequences", "sequences without tokens"])
def test_a_rank_with_nothing_left(algorithm: Algorithm, make_inputs: MakeInputs, sequences: int) -> None:
    full, kl = full_inputs(make_inputs), KLTerm("k3", 0.1)
    nothing = make_inputs([[]] * sequences, [1.0] * sequences, ref_logprobs=[], rollout_logprobs=[], entropy=[])
    for denominators in (Denominators(4, 9), Denominators(0, 0)):
        loss, metrics = algorithm.loss(nothing, MILD, denominators, kl)
        assert loss.item() == 0
        assert gradient(loss, nothing).shape == (0,)
        filled = algorithm.loss(full, MILD, Denominators(4, 9), kl)[1]
        assert [len(vector) for vector in metrics.vector()] == [len(vector) for vector in filled.vector()]
        before = filled.means() | filled.maxima()
        filled.merge(metrics)
        assert filled.means() | filled.maxima() == before


@every_loss
def test_everything_masked_is_zero_and_counts_nothing(algorithm: Algorithm, make_inputs: MakeInputs) -> None:
    inputs = full_inputs(make_inputs, masked=range(12))
    loss, metrics = algorithm.loss(inputs, MILD, Denominators(0, 0), KLTerm("k3", 0.1))
    assert loss.item() == 0
    assert gradient(loss, inputs).tolist() == [0.0] * 12
    assert (metrics.means(), metrics.maxima()) == ({}, {})


@every_loss
def test_the_kl_term_is_a_sequence_mean_of_token_means(algorithm: Algorithm, make_inputs: MakeInputs) -> None:
    # Ratio 1, so loss/policy = -(2 - 1) / 2 = -0.5. train - ref = 0.1, 0.3 | -0.2: k2 = (0.005 + 0.045) / 2 = 0.025 | 0.02.
    # KL = (0.025 + 0.02) / 2 = 0.0225; a token mean would be 0.07 / 3. With coefficient 0.4: loss/kl = 0.009.
    inputs = make_inputs([[0.0, 0.0], [0.0]], [2.0, -1.0], ref_logprobs=[-1.6, -1.8, -1.3])
    loss, metrics = algorithm.loss(inputs, MILD, Denominators(2, 3), KLTerm("k2", 0.4))
    means = metrics.means()
    assert means["loss/policy"] == pytest.approx(-0.5)
    assert means["loss/kl"] == pytest.approx(0.009)
    assert means["loss/total"] == pytest.approx(-0.491)
    assert loss.item() == pytest.approx(-0.491)
    # kl/ref is k3 over tokens: e^-d - 1 + d
    assert means["kl/ref"] == pytest.approx(sum(math.exp(-d) - 1 + d for d in (0.1, 0.3, -0.2)) / 3)
    # d loss / d train = -A / (n N) + 0.4 d / (n N)
    expected = [(-2 + 0.4 * 0.1) / 4, (-2 + 0.4 * 0.3) / 4, (1 - 0.4 * 0.2) / 2]
    assert gradient(loss, inputs).tolist() == pytest.approx(expected, abs=1e-12)


@every_loss
def test_token_metrics_by_hand(algorithm: Algorithm, make_inputs: MakeInputs) -> None:
    # Token 1 is masked. |old - rollout| = 0.1, 0.3 | entropy 1, 3.
    inputs = make_inputs(
        [[0.0, 0.0], [0.0]], [1.0, 1.0], masked=[1], rollout_logprobs=[-1.6, -9.0, -1.2], entropy=[1.0, 50.0, 3.0]
    )
    metrics = algorithm.loss(inputs, MILD, Denominators(2, 2))[1]
    means = metrics.means()
    assert means["rollout/logprob_gap_mean"] == pytest.approx(0.2)
    assert metrics.maxima()["rollout/logprob_gap_max"] == pytest.approx(0.3)
    assert means["entropy/mean"] == pytest.approx(2.0)
    assert means["kl/old_new"] == 0
    assert "loss/kl" not in means and "kl/ref" not in means


@every_loss
def test_only_the_trained_policy_gets_gradient(algorithm: Algorithm, make_inputs: MakeInputs) -> None:
    inputs = full_inputs(make_inputs)
    others = [inputs.old_logprobs, inputs.ref_logprobs, inputs.rollout_logprobs, inputs.advantages, inputs.entropy]
    leaves = [other.requires_grad_() for other in others if other is not None]
    loss, _ = algorithm.loss(inputs, MILD, Denominators(4, 9), KLTerm("k3", 0.3))
    assert torch.autograd.grad(loss, leaves, allow_unused=True) == (None,) * 5


@every_loss
def test_a_kl_term_needs_its_reference(algorithm: Algorithm, make_inputs: MakeInputs) -> None:
    with pytest.raises(ValueError, match="ref_logprobs: none given"):
        algorithm.loss(make_inputs([[0.0]], [1.0]), MILD, Denominators(1, 1), KLTerm("k3", 0.1))
