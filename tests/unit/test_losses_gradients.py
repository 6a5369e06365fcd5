"""Gradients of every algorithm: against finite differences, and the plain policy gradient at ratio 1."""

import math

import pytest
import torch
from torch import Tensor

from moe_rl.algorithms.base import Denominators, LossInputs
from moe_rl.algorithms.loss import KLTerm, policy_loss
from moe_rl.algorithms.table import ALGORITHMS, SEQUENCE_OBJECTIVES
from tests.losses import EVERY, LONGEST, changed, full_inputs, gradient, make_inputs, mild, settings

BY_SEQUENCE = [name for name, spec in ALGORITHMS.items() if spec.objective in SEQUENCE_OBJECTIVES]
# Their gradient is not that of their value: a factor is held fixed
STOPPED = ("cispo", "gspo_token")
SMOOTH = [(name, kind) for name, kind in EVERY if name not in STOPPED]
GLOBAL = Denominators(4, 9)


@pytest.mark.parametrize(("name", "kind"), SMOOTH)
def test_gradient_against_finite_differences(name: str, kind: str) -> None:
    inputs = full_inputs(by_token=name not in BY_SEQUENCE)
    given = mild(name, aggregation=kind)

    def loss(train: Tensor) -> Tensor:
        return policy_loss(changed(inputs, train_logprobs=train), given, GLOBAL)[0]

    assert torch.autograd.gradcheck(loss, (inputs.train_logprobs,), eps=1e-7, atol=1e-7)
    assert gradient(policy_loss(inputs, given, GLOBAL)[0], inputs).abs().max() > 1e-3
    if name != "sapo":
        means = policy_loss(inputs, given, GLOBAL)[1].means()
        assert means["ratio/clip_fraction_low"] > 0 and means["ratio/clip_fraction_high"] > 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kind", ALGORITHMS["grpo"].aggregations)
def test_gradient_of_the_kl_term_and_the_bonus_against_finite_differences(estimator: str, kind: str) -> None:
    inputs, kl = full_inputs(), KLTerm(estimator, 0.5)  # pyright: ignore[reportArgumentType]
    given = mild("grpo", aggregation=kind, entropy_coefficient=0.3)
    assert inputs.entropy is not None

    def loss(train: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(changed(inputs, train_logprobs=train, entropy=entropy), given, GLOBAL, kl)[0]

    assert torch.autograd.gradcheck(loss, (inputs.train_logprobs, inputs.entropy.requires_grad_()), eps=1e-7, atol=1e-7)


def aggregated(terms: list[float], inputs: LossInputs, kind: str) -> float:
    """One microbatch that is the whole minibatch, token by token."""
    sequence, mask, total = inputs.sequence.tolist(), inputs.mask.tolist(), 0.0
    sizes = [sum(m for s, m in zip(sequence, mask, strict=True) if s == i) for i in range(inputs.sequences)]
    sequences, tokens = sum(size > 0 for size in sizes), sum(sizes)
    for term, s, counted in zip(terms, sequence, mask, strict=True):
        shares = {
            "seq_mean_token_mean": 1 / max(sizes[s], 1) / sequences,
            "token_mean": 1 / tokens,
            "seq_mean_token_sum": 1 / sequences,
            "constant": 1 / LONGEST / sequences,
        }
        total += shares[kind] * term if counted else 0.0
    return total


def cispo_surrogate(inputs: LossInputs, kind: str, train: list[float]) -> float:
    """-aggregate of c A log pi, c the clipped ratio at the point where the gradient is taken."""
    here, old = inputs.train_logprobs.tolist(), inputs.old_logprobs.tolist()
    assert inputs.weights is not None and inputs.log_router_shift is not None
    shift, weights, advantages = inputs.log_router_shift.tolist(), inputs.weights.tolist(), inputs.advantages.tolist()
    ratios = [math.exp(a - b + c) for a, b, c in zip(here, old, shift, strict=True)]
    terms = [min(max(r, 0.95), 1.08) * a * w * x for r, a, w, x in zip(ratios, advantages, weights, train, strict=True)]
    return -aggregated(terms, inputs, kind)


def gspo_token_surrogate(inputs: LossInputs, kind: str, train: list[float]) -> float:
    """-aggregate of min(s_t A, clip(s_t) A), s_t = s pi_t / pi_t(here), s of the point where the gradient is taken."""
    here, old, mask = inputs.train_logprobs.tolist(), inputs.old_logprobs.tolist(), inputs.mask.tolist()
    assert inputs.weights is not None and inputs.log_router_shift is not None
    shift, weights, advantages = inputs.log_router_shift.tolist(), inputs.weights.tolist(), inputs.advantages.tolist()
    terms = []
    for t, s in enumerate(inputs.sequence.tolist()):
        own = [i for i, j in enumerate(inputs.sequence.tolist()) if j == s and mask[i]]
        mean = sum(here[i] - old[i] + shift[i] for i in own) / max(len(own), 1)
        ratio = math.exp(mean + train[t] - here[t])
        terms.append(weights[t] * min(ratio * advantages[t], min(max(ratio, 0.95), 1.08) * advantages[t]))
    return -aggregated(terms, inputs, kind)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind in EVERY if name in STOPPED])
