"""Gate distributions, their divergence and shift, and margins, of routers whose scores are chosen by hand."""

import math

import pytest
import torch
from torch import Tensor

from moe_rl.drift.metrics import flipped, gate_log_distribution, gate_shift, margin, router_kl

LN2 = math.log(2)
# One token, one layer, four experts. P and Q in powers of two, so that logarithms are multiples of log 2.
P, Q = torch.tensor([[[1 / 2, 1 / 4, 1 / 8, 1 / 8]]]), torch.tensor([[[1 / 8, 1 / 2, 1 / 4, 1 / 8]]])
# log P / Q in units of log 2: 2, -1, -1, 0
KL = 1 / 2 * 2 - 1 / 4 - 1 / 8  # 0.625
KL_BACK = -1 / 8 * 2 + 1 / 2 + 1 / 4  # 0.5


def test_logits_become_a_softmax_that_a_shift_does_not_change() -> None:
    for shift in (0.0, 100.0, -100.0):
        log_p = gate_log_distribution(P.log() + shift, "logits")
        torch.testing.assert_close(log_p, P.log(), atol=1e-5, rtol=0)


def test_probabilities_are_taken_as_they_are() -> None:
    torch.testing.assert_close(gate_log_distribution(P, "probabilities"), P.log())


def test_sigmoids_are_normalised_without_the_expert_bias() -> None:
    """Scores 3/5 P with biases that turn the order round; two layers with biases of their own."""
    bias = torch.tensor([[-2.0, 0.0, 0.0, 3.0], [1.0, 0.0, -0.5, 0.0]])
    scores = 0.6 * torch.stack([P[0, 0], Q[0, 0]]) + bias
    log_p = gate_log_distribution(scores[None], "sigmoid", bias)
    torch.testing.assert_close(log_p, torch.stack([P[0, 0], Q[0, 0]])[None].log(), atol=1e-5, rtol=0)
    torch.testing.assert_close(gate_log_distribution(0.6 * P, "sigmoid"), P.log(), atol=1e-6, rtol=0)


def test_a_sigmoid_of_zero_is_finite_and_drops_out() -> None:
    scores = torch.tensor([[[0.0, 0.5, 0.5, 0.0]]])
    log_p = gate_log_distribution(scores, "sigmoid")
    assert log_p[0, 0, 1].item() == pytest.approx(-LN2) and bool(log_p.isfinite().all())
    assert router_kl(log_p, log_p).item() == 0
    # where p is the least float32, exp(d) is 2^126 / 4 and d 86, of which float32 keeps 4e-6: that much of 2 x 1/4
    assert router_kl(log_p, torch.full_like(log_p, -2 * LN2)).item() == pytest.approx(LN2, abs=4e-6)


def test_divergence_by_hand_and_its_direction() -> None:
    assert router_kl(P.log(), Q.log()).item() == pytest.approx(KL * LN2)
    assert router_kl(Q.log(), P.log()).item() == pytest.approx(KL_BACK * LN2)
    assert router_kl(P.log(), P.log()).item() == 0
    uniform = torch.full_like(P, -2 * LN2)
    assert router_kl(P.log(), uniform).item() == pytest.approx((1 / 2 - 1 / 4) * LN2)


def test_permuted_experts_change_nothing_where_both_are_permuted() -> None:
    order = torch.tensor([2, 0, 3, 1])
    assert router_kl(P[..., order].log(), Q[..., order].log()).item() == pytest.approx(KL * LN2)
    places = order.argsort()  # where expert i went
    old = torch.tensor([[[0, 1]]])
    assert gate_shift(P[..., order].log(), Q[..., order].log(), places[old]).item() == pytest.approx(1.5 * LN2)
    # where only one is, it is another router: P against its permutation 1/8, 1/2, 1/8, 1/4: 2, -1, 0, -1
    assert router_kl(P.log(), P[..., order].log()).item() == pytest.approx((1 - 1 / 4 - 1 / 8) * LN2)


@pytest.mark.parametrize(("choice", "shift"), [([0], 2.0), ([3], 0.0), ([0, 1], 1.5), ([1, 2], 1.0), ([0, 1, 2, 3], 1.0)])
def test_gate_shift_is_over_the_old_choice_alone(choice: list[int], shift: float) -> None:
    """|log Q - log P| in units of log 2 is 2, 1, 1, 0."""
    routes = torch.tensor([[choice]])
    for dtype in (torch.uint8, torch.int16, torch.int64):
        assert gate_shift(P.log(), Q.log(), routes.to(dtype)).item() == pytest.approx(shift * LN2)


