import math

import pytest
import torch
from torch import Tensor

from moe_rl.algorithms.kl import ESTIMATORS, k1, k2, k3, next_coefficient

# Two distributions over three tokens, by their logits; expectations are exact sums over the three tokens.
P_LOGITS = torch.tensor([0.3, -0.4, 1.1], dtype=torch.float64)
Q_LOGITS = torch.tensor([-0.2, 0.5, 0.9], dtype=torch.float64)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


def test_values_by_hand() -> None:
    d = torch.tensor([0.0, math.log(2.0), -math.log(2.0)], dtype=torch.float64)
    half_square = math.log(2.0) ** 2 / 2
    assert k1(d).tolist() == pytest.approx([0, math.log(2), -math.log(2)])
    assert k2(d).tolist() == pytest.approx([0, half_square, half_square])
    # e^-d - 1 + d: 1/2 - 1 + log 2; 2 - 1 - log 2
    assert k3(d).tolist() == pytest.approx([0, math.log(2) - 0.5, 1 - math.log(2)])


def test_k1_and_k3_estimate_kl_of_p_and_q_without_bias_and_k2_with_some() -> None:
    p, q = P_LOGITS.log_softmax(0), Q_LOGITS.log_softmax(0)
    exact = kl(p, q).item()
    means = {name: (p.exp() * estimate(p - q)).sum().item() for name, estimate in ESTIMATORS.items()}
    assert means["k1"] == pytest.approx(exact, abs=1e-12)
    assert means["k3"] == pytest.approx(exact, abs=1e-12)
    assert abs(means["k2"] - exact) > 1e-4
    assert means["k2"] == pytest.approx(exact, rel=0.2)
    assert kl(q, p).item() != pytest.approx(exact, rel=0.01)  # the direction matters in this example


def test_expected_gradients_are_those_the_docstring_names() -> None:
    # The tokens are drawn from p, whose probabilities carry no gradient; the estimate does, through log p(x).
    logits = P_LOGITS.clone().requires_grad_()
    p, q = logits.log_softmax(0), Q_LOGITS.log_softmax(0)
    gradients = {
        name: torch.autograd.grad((p.detach().exp() * estimate(p - q)).sum(), logits, retain_graph=True)[0]
        for name, estimate in ESTIMATORS.items()
    }
    of_p_q = torch.autograd.grad(kl(p, q), logits, retain_graph=True)[0]
    of_q_p = torch.autograd.grad(kl(q, p), logits, retain_graph=True)[0]
    assert torch.allclose(gradients["k1"], torch.zeros(3, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(gradients["k2"], of_p_q, atol=1e-12)
    assert torch.allclose(gradients["k3"], of_q_p, atol=1e-12)
    assert (of_p_q - of_q_p).abs().max() > 0.01


def test_k3_far_out_is_finite_and_never_pushes_away() -> None:
    # d = log p - log q. Below -20 the gradient is 0; were only the exponent bounded it would be +1, and p would fall further.
    d = torch.tensor([-1e4, -200.0, -21.0, 200.0, 1e4], requires_grad=True)
    values = k3(d)
    (gradient,) = torch.autograd.grad(values.sum(), d)
    assert values.tolist() == pytest.approx([math.exp(20) - 21] * 3 + [199.0, 9999.0])
    assert gradient.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    inside = torch.tensor([-19.0], requires_grad=True)
    assert torch.autograd.grad(k3(inside).sum(), inside)[0].item() == pytest.approx(1 - math.exp(19))


def test_k3_of_a_tiny_difference_keeps_its_digits() -> None:
    # d^2 / 2 = 5e-13; exp(-d) - 1 + d as written would be a few multiples of 1e-16
    assert k3(torch.tensor([1e-6], dtype=torch.float64)).item() == pytest.approx(5e-13, rel=1e-6, abs=0)


@pytest.mark.parametrize(
    ("mean_kl", "sequences", "expected"),
    [
        (0.11, 100, 0.5 * (1 + 0.1 * 0.1)),  # error 0.1 over a tenth of the horizon
        (0.09, 100, 0.5 * (1 - 0.1 * 0.1)),
        (0.1, 100, 0.5),  # on target
        (5.0, 100, 0.5 * (1 + 0.2 * 0.1)),  # error 49 clipped to 0.2
        (-3.0, 100, 0.5 * (1 - 0.2 * 0.1)),  # error -31 clipped to -0.2
        (5.0, 50_000, 0.5 * 1.2),  # a step of 50 horizons counts as one
        (0.0, 50_000, 0.5 * 0.8),  # and never turns the coefficient negative
    ],
)
def test_next_coefficient_by_hand(mean_kl: float, sequences: int, expected: float) -> None:
    assert next_coefficient(0.5, mean_kl, target=0.1, horizon=1000.0, sequences=sequences) == pytest.approx(expected)
