"""From terms to one number, and what weights, penalties and bonuses do to it, by hand."""

import math

import pytest
import torch

from moe_rl.algorithms.aggregation import aggregate
from moe_rl.algorithms.base import Denominators
from moe_rl.algorithms.loss import KLTerm, policy_loss
from moe_rl.algorithms.table import Aggregation
from tests.losses import LONGEST, counts, gradient, make_inputs, settings

TERMS = torch.tensor([1.0, 2.0, 30.0, 4.0, 50.0, 60.0, 7.0], dtype=torch.float64)
# Sequence 0: terms 1, 2 (30 is masked). Sequence 1: 4. Sequence 2: nothing unmasked. Sequence 3: 7.
SEQUENCES, MASKED = [[0.0] * 3, [0.0], [0.0] * 2, [0.0]], [2, 4, 5]


@pytest.mark.parametrize(
    ("kind", "value", "counted", "denominator"),
    [
        ("token_mean", 14.0, 4, 40),
        ("seq_mean_token_mean", 1.5 + 4 + 7, 3, 20),
        ("seq_mean_token_sum", 14.0, 3, 20),
        ("constant", 14.0 / 8, 3, 20),
    ],
)
def test_each_aggregation_of_tokens(kind: Aggregation, value: float, counted: int, denominator: int) -> None:
    inputs = make_inputs(SEQUENCES, [0.0] * 4, MASKED)
    total = aggregate(TERMS, inputs, kind, 8, Denominators(sequences=20, tokens=40))
    assert total.value.item() == pytest.approx(value)
    assert (int(total.counted), total.denominator) == (counted, denominator)


def test_terms_of_sequences() -> None:
    inputs = make_inputs(SEQUENCES, [0.0] * 4, MASKED)
    terms = torch.tensor([1.0, 2.0, math.nan, 4.0], dtype=torch.float64)
    total = aggregate(terms, inputs, "seq_mean_token_mean", 8, Denominators(20, 40), by_sequence=True)
    assert (total.value.item(), int(total.counted), total.denominator) == (7.0, 3, 20)


# Two sequences of 2 and 1 tokens: what a token's term is worth
SHARES = {
    "seq_mean_token_mean": [1 / 4, 1 / 4, 1 / 2],
    "token_mean": [1 / 3] * 3,
    "seq_mean_token_sum": [1 / 2] * 3,
    "constant": [1 / (2 * LONGEST)] * 3,
}


def weighed(kind: str, terms: list[float]) -> float:
    return sum(share * term for share, term in zip(SHARES[kind], terms, strict=True))


@pytest.mark.parametrize("kind", SHARES)
def test_a_weight_is_a_factor_and_a_weight_of_0_stays_in_the_denominator(kind: str) -> None:
    # Ratio 1, A = 2, -1; weights 0.5, 0 | 3: terms 1, 0 | -3
    inputs = make_inputs([[0.0, 0.0], [0.0]], [2.0, -1.0], weights=[0.5, 0.0, 3.0])
    loss, metrics = policy_loss(inputs, settings("grpo", aggregation=kind), Denominators(2, 3))
    assert loss.item() == pytest.approx(-weighed(kind, [1.0, 0.0, -3.0]))
    assert metrics.means()["loss/policy"] == pytest.approx(loss.item())
    slopes = [-share * term for share, term in zip(SHARES[kind], [1.0, 0.0, -3.0], strict=True)]
    assert gradient(loss, inputs).tolist() == pytest.approx(slopes)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_a_sequence_term_takes_the_weight_of_its_sequence(name: str) -> None:
    # A = 2, -1, 4; weights 0.5 | 0 | 3 of whole sequences: (1 + 0 + 12) / 3. The masked token's does not count.
    inputs = make_inputs([[0.0] * 3, [0.0], [0.0]], [2.0, -1.0, 4.0], [2], weights=[0.5, 0.5, 9.0, 0.0, 3.0])
    loss, _ = policy_loss(inputs, settings(name), Denominators(3, 4))
    assert loss.item() == pytest.approx(-13 / 3)
    assert gradient(loss, inputs).tolist() == pytest.approx([-1 / 6, -1 / 6, 0, 0, -12 / 3])


def test_a_weight_touches_neither_penalty_nor_bonus() -> None:
    inputs = make_inputs([[0.0]], [1.0], weights=[0.0], ref_logprobs=[-1.6], entropy=[2.0])
    loss, _ = policy_loss(inputs, settings("grpo", entropy_coefficient=0.1), Denominators(1, 1), KLTerm("k1", 0.5))
    assert loss.item() == pytest.approx(0.5 * 0.1 - 0.1 * 2.0)


def k3(d: float) -> float:
    return math.exp(-d) - 1 + d


