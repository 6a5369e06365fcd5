"""Routes as plain tensors: how they are stored, what a valid one is, filler, and what stands in for a refused expert."""

import math

import pytest
import torch
from torch import Tensor

from models.routes import UNKNOWN, Fault, compact, filler_routes, first_fault, live_enough, refill


@pytest.mark.parametrize(
    ("experts", "value", "dtype"),
    [
        (8, 7, torch.uint8),
        (8, UNKNOWN, torch.int16),
        (256, 255, torch.uint8),
        (257, 256, torch.int16),
        (2**15, 2**15 - 1, torch.int16),
    ],
)
def test_the_smallest_type_holds_every_number(experts: int, value: int, dtype: torch.dtype) -> None:
    routes = torch.tensor([[[0, value]]])
    small = compact(routes, experts)
    assert small.dtype == dtype and small.tolist() == routes.tolist()
    assert compact(small, experts).dtype == dtype


def test_more_experts_than_sixteen_bits_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.experts=32769: .* at most 32768"):
        compact(torch.zeros(1, 1, 1, dtype=torch.int64), 2**15 + 1)


@pytest.mark.parametrize(("topk", "experts"), [(1, 4), (2, 8), (3, 8), (4, 4), (8, 40), (3, 5)])
def test_filler_is_distinct_in_a_row_and_even_over_experts(topk: int, experts: int) -> None:
    """Cases 2 and 3: no expert twice in a row; whichever part of the rows a rank holds, no expert has more than one above
    another."""
    for first, rows in ((0, 40), (7, 23), (13, 1)):
        filler = filler_routes(rows, topk, experts, first)
        assert filler.shape == (rows, topk)
        assert all(sorted(set(row)) == row for row in filler.tolist())
        load = torch.bincount(filler.flatten(), minlength=experts)
        assert load.max() - load.min() <= 1
        assert torch.equal(filler, filler_routes(first + rows, topk, experts)[first:])  # numbered through


def test_filler_by_hand() -> None:
    assert filler_routes(4, 2, 5).tolist() == [[0, 1], [2, 3], [0, 4], [1, 2]]
    assert filler_routes(2, 2, 5, first=2).tolist() == [[0, 4], [1, 2]]
    assert filler_routes(0, 2, 5).shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
def test_the_first_fault_is_found_where_it_stands(dtype: torch.dtype) -> None:
    """Cases 12 and 16: 8 routed experts, so that id 8 (a shared expert's, say) is outside; the same id in two places of
    different rows is no fault."""
    good = torch.tensor([[[0, 7], [6, 2]], [[7, 0], [5, 1]], [[2, 6], [0, 1]]], dtype=dtype)
    assert first_fault(good, 8) is None
    for value, text in (
        (8, "expert 8 is outside [0, 8)"),
        (-2, "expert -2 is outside [0, 8)"),
        (5, "expert 5 stands there twice"),
    ):
        bad = good.clone()
        bad[1, 1, 1] = value
        bad[2, 0] = 9  # a later one
        for unknown in (False, True):
            assert first_fault(bad, 8, unknown=unknown) == Fault(1, 1, text)


def test_an_unknown_route_is_valid_only_where_it_may_be() -> None:
    routes = torch.tensor([[[3, 1]], [[UNKNOWN, UNKNOWN]]])
    assert first_fault(routes, 8, unknown=True) is None
    assert first_fault(routes, 8) == Fault(1, 0, "expert -1 is outside [0, 8)")


def test_small_storage_is_checked_as_it_stands() -> None:
    assert first_fault(torch.tensor([[[255, 254]]], dtype=torch.uint8), 256) is None
    assert first_fault(torch.tensor([[[255, 1]]], dtype=torch.uint8), 255) == Fault(0, 0, "expert 255 is outside [0, 255)")
    assert first_fault(torch.zeros(0, 2, 2, dtype=torch.uint8), 4) is None


def test_an_expert_twice_is_found_in_any_two_places() -> None:
    for i in range(4):
        for j in range(i):
            routes = torch.tensor([[[3, 2, 1, 0]]])
            routes[0, 0, i] = routes[0, 0, j]
            assert first_fault(routes, 4) == Fault(0, 0, f"expert {3 - j} stands there twice")