@pytest.mark.parametrize(
    ("choice", "distance"),
    [
        ([0], 1 / 4),  # K = 1
        ([0, 1], 1 / 8),
        ([0, 1, 2], 0.0),  # a tie for the third place
        ([0, 1, 2, 3], math.inf),  # K = E: nothing is left out
        ([1, 2], -3 / 8),  # a forced choice, worse than what it left out
    ],
)
def test_margin_by_hand(choice: list[int], distance: float) -> None:
    for dtype in (torch.uint8, torch.int64):
        assert margin(P, torch.tensor([[choice]]).to(dtype)).item() == distance


def test_margin_is_one_of_selection_scores_so_the_bias_counts() -> None:
    bias = torch.tensor([[0.0, 0.0, 0.5, 0.0]])  # 1/2, 1/4, 5/8, 1/8: experts 0 and 2, then 1
    assert margin(P + bias, torch.tensor([[[0, 2]]])).item() == 1 / 4


def test_margin_of_group_limited_routing_is_within_its_groups() -> None:
    """Groups {0,1}, {2,3}, {4,5}, {6,7}; the best two, by their best expert, are the first two. Expert 4 is third of all, but
    out of reach; expert 3 is the next in reach."""
    scores = torch.tensor([[[0.875, 0.125, 0.75, 0.25, 0.625, 0.0, 0.0, 0.0]]])
    choice = torch.tensor([[[0, 2]]])
    assert margin(scores, choice, groups=4, group_topk=2).item() == 0.5
    assert margin(scores, choice).item() == 0.125
    assert margin(scores, torch.tensor([[[0, 1, 2, 3]]]), groups=4, group_topk=2).item() == math.inf  # they are used up
    assert margin(scores, torch.tensor([[[2, 3]]]), groups=2, group_topk=1).item() == 0.25 - 0.875  # groups of four


def test_margin_looks_at_every_group_in_reach_also_at_one_without_a_chosen_expert() -> None:
    """Two of four groups are in reach, {0,1} and {4,5} by their best; the best two experts are both in the first. Next of all
    is expert 4; expert 2 is near it, but out of reach."""
    scores = torch.tensor([[[0.875, 0.75, 0.4375, 0.375, 0.5, 0.25, 0.0, 0.0]]])
    assert margin(scores, torch.tensor([[[0, 1]]]), groups=4, group_topk=2).item() == 0.25
    assert margin(scores, torch.tensor([[[0, 1]]]), groups=4, group_topk=1).item() == math.inf  # one group, used up
    # by the sum of their two best, {2,3} is before {4,5}
    assert margin(scores, torch.tensor([[[0, 1]]]), groups=4, group_topk=2, group_best=2).item() == 0.75 - 0.4375


def test_every_token_and_layer_has_its_own() -> None:
    """Two tokens, two layers: P and Q by turns."""
    old = torch.stack([torch.cat([P[0], Q[0]]), torch.cat([Q[0], P[0]])]).log()
    new = old.flip(0)
    torch.testing.assert_close(router_kl(old, new), torch.tensor([[KL, KL_BACK], [KL_BACK, KL]]) * LN2)
    routes = torch.tensor([[[0], [0]], [[3], [1]]])
    torch.testing.assert_close(gate_shift(old, new, routes), torch.tensor([[2.0, 2.0], [0.0, 1.0]]) * LN2)
    torch.testing.assert_close(margin(old.exp(), routes), torch.tensor([[1 / 4, -3 / 8], [-3 / 8, -1 / 4]]))


def test_flips_by_token_and_layer() -> None:
    old: Tensor = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [0, 3]]])
    new: Tensor = torch.tensor([[[0, 1], [0, 2]], [[0, 2], [0, 3]]])
    assert flipped(old, new).tolist() == [[False, True], [True, False]]
    assert flipped(old.to(torch.uint8), new.to(torch.int16)).tolist() == [[False, True], [True, False]]
    unknown = torch.tensor([[[-1, -1], [2, 3]]])
    assert flipped(unknown, unknown).tolist() == [[False, False]]
