"""GSPO-token by hand, and against GSPO (arXiv 2507.18071, section 4.3, eq. 13 and 14)."""

import math

import pytest
import torch

from moe_rl.algorithms.base import Denominators
from moe_rl.algorithms.loss import LossSettings, policy_loss
from tests.losses import changed, counts, full_inputs, gradient, make_inputs, mild, settings

WIDE = {"clip_low": 0.9, "clip_high": 9.0}


def test_the_sequence_ratio_for_every_token_and_an_advantage_for_each() -> None:
    # Mean log-ratio 0.1 (0.3, -0.1), A = 2, -1: (2 - 1) e^0.1 / 2; token ratios of their own would give (2 e^0.3 - e^-0.1) / 2.
    # d loss / d train = -A_t s / 2 of each token.
    inputs = make_inputs([[0.3, -0.1]], [[2.0, -1.0]])
    loss, metrics = policy_loss(inputs, settings("gspo_token", **WIDE), Denominators(1, 2))
    assert loss.item() == pytest.approx(-math.exp(0.1) / 2)
    assert gradient(loss, inputs).tolist() == pytest.approx([-math.exp(0.1), math.exp(0.1) / 2])
    assert metrics.means()["ratio/mean"] == pytest.approx(math.exp(0.1))


def test_the_clip_is_decided_for_each_advantage() -> None:
    # s = e^0.1 = 1.105 and e^-0.1 = 0.905, range [0.95, 1.05]. Sequence 0: 2.1 (cut), -e^0.1.
    # Sequence 1: 2 e^-0.1, -0.95 (cut).
    inputs = make_inputs([[0.3, -0.1], [-0.3, 0.1]], [[2.0, -1.0]] * 2)
    loss, metrics = policy_loss(inputs, settings("gspo_token", clip_low=0.05, clip_high=0.05), Denominators(2, 4))
    assert loss.item() == pytest.approx(-((2.1 - math.exp(0.1)) / 2 + (2 * math.exp(-0.1) - 0.95) / 2) / 2)
    found = gradient(loss, inputs).tolist()
    assert found == pytest.approx([0, math.exp(0.1) / 4, -2 * math.exp(-0.1) / 4, 0])
    means = metrics.means()
    assert means["ratio/clip_fraction_low"] == means["ratio/clip_fraction_high"] == pytest.approx(1 / 4)  # of tokens


def decisions(given: LossSettings, advantages: list[float], log_ratios: list[list[float]]) -> list[tuple[float, float]]:
    """(cut low, cut high) of each sequence alone."""
    found = []
    for ratios, advantage in zip(log_ratios, advantages, strict=True):
        inputs = make_inputs([ratios], [advantage])
        means = policy_loss(inputs, given, counts(inputs))[1].means()
        found.append((means["ratio/clip_fraction_low"], means["ratio/clip_fraction_high"]))
    return found


def test_equal_advantages_make_it_gspo_in_value_gradient_and_clip_decisions() -> None:
    """Off ratio 1, with masked tokens, router shift, weights of whole sequences, a KL term: everything but token weights."""
    inputs = full_inputs()
    inputs = changed(inputs, weights=torch.tensor([1.0, 0.5, 0.0, 2.0, 1.5], dtype=torch.float64)[inputs.sequence])
    results = {name: policy_loss(inputs, mild(name), Denominators(4, 9)) for name in ("gspo", "gspo_token")}
    (gspo, gspo_metrics), (token, token_metrics) = results["gspo"], results["gspo_token"]
    assert token.item() == pytest.approx(gspo.item(), abs=1e-14)
    assert torch.allclose(gradient(token, inputs), gradient(gspo, inputs), atol=1e-14, rtol=0)
    assert token_metrics.means()["loss/policy"] == pytest.approx(gspo_metrics.means()["loss/policy"], abs=1e-14)

    advantages = [1.0, 1.0, -1.0, -1.0, 1.0, 0.0]
    log_ratios = [[0.2, 0.1], [-0.2, 0.0], [-0.3, 0.1, -0.1], [0.4, 0.0], [0.05, 0.05], [0.5]]
    cut = decisions(mild("gspo"), advantages, log_ratios)
    assert cut == [(0, 1), (0, 0), (1, 0), (0, 0), (0, 0), (0, 0)]
    assert decisions(mild("gspo_token"), advantages, log_ratios) == cut


def test_unequal_advantages_make_it_another_loss() -> None:
    # A = 3, -1 of mean 1, s = e^0.2 beyond 1.08. GSPO: cut at 1.08, no gradient. GSPO-token: (3 x 1.08 - e^0.2) / 2, and the
    # second token keeps its gradient.
    inputs = make_inputs([[0.3, 0.1]], [[3.0, -1.0]])
    gspo, _ = policy_loss(inputs, mild("gspo"), Denominators(1, 2))
    token, _ = policy_loss(inputs, mild("gspo_token"), Denominators(1, 2))
    assert gspo.item() == pytest.approx(-1.08)
    assert token.item() == pytest.approx(-(3 * 1.08 - math.exp(0.2)) / 2)
    assert gradient(gspo, inputs).tolist() == [0, 0]
    assert gradient(token, inputs).tolist() == pytest.approx([0, math.exp(0.2) / 2])


def test_weights_are_those_of_tokens() -> None:
    # Ratio 1, A = 1, weights 0.5 and 0: 0.5 / 2; the weight of 0 stays in the denominator.
    inputs = make_inputs([[0.0, 0.0]], [1.0], weights=[0.5, 0.0])
    loss, _ = policy_loss(inputs, settings("gspo_token"), Denominators(1, 2))
    assert loss.item() == pytest.approx(-0.25)
    assert gradient(loss, inputs).tolist() == pytest.approx([-0.25, 0])
