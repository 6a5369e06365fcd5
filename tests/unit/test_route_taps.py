"""Taps by themselves: replay, fall-back and refusal with scores by hand; where taps are put; what is noticed afterwards."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function as route
from torch import Tensor, nn

from models.layer_map import moe_modules
from models.routing import Replay, RouteLog, RouteTap, check_replayed, install_taps, open_logs
from models.stream import Stream, pack_sequences

CPU = torch.device("cpu")


def stream_of(tokens: int, forced: list[list[int]] | None = None, filler: int = 0, **settings: Any) -> Stream:
    """One sequence, called sample 7; its replay, if any, is of one layer."""
    stream = pack_sequences([[1] * (tokens + 1 - filler)], [1], tokens, CPU, samples=[7])
    replay = None if forced is None else Replay(torch.tensor(forced)[:, None], **settings)
    stream.routes = RouteLog(replay)
    return stream


def tap_at(layer: int = 3, kind: str = "softmax", pre: bool = False, bias: Tensor | None = None) -> RouteTap:
    config = SimpleNamespace(moe_router_pre_softmax=pre)
    return RouteTap(layer, 0, SimpleNamespace(score_function=kind, expert_bias=bias, config=config))


def log_of(stream: Stream) -> RouteLog:
    assert stream.routes is not None
    return stream.routes


def routed(tap: RouteTap, stream: Stream, logits: list[list[float]], topk: int = 2, **settings: Any) -> Tensor:
    """Megatron's own function, asked with the tap: gates [T, E], 0 where an expert is not chosen."""
    tap.stream = stream
    gates, routing_map = route(torch.tensor(logits), topk, router_replay=tap, **settings)  # pyright: ignore[reportArgumentType]
    tap.check_used(None, None, (gates, routing_map))
    return gates


LN = [math.log(w) for w in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("settings", "gates"),
    [
        (dict(), [1 / 3, 2 / 3]),  # softmax over the two, once
        (dict(scaling_factor=2.5), [2.5 / 3, 5 / 3]),
        (dict(use_pre_softmax=True), [0.1, 0.2]),  # of all four, not normalised over the two
        (dict(score_function="sigmoid"), [3 / 7, 4 / 7]),  # sigmoid(log w) = w / (1 + w): 1/2 and 2/3
        (dict(score_function="sigmoid", expert_bias=torch.tensor([9.0, -5.0, 0.0, 0.0])), [3 / 7, 4 / 7]),
        (dict(num_groups=2, group_topk=1, use_pre_softmax=True), [0.1, 0.2]),
    ],
)
def test_gates_of_forced_experts_are_live_and_normalised_once(settings: dict[str, Any], gates: list[float]) -> None:
    """Cases 7 and 17: the live choice would be experts 2 and 3; 0 and 1 have the gates that they would have as live choice,
    without the bias."""
    tap = tap_at(kind=settings.get("score_function", "softmax"), pre="use_pre_softmax" in settings)
    stream = stream_of(1, [[0, 1]])
    assert routed(tap, stream, [LN], **settings)[0].tolist() == pytest.approx([*gates, 0, 0], abs=1e-6)
    log = log_of(stream)
    assert (log.choice[3].tolist(), log.kept[3].tolist(), log.agreed[3].tolist()) == ([[0, 1]], [[True, True]], [True])
    assert log.live[3].tolist() == ([[0, 3]] if "expert_bias" in settings else [[2, 3]])


def test_one_expert_a_token_and_all_experts_a_token() -> None:
    one = routed(tap_at(pre=True), stream_of(1, [[1]]), [LN], topk=1, use_pre_softmax=True)
    assert one[0].tolist() == pytest.approx([0, 0.2, 0, 0])
    everyone = stream_of(1, [[0, 1, 2, 3]])
    assert routed(tap_at(), everyone, [LN], topk=4)[0].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert log_of(everyone).live[3].tolist() == [[0, 1, 2, 3]]


def test_unknown_routes_fall_back_to_the_live_router_and_are_counted() -> None:
    """Case 12: the middle token's route is unknown: as if it were free, and not expert 0."""
    stream = stream_of(3, [[0, 1], [-1, -1], [1, 2]], unknown=True)
    gates = routed(tap_at(), stream, [LN] * 3)
    log = log_of(stream)
    assert log.choice[3].tolist() == [[0, 1], [2, 3], [1, 2]]
    assert log.kept[3].tolist() == [[True, True], [False, False], [True, True]]
    assert gates[1].tolist() == pytest.approx([0, 0, 3 / 7, 4 / 7])
    assert log.agreed[3].tolist() == [True] * 3


@pytest.mark.parametrize(
    ("kind", "share", "kept", "choice"),
    [
        ("logits", 0.6, [False, True], [1, 3]),  # the second best weighs 3: 2 is two thirds of it, 1 one third
        ("logits", 0.7, [False, False], [2, 3]),
        ("logits", 0.3, [True, True], [0, 1]),
        ("probabilities", 0.6, [False, True], [1, 3]),
        ("probabilities", 0.7, [False, False], [2, 3]),
        # sigmoid(log w) - 1: -1/2, -1/3, -1/4, -1/5. The second best is -1/4: half of it lower is -3/8, twice of it -1/2
        ("sigmoid", 0.5, [False, True], [1, 3]),
        ("sigmoid", 0.9, [False, False], [2, 3]),
    ],
)
def test_filtered_replay_refuses_what_has_become_unlikely(kind: str, share: float, kept: list[bool], choice: list[int]) -> None:
    pre, bias = kind == "probabilities", torch.full((4,), -1.0) if kind == "sigmoid" else None
    score = "sigmoid" if kind == "sigmoid" else "softmax"
    stream = stream_of(1, [[0, 1]], keep_share=share)
    routed(tap_at(kind=score, pre=pre), stream, [LN], score_function=score, use_pre_softmax=pre, expert_bias=bias)
    log = log_of(stream)
    assert (log.kept[3][0].tolist(), log.choice[3][0].tolist()) == (kept, choice)
    assert (log.live[3].tolist(), log.agreed[3].tolist()) == ([[2, 3]], [True])


