"""Whose routes are replayed; what an engine may return; routes laid out like the stream's tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.stream import Stream, pack_sequences
from moe_rl.config import ReplaySection
from moe_rl.replay import (
    ReplayPolicy,
    check_engine_records,
    check_rollout_routes,
    exchange_routes,
    spread_filler,
    stream_routes,
)

CPU = torch.device("cpu")
# A sample of prompt 2 and response 2: three tokens enter. MoE layers 0 and 2 of the model, 2 of 8 experts.
GOOD = torch.tensor([[[0, 1], [7, 2]], [[3, 2], [5, 4]], [[6, 7], [1, 0]]])


def checked(routes: Tensor | None, experts: int = 8) -> Tensor:
    return check_rollout_routes(routes, sample=5, tokens=3, layers=[0, 2], topk=2, experts=experts)


def refused(routes: Tensor | None, text: str) -> None:
    with pytest.raises(ValueError, match=rf"^rollout routes, sample 5{text}"):
        checked(routes)


@pytest.mark.parametrize(
    ("section", "rollout", "old", "share"),
    [
        (dict(mode="off"), False, False, None),
        (dict(mode="off", source="r3"), False, False, None),
        (dict(mode="r2", source="r3", keep_share=0.3), False, True, None),
        (dict(mode="r3"), True, False, None),
        (dict(mode="filtered", keep_share=0.3), False, True, 0.3),
        (dict(mode="filtered", source="r3"), True, False, 0.5),
    ],
)
def test_whose_routes(section: dict[str, Any], rollout: bool, old: bool, share: float | None) -> None:
    policy = ReplayPolicy(ReplaySection.model_validate(section))
    assert (policy.replays_rollout, policy.replays_old, policy.keep_share) == (rollout, old, share)


def test_good_routes_come_back_sorted_and_small() -> None:
    kept = checked(GOOD)
    assert kept.dtype == torch.uint8 and kept.tolist() == GOOD.sort(-1).values.tolist()
    assert checked(GOOD, experts=300).dtype == torch.int16
    assert checked(GOOD.to(torch.uint8), experts=256).tolist() == kept.tolist()


def test_a_row_with_an_unknown_expert_is_unknown() -> None:
    """Case 12."""
    routes = GOOD.clone()
    routes[1, 0, 1], routes[2, 1] = -1, -1
    kept = checked(routes)
    assert kept.dtype == torch.int16
    assert kept.tolist() == [[[0, 1], [2, 7]], [[-1, -1], [4, 5]], [[6, 7], [-1, -1]]]


def test_a_sample_without_routes_is_named() -> None:
    """Case 14."""
    refused(None, r": the engine returned none.* replay\.mode=off or r2")


@pytest.mark.parametrize(
    ("routes", "shape"),
    [
        (torch.cat([GOOD, GOOD]), "(6, 2, 2)"),  # case 13: a resumed response, concatenated twice
        (torch.cat([GOOD[:2], GOOD[1:]]), "(4, 2, 2)"),  # case 13: the token where it was cut, twice
        (GOOD[1:], "(2, 2, 2)"),  # case 12: a short capture
        (GOOD[:, [0, 1, 1]], "(3, 3, 2)"),  # case 1: a row for the dense layer too
        (GOOD[:, :1], "(3, 1, 2)"),
        (GOOD[..., :1], "(3, 2, 1)"),
        (GOOD[..., [0, 1, 1]], "(3, 2, 3)"),  # case 16: a slot for the shared expert
        (GOOD.flatten(1), "(3, 4)"),
    ],
)
def test_a_wrong_count_or_shape_is_refused(routes: Tensor, shape: str) -> None:
    """Cases 1, 12, 13 and 16."""
    text = ": shape " + shape + ", must be (3, 2, 2): prompt + response - 1 tokens, layers, experts"
    with pytest.raises(ValueError) as error:
        checked(routes)
    assert str(error.value) == "rollout routes, sample 5" + text


@pytest.mark.parametrize(
    ("value", "fault"),
    [(8, r"expert 8 is outside \[0, 8\)"), (-2, r"expert -2 is outside"), (1, "expert 1 stands there twice")],
)
def test_an_expert_outside_or_twice_is_refused(value: int, fault: str) -> None:
    """Cases 2 and 16: id 8 would be the first shared expert. The layer is the model's, not the place among those that route."""
    routes = GOOD.clone()
    routes[2, 1, 1] = value
    refused(routes, f", token 2, layer 2: {fault}")


def test_zeros_of_an_engine_that_records_nothing_are_refused() -> None:
    """Case 12: expert 0 as filler."""
    refused(torch.zeros_like(GOOD), ", token 0, layer 0: expert 0 stands there twice")
    left_padded = GOOD.clone()
    left_padded[0] = 0
    refused(left_padded, ", token 0, layer 0: expert 0 stands there twice")


def stream_of(filler: int, part: tuple[int, int] = (0, 1)) -> Stream:
    """Samples 9 and 4 of the batch: 3 and 2 tokens enter."""
    return pack_sequences([[1, 2, 3, 4], [5, 6, 7]], [2, 1], 5 + filler, CPU, samples=[9, 4], part=part)


def told(sample: int, tokens: int, layers: int = 3) -> Tensor:
    """Routes that tell where they belong: experts (sample + layer) and (20 + position)."""
    rows = [[[sample + layer, 20 + position] for layer in range(layers)] for position in range(tokens)]
    return torch.tensor(rows, dtype=torch.uint8)


