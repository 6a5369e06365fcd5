"""The order of problems: a permutation an epoch, known from the position alone."""

from collections import Counter

import pytest

from moe_rl.data import ProblemOrder
from moe_rl.types import Problem

PROBLEMS = [Problem(str(i), f"{i}=", str(i)) for i in range(10)]


def ids(order: ProblemOrder, position: int, count: int) -> list[str]:
    return [problem.id for problem in order.take(position, count)]


@pytest.mark.parametrize("seed", range(5))
def test_every_epoch_has_every_problem_once_in_an_order_of_its_own(seed: int) -> None:
    order = ProblemOrder(PROBLEMS, seed, "train")
    epochs = [ids(order, 10 * i, 10) for i in range(4)]
    assert all(sorted(epoch, key=int) == [p.id for p in PROBLEMS] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [str(i) for i in range(10)] not in epochs


@pytest.mark.parametrize("seed", range(5))
def test_a_position_is_all_there_is_to_remember(seed: int) -> None:
    """Taken in steps of 4 across epochs, from the start or from the middle, or by an order that was elsewhere before."""
    whole = ids(ProblemOrder(PROBLEMS, seed, "train"), 0, 40)
    order = ProblemOrder(PROBLEMS, seed, "train")
    assert [i for start in range(0, 40, 4) for i in ids(order, start, 4)] == whole
    assert ids(ProblemOrder(PROBLEMS, seed, "train"), 17, 9) == whole[17:26]
    ids(order, 35, 5)
    assert ids(order, 17, 9) == whole[17:26]


def test_a_batch_may_be_longer_than_the_problems() -> None:
    assert set(Counter(ids(ProblemOrder(PROBLEMS, 0, "train"), 10, 30)).values()) == {3}


def test_seeds_and_purposes_have_orders_of_their_own() -> None:
    orders = [tuple(ids(ProblemOrder(PROBLEMS, seed, purpose), 0, 10)) for seed in range(5) for purpose in ("train", "sft")]
    assert len(set(orders)) == 10


def test_the_order_does_not_depend_on_the_process() -> None:
    """Written down once: a run must find its order again with another Python, on another machine."""
    assert ids(ProblemOrder(PROBLEMS, 7, "train"), 0, 10) == list("7258063149")
