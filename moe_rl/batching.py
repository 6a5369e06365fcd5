"""How a rollout batch becomes minibatches, ranks' shares and microbatches. Pure integers: every rank computes the same."""

import heapq
import random
from collections.abc import Sequence


def split_minibatches(count: int, minibatches: int, seed: int, step: int) -> list[list[int]]:
    """A random permutation of range(count) in `minibatches` equal parts; depends on the arguments alone, not on the layout.

    Raises ValueError where `minibatches` does not divide `count`.
    """
    if minibatches < 1 or count % minibatches:
        raise ValueError(f"algorithm.minibatches={minibatches}: must divide the batch of {count} sequences")
    order = list(range(count))
    # A text seed is hashed by sha512: neighbouring seeds and steps share nothing, and every process agrees.
    random.Random(f"minibatches {seed} {step}").shuffle(order)
    size = count // minibatches
    return [order[i * size : (i + 1) * size] for i in range(minibatches)]


def assign_to_ranks(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Positions of the sequences (tokens each in `lengths`) for each data-parallel rank, balanced by tokens.

    Longest first to the least loaded rank (ties: lower position, fewer sequences, lower rank), at most 4/3 of the best
    possible largest load (Graham 1969). Each rank's positions ascend. A rank may get none.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: must be at least 1")
    heap = [(0, 0, rank) for rank in range(ranks)]
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    for position in _longest_first(lengths):
        load, held, rank = heap[0]
        assigned[rank].append(position)
        heapq.heapreplace(heap, (load + lengths[position], held + 1, rank))
    return [sorted(positions) for positions in assigned]


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Microbatches of positions, each of at most `budget` tokens, by first fit of the longest first.

    A sequence longer than the budget gets a microbatch of its own. Positions ascend within a microbatch, and microbatches
    by their first position. No lengths give no microbatches.
    """
    if budget < 1:
        raise ValueError(f"algorithm.microbatch_tokens={budget}: must be at least 1")
    bins: list[list[int]] = []
    room: list[int] = []
    for position in _longest_first(lengths):
        length = lengths[position]
        place = next((i for i, left in enumerate(room) if length <= left), None)
        if place is None:
            bins.append([position])
            room.append(budget - length)
        else:
            bins[place].append(position)
            room[place] -= length
    return sorted(sorted(positions) for positions in bins)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    if any(length < 1 for length in lengths):
        raise ValueError(f"lengths: {min(lengths)} tokens; every sequence must have at least 1")
    return sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