def test_gradient_is_that_of_the_surrogate_with_the_stopped_factor_frozen(name: str, kind: str) -> None:
    inputs = full_inputs(by_token=True)
    surrogate = {"cispo": cispo_surrogate, "gspo_token": gspo_token_surrogate}[name]
    loss, metrics = policy_loss(inputs, mild(name, aggregation=kind), GLOBAL)
    here, step = inputs.train_logprobs.tolist(), 1e-6
    assert loss.item() == pytest.approx(surrogate(inputs, kind, here), abs=1e-13)
    differences = []
    for t in range(len(here)):
        up, down = ([x + sign * step * (i == t) for i, x in enumerate(here)] for sign in (1, -1))
        differences.append((surrogate(inputs, kind, up) - surrogate(inputs, kind, down)) / (2 * step))
    assert gradient(loss, inputs).tolist() == pytest.approx(differences, abs=1e-9)
    assert metrics.means()["ratio/clip_fraction_low"] > 0 and metrics.means()["ratio/clip_fraction_high"] > 0


# Lengths 3 (one masked), 1 and 4: what a token's advantage is worth
PLAIN = {
    "seq_mean_token_mean": [1 / 6, 0, 1 / 6, 1 / 3, *[1 / 12] * 4],
    "token_mean": [1 / 7, 0, *[1 / 7] * 6],
    "seq_mean_token_sum": [1 / 3, 0, *[1 / 3] * 6],
    "constant": [1 / (3 * LONGEST), 0, *[1 / (3 * LONGEST)] * 6],
}


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_at_ratio_one_it_is_the_plain_policy_gradient(name: str, kind: str) -> None:
    """-A times the token's share of the aggregation, with the algorithm's own clip range."""
    of_tokens = [[1.5] * 3, [-0.5], [2.0] * 4] if name in BY_SEQUENCE else [[1.5, 9.0, 0.3], [-0.5], [2.0, -1.0, 0.0, 0.7]]
    inputs = make_inputs([[0.0] * 3, [0.0], [0.0] * 4], of_tokens, masked=[1])
    loss, _ = policy_loss(inputs, settings(name, aggregation=kind), Denominators(3, 7))
    flat = [value for values in of_tokens for value in values]
    expected = [-advantage * share for advantage, share in zip(flat, PLAIN[kind], strict=True)]
    assert gradient(loss, inputs).tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("name", BY_SEQUENCE)
def test_a_sequence_term_takes_the_mean_of_its_advantages(name: str) -> None:
    # 3, -1 of mean 1: each token's gradient at ratio 1 is -1 / 2
    inputs = make_inputs([[0.0, 0.0]], [[3.0, -1.0]])
    assert gradient(policy_loss(inputs, settings(name), Denominators(1, 2))[0], inputs).tolist() == pytest.approx([-0.5, -0.5])