@pytest.mark.parametrize("filler", [0, 3])
def test_routes_stand_beside_the_tokens_that_chose_them(filler: int) -> None:
    """Case 12: whatever the order of the members, a row's routes are those of its own sample and position."""
    stream, held = stream_of(filler), {4: told(4, 2), 9: told(9, 3), 0: told(0, 7)}
    laid = stream_routes(stream, [9, 4], held, topk=2, experts=40, layers=3)
    assert laid.shape == (5 + filler, 3, 2) and laid.dtype == torch.uint8
    for row in range(stream.real):
        sample, position = stream.samples[int(stream.row[row])], int(stream.position[row])
        assert laid[row].tolist() == [[sample + layer, 20 + position] for layer in range(3)]
    assert laid[5:].tolist() == [[[2 * i, 2 * i + 1]] * 3 for i in range(filler)]


def test_filler_routes_are_valid_and_even() -> None:
    """Cases 2 and 3: a rank with nothing but filler sends it to all experts alike."""
    stream = pack_sequences([], [], 12, CPU)
    laid = stream_routes(stream, [], {}, topk=2, experts=8, layers=1)
    assert torch.bincount(laid.flatten(), minlength=8).tolist() == [3] * 8
    assert bool((laid[:, 0, 0] < laid[:, 0, 1]).all())


def test_the_parts_of_tensor_ranks_make_the_whole() -> None:
    held = {9: told(9, 3), 4: told(4, 2)}
    whole = stream_routes(stream_of(3), [9, 4], held, 2, 40, 3)
    for size in (2, 4):
        parts = [stream_routes(stream_of(3, (rank, size)), [9, 4], held, 2, 40, 3) for rank in range(size)]
        assert torch.equal(torch.cat(parts), whole)


def test_unknown_routes_widen_the_whole_stream() -> None:
    held = {9: told(9, 3), 4: torch.full((2, 3, 2), -1, dtype=torch.int16)}
    laid = stream_routes(stream_of(1), [9, 4], held, 2, 40, 3)
    assert laid.dtype == torch.int16
    assert (laid[:3, 0].tolist(), laid[3:5].unique().tolist()) == ([[9, 20], [9, 21], [9, 22]], [-1])
    assert stream_routes(stream_of(0), [9, 4], {i: told(i, n).short() for i, n in ((9, 3), (4, 2))}, 2, 300, 3).amax() == 22


def test_what_filler_chose_is_spread() -> None:
    """Cases 2 and 3: equal filler tokens choose alike, and would all go to one rank when replayed."""
    chosen = torch.tensor([[3, 5]], dtype=torch.uint8).expand(8, 3, 2).contiguous()
    spread = spread_filler(stream_of(3), chosen, experts=8)
    assert spread.dtype == torch.uint8
    assert spread[:5].unique().tolist() == [3, 5] and chosen.unique().tolist() == [3, 5]
    assert spread[5:, 0].tolist() == spread[5:, 2].tolist() == [[2, 3], [4, 5], [6, 7]]
    parts = [spread_filler(stream_of(3, (rank, 4)), chosen[:2], experts=8) for rank in range(4)]
    assert torch.equal(torch.cat(parts), spread)  # parts without filler, with some, and of filler alone
    assert spread_filler(stream_of(0), chosen[:5], experts=8).data_ptr() == chosen.data_ptr()


def test_with_one_data_parallel_rank_each_sample_stays_and_a_missing_one_is_left_out() -> None:
    groups: Any = SimpleNamespace(data=SimpleNamespace(size=1))
    held = {i: told(i, 2) for i in (3, 1)}
    found = exchange_routes(held, [1, 2], groups, CPU)
    assert list(found) == [1] and torch.equal(found[1], held[1])


POLICY = ReplayPolicy(ReplaySection(mode="filtered", keep_share=0.25))


def test_a_streams_replay_knows_whether_anything_is_unknown() -> None:
    stream = stream_of(0)
    routes = GOOD[[0, 1, 2, 0, 1]]
    replay = POLICY.of_stream(stream, routes.to(torch.uint8), [0, 2], 8, 5)
    assert (replay.unknown, replay.keep_share) == (False, 0.25)
    routes[3] = -1
    assert POLICY.of_stream(stream, routes, [0, 2], 8, 5).unknown


@pytest.mark.parametrize(("row", "where"), [(1, "sample 9, token 1"), (4, "sample 4, token 1"), (6, "filler token 1")])
def test_a_replayed_route_that_is_no_choice_is_named(row: int, where: str) -> None:
    """Cases 2, 10 and 16."""
    routes = GOOD[[0, 1, 2, 0, 1, 2, 0]].clone()
    for value, fault in ((8, r"expert 8 is outside \[0, 8\)"), (int(routes[row, 1, 1]), r"expert \d stands there twice")):
        routes[row, 1, 0] = value
        with pytest.raises(ValueError, match=rf"^replayed routes, layer 2, microbatch 5, {where}: {fault}"):
            POLICY.of_stream(stream_of(2), routes, [0, 2], 8, 5)


def test_an_engine_that_says_expert_0_of_everything_records_nothing() -> None:
    """With one expert a token, zeros are a valid route each; and what a collapsed router really chooses."""
    nothing, live = torch.zeros(16, 2, 1, dtype=torch.uint8), torch.zeros(16, 2, 1, dtype=torch.uint8)
    check_engine_records([(nothing, live), (nothing, live)])
    check_engine_records([])
    live[3, 1] = 5
    with pytest.raises(ValueError, match="expert 0 for every token and layer, which is not what the routers choose"):
        check_engine_records([(nothing, nothing), (nothing, live)])
    check_engine_records([(nothing, nothing), (live, nothing)])