def enough(scores: list[float], live: list[int], forced: list[int], share: float, log_scale: bool = False) -> list[bool]:
    inputs = torch.tensor([scores]), torch.tensor([live]), torch.tensor([forced])
    return live_enough(*inputs, share, log_scale)[0].tolist()


def test_logits_are_compared_by_the_ratio_of_their_exponentials() -> None:
    """The second best has weight 4. Expert 1, weight 2, has half of it, expert 0 a quarter."""
    logits = [math.log(w) for w in (1, 2, 4, 8)]
    assert enough(logits, [2, 3], [0, 1], 0.45, log_scale=True) == [False, True]
    assert enough(logits, [2, 3], [0, 1], 0.55, log_scale=True) == [False, False]
    assert enough(logits, [2, 3], [0, 1], 0.2, log_scale=True) == [True, True]
    assert enough([x - 9 for x in logits], [2, 3], [0, 1], 0.45, log_scale=True) == [False, True]  # a shift is nothing
    assert enough(logits, [2, 3], [2, 3], 1.0, log_scale=True) == [True, True]


def test_probabilities_are_compared_by_their_ratio() -> None:
    """The second best has 0.3, of which 0.2 is two thirds and 0.1 one."""
    probabilities = [0.1, 0.2, 0.3, 0.4]
    assert enough(probabilities, [2, 3], [0, 1], 0.6) == [False, True]
    assert enough(probabilities, [2, 3], [0, 1], 0.7) == [False, False]
    assert enough(probabilities, [2, 3], [0, 3], 0.3) == [True, True]


def test_a_negative_kth_best_is_undercut_by_the_same_distance() -> None:
    """Sigmoids with a negative bias: the second best is -0.2; half of it is a distance of 0.1, so -0.3 is the bound. As a
    plain share, -0.1, the second best would refuse itself."""
    scores = [-0.5, -0.25, -0.2, 0.3]
    assert enough(scores, [2, 3], [0, 1], 0.5) == [False, True]
    assert enough(scores, [2, 3], [2, 3], 0.5) == [True, True]
    assert enough(scores, [2, 3], [1, 2], 1.0) == [False, True]


def filled(forced: list[int], keep: list[bool], live: tuple[int, int] = (2, 3)) -> list[int]:
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    return refill(scores, torch.tensor([live]), torch.tensor([forced]), torch.tensor([keep]))[0].tolist()


def test_refused_experts_are_replaced_by_the_best_of_the_live_choice() -> None:
    assert filled([0, 1], [True, True]) == [0, 1]
    assert filled([0, 1], [False, True]) == [1, 3]
    assert filled([0, 1], [False, False]) == [2, 3]
    assert filled([0, 3], [False, True]) == [2, 3]  # the best is there already
    assert filled([0, 3], [True, False]) == [0, 3]  # refused, and yet the best
    assert filled([UNKNOWN, UNKNOWN], [False, False]) == [2, 3]
    assert filled([0, 1], [False, True], live=(0, 3)) == [1, 3]  # the live choice may be limited to groups


@pytest.mark.parametrize("topk", [1, 3, 6])
def test_refilled_rows_hold_distinct_experts_with_ties_too(topk: int) -> None:
    generator = torch.Generator().manual_seed(topk)
    scores = torch.randint(0, 3, (200, 6), generator=generator).float()
    live = scores.topk(topk).indices
    forced = torch.rand(200, 6, generator=generator).topk(topk).indices.sort(-1).values
    keep = torch.rand(200, topk, generator=generator) < 0.5
    rows: Tensor = refill(scores, live, forced, keep)
    assert first_fault(rows[:, None], 6) is None
    for row, old, new, kept in zip(rows.tolist(), live.tolist(), forced.tolist(), keep.tolist(), strict=True):
        stay = {expert for expert, k in zip(new, kept, strict=True) if k}
        assert stay <= set(row) <= stay | set(old) and row == sorted(row)