def test_routes_for_another_number_of_tokens_or_experts_are_an_error() -> None:
    """Case 12."""
    for forced, shape in (([[0, 1]], r"\(1, 2\)"), ([[0], [1]], r"\(2, 1\)")):
        with pytest.raises(RuntimeError, match=rf"layer 3: routes for {shape} were given, \(2, 2\) choose"):
            routed(tap_at(), stream_of(2, forced), [LN, LN])


@pytest.mark.parametrize("used", [[2, 3], [0, 2], [0], [0, 1, 2]])
def test_a_router_that_uses_something_else_is_noticed(used: list[int]) -> None:
    """Case 10: others, half others, one less, one more; on the second of three tokens."""
    tap, stream = tap_at(), stream_of(3, [[0, 1]] * 3)
    gates = routed(tap, stream, [LN] * 3)
    check_replayed([stream], [3])
    routing_map = gates > 0
    routing_map[1] = torch.zeros(4, dtype=torch.bool).index_fill(0, torch.tensor(used), True)
    tap.check_used(None, None, (gates, routing_map))
    with pytest.raises(RuntimeError, match="^replay, layer 3, microbatch 1, sample 7, token 1: the router did not use"):
        check_replayed([stream_of(3), stream], [3])


def test_the_first_disagreement_is_named_with_filler_too() -> None:
    """Case 10."""
    stream = stream_of(4, [[0, 1]] * 4, filler=2)
    log_of(stream).agreed = {1: torch.tensor([True] * 4), 5: torch.tensor([True, True, True, False])}
    with pytest.raises(RuntimeError, match="layer 5, microbatch 0, filler token 1:"):
        check_replayed([stream], [1, 5])


def test_a_layer_whose_router_did_not_run_is_named() -> None:
    """Cases 4 and 10. A stage without MoE layers has nothing to notice."""
    stream = stream_of(1, [[0, 1]])
    routed(tap_at(), stream, [LN])
    with pytest.raises(RuntimeError, match=r"replay, microbatch 0: layers \[1, 6\] were given routes, but .* did not run"):
        check_replayed([stream], [1, 3, 6])
    check_replayed([stream_of(1, [[0, 1]])], [])


def test_replay_is_for_every_microbatch_and_layer_or_for_none() -> None:
    """Cases 1, 8 and 14."""
    streams, routes = [stream_of(1), stream_of(1)], torch.tensor([[[0, 1], [0, 1]]])
    with pytest.raises(RuntimeError, match="routes for 1 microbatches were given, 2 run"):
        open_logs(streams, [Replay(routes)], [0, 2])
    with pytest.raises(RuntimeError, match="microbatch 1: routes for 1 layers were given, 2 route here"):
        open_logs(streams, [Replay(routes), Replay(routes[:, :1])], [0, 2])
    open_logs(streams, [Replay(routes), Replay(routes)], [0, 2])
    assert [log_of(s).replay is not None for s in streams] == [True, True]
    open_logs(streams, None, [0, 2])
    assert [log_of(s).replay for s in streams] == [None, None]


class Layer(nn.Module):
    """What a decoder layer, or an MTP head's, shows of itself."""

    def __init__(self, number: int, routes: bool = True) -> None:
        super().__init__()
        self.layer_number, self.mlp = number, nn.Module()
        if routes:
            router: Any = nn.Module()
            router.score_function, router.config = "softmax", SimpleNamespace(moe_router_pre_softmax=False)
            router.attach_and_log_load_balancing_loss = router.router_replay = None
            self.mlp.router = router


def chunk(layers: list[Layer], mtp: list[Layer] | None = None) -> Any:
    module: Any = nn.Module()
    module.decoder, module.mtp = nn.Module(), nn.Module()
    module.decoder.layers = nn.ModuleList(layers)
    module.mtp.layers = nn.ModuleList(mtp or [])
    return module


def test_layers_go_by_the_models_numbers_across_virtual_stages_and_dense_layers() -> None:
    """Cases 1 and 5: of 8 layers, of which 0 and 5 are dense, the first of two ranks has 0, 1 and 4, 5 as two virtual stages;
    Megatron counts from 1. Later chunks may come first."""
    chunks = [chunk([Layer(5), Layer(6, routes=False)]), chunk([Layer(1, routes=False), Layer(2)])]
    assert [layer for layer, _ in moe_modules(chunks)] == [1, 4]
    taps = install_taps(chunks)
    assert [(tap.layer, tap.place) for tap in taps] == [(1, 0), (4, 1)]
    assert chunks[0].decoder.layers[0].mlp.router.router_replay is taps[1]


def test_an_mtp_head_is_no_layer() -> None:
    """Case 6: its router has the number of a decoder layer, and stays as it is."""
    whole = chunk([Layer(1), Layer(2)], mtp=[Layer(1), Layer(2)])
    assert [tap.layer for tap in install_taps([whole])] == [0, 1]
    assert all(layer.mlp.router.router_replay is None for layer in whole.mtp.layers)
