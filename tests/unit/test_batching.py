import random

import pytest

from moe_rl.batching import assign_to_ranks, pack, split_minibatches


def draws(seed: int) -> tuple[random.Random, list[int]]:
    rng = random.Random(seed)
    return rng, [rng.randint(1, 40) for _ in range(rng.randint(0, 60))]


def flat(parts: list[list[int]]) -> list[int]:
    return [position for part in parts for position in part]


@pytest.mark.parametrize(("count", "minibatches"), [(0, 1), (4, 4), (64, 4), (60, 5), (7, 1)])
def test_minibatches_hold_every_index_once_in_equal_parts(count: int, minibatches: int) -> None:
    parts = split_minibatches(count, minibatches, seed=3, step=1)
    assert [len(part) for part in parts] == [count // minibatches] * minibatches
    assert sorted(flat(parts)) == list(range(count))


def test_minibatches_are_fixed_by_seed_and_step() -> None:
    first = split_minibatches(64, 4, seed=0, step=0)
    assert first == split_minibatches(64, 4, seed=0, step=0)
    others = [split_minibatches(64, 4, *arguments) for arguments in [(1, 0), (0, 1), (1, 1), (0, 11), (11, 0)]]
    assert len({str(parts) for parts in [first, *others]}) == 6
    assert flat(first) != list(range(64))


def test_a_permutation_that_must_never_change() -> None:
    # Written down: runs resumed on another machine or Python version have to see the same minibatches.
    assert split_minibatches(8, 2, seed=0, step=0) == [[0, 2, 1, 6], [4, 7, 3, 5]]


@pytest.mark.parametrize(("count", "minibatches"), [(10, 4), (4, 0), (3, 8)])
def test_minibatches_must_divide_the_batch(count: int, minibatches: int) -> None:
    with pytest.raises(ValueError, match=rf"algorithm.minibatches={minibatches}: must divide the batch of {count} sequences"):
        split_minibatches(count, minibatches, seed=0, step=0)


def test_ranks_by_hand() -> None:
    # Longest first: 9 -> rank 0; 8 -> rank 1; 5 -> rank 1 (8 < 9); 4 -> rank 0 (9 < 13); 3 at 13 each, two held each:
    # rank 0. Loads 16 and 13.
    assert assign_to_ranks([3, 9, 4, 8, 5], 2) == [[0, 1, 2], [3, 4]]


def test_equal_lengths_are_dealt_evenly() -> None:
    assert assign_to_ranks([7] * 8, 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_more_ranks_than_sequences_leaves_some_with_nothing() -> None:
    assert assign_to_ranks([2, 5], 4) == [[1], [0], [], []]
    assert assign_to_ranks([], 2) == [[], []]


@pytest.mark.parametrize("seed", range(40))
def test_ranks_hold_every_position_once_in_order_and_balanced(seed: int) -> None:
    rng, lengths = draws(seed)
    ranks = rng.randint(1, 6)
    assigned = assign_to_ranks(lengths, ranks)
    assert len(assigned) == ranks
    assert sorted(flat(assigned)) == list(range(len(lengths)))
    assert all(positions == sorted(positions) for positions in assigned)
    loads = [sum(lengths[position] for position in positions) for positions in assigned]
    # No rank is ahead of another by more than its shortest sequence, or that one would have gone to the other.
    for load, positions in zip(loads, assigned, strict=True):
        if positions:
            assert load - min(lengths[position] for position in positions) <= min(loads)
    assert assigned == assign_to_ranks(lengths, ranks)


def test_packing_by_hand() -> None:
    # Budget 10, longest first: 7 (position 1) opens a; 6 (3) opens b; 5 (0) opens c; 4 (4) fits b (6 + 4);
    # 3 (2) fits a (7 + 3); 2 (5) fits c (5 + 2). Sorted by first position: c, a, b.
    assert pack([5, 7, 3, 6, 4, 2], 10) == [[0, 5], [1, 2], [3, 4]]


def test_a_sequence_longer_than_the_budget_is_alone() -> None:
    assert pack([1, 30, 1, 11, 10], 10) == [[0, 2], [1], [3], [4]]
    assert pack([], 10) == []


@pytest.mark.parametrize("seed", range(40))
def test_packs_hold_every_position_once_and_keep_the_budget(seed: int) -> None:
    rng, lengths = draws(seed)
    budget = rng.randint(5, 60)
    packs = pack(lengths, budget)
    assert sorted(flat(packs)) == list(range(len(lengths)))
    loads = [sum(lengths[position] for position in positions) for positions in packs]
    for positions, load in zip(packs, loads, strict=True):
        assert positions == sorted(positions)
        assert load <= budget or len(positions) == 1
    assert [positions[0] for positions in packs] == sorted(positions[0] for positions in packs)
    # First fit: no two of the packs would go into one.
    assert all(a + b > budget for i, a in enumerate(loads) for b in loads[:i])
    assert packs == pack(lengths, budget)


def test_impossible_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="ranks=0: must be at least 1"):
        assign_to_ranks([1], 0)
    with pytest.raises(ValueError, match="algorithm.microbatch_tokens=0: must be at least 1"):
        pack([1], 0)
    for distribute in (assign_to_ranks, pack):
        with pytest.raises(ValueError, match="lengths: 0 tokens; every sequence must have at least 1"):
            distribute([3, 0], 4)