D = [0.1, 0.3, -0.2]  # train - reference
PENALTIES = {
    "k1": (D, [1.0] * 3),
    "k2": ([d * d / 2 for d in D], D),
    "k3": ([k3(d) for d in D], [1 - math.exp(-d) for d in D]),
}


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("estimator", PENALTIES)
def test_a_kl_term_is_aggregated_like_the_objective(kind: str, estimator: str) -> None:
    values, slopes = PENALTIES[estimator]
    inputs = make_inputs([[0.0, 0.0], [0.0]], [2.0, -1.0], ref_logprobs=[-1.5 - d for d in D])
    kl = KLTerm(estimator, 0.4)  # pyright: ignore[reportArgumentType]
    loss, metrics = policy_loss(inputs, settings("grpo", aggregation=kind), Denominators(2, 3), kl)
    means = metrics.means()
    policy, penalty = -weighed(kind, [2.0, 2.0, -1.0]), 0.4 * weighed(kind, values)
    assert means["loss/policy"] == pytest.approx(policy)
    assert means["loss/kl"] == pytest.approx(penalty)
    assert means["loss/total"] == pytest.approx(policy + penalty)
    assert loss.item() == pytest.approx(policy + penalty)
    assert means["kl/ref"] == pytest.approx(sum(k3(d) for d in D) / 3)  # over tokens, by k3, whatever the loss uses
    expected = [
        share * (0.4 * slope - advantage)
        for share, slope, advantage in zip(SHARES[kind], slopes, [2.0, 2.0, -1.0], strict=True)
    ]
    assert gradient(loss, inputs).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo"])
def test_beside_a_sequence_ratio_the_kl_term_is_a_sequence_mean_of_token_means(name: str) -> None:
    # k2: (0.005 + 0.045) / 2 = 0.025 | 0.02, of mean 0.0225; a token mean would be 0.07 / 3. Times 0.4: 0.009.
    inputs = make_inputs([[0.0, 0.0], [0.0]], [2.0, -1.0], ref_logprobs=[-1.6, -1.8, -1.3])
    loss, metrics = policy_loss(inputs, settings(name), Denominators(2, 3), KLTerm("k2", 0.4))
    assert metrics.means()["loss/kl"] == pytest.approx(0.009)
    assert loss.item() == pytest.approx(-0.5 + 0.009)
    expected = [(-2 + 0.4 * 0.1) / 4, (-2 + 0.4 * 0.3) / 4, (1 - 0.4 * 0.2) / 2]
    assert gradient(loss, inputs).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", SHARES)
def test_an_entropy_bonus_is_aggregated_like_the_objective(kind: str) -> None:
    # A = 0, so the loss is -0.1 x the aggregated entropy, and its gradient reaches the entropy alone.
    inputs = make_inputs([[0.0, 0.0], [0.0]], [0.0, 0.0], entropy=[1.0, 2.0, 4.0])
    assert inputs.entropy is not None
    entropy = inputs.entropy.requires_grad_()
    given = settings("grpo", aggregation=kind, entropy_coefficient=0.1)
    loss, metrics = policy_loss(inputs, given, Denominators(2, 3))
    bonus = -0.1 * weighed(kind, [1.0, 2.0, 4.0])
    assert loss.item() == metrics.means()["loss/entropy"] == pytest.approx(bonus)
    assert torch.autograd.grad(loss, entropy)[0].tolist() == pytest.approx([-0.1 * share for share in SHARES[kind]])
    assert metrics.means()["entropy/mean"] == pytest.approx(7 / 3)  # over tokens


def test_without_a_bonus_entropy_is_only_shown() -> None:
    inputs = make_inputs([[0.0]], [0.0], entropy=[1.0])
    assert inputs.entropy is not None
    inputs.entropy.requires_grad_()
    loss, metrics = policy_loss(inputs, settings("grpo"), Denominators(1, 1))
    assert loss.item() == 0
    assert metrics.means()["entropy/mean"] == 1 and "loss/entropy" not in metrics.means()
    assert torch.autograd.grad(loss, inputs.entropy, allow_unused=True) == (None,)


def test_a_term_needs_its_inputs() -> None:
    inputs = make_inputs([[0.0]], [1.0])
    with pytest.raises(ValueError, match="ref_logprobs: none given, but there is a KL term; must be"):
        policy_loss(inputs, settings("grpo"), counts(inputs), KLTerm("k3", 0.1))
    with pytest.raises(ValueError, match="entropy: none given, but there is a bonus on it; must be"):
        policy_loss(inputs, settings("grpo", entropy_coefficient=0.1), counts(inputs))


def test_the_constant_is_the_longest_response_or_the_one_given() -> None:
    inputs = make_inputs([[0.0, 0.0]], [1.0])
    assert policy_loss(inputs, settings("dr_grpo"), counts(inputs))[0].item() == pytest.approx(-2 / LONGEST)
    given = settings("dr_grpo", aggregation_length=4)
    assert policy_loss(inputs, given, counts(inputs))[0].item() == pytest.approx(-2 / 4)
