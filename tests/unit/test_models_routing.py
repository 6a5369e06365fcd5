"""Expert choice: recorded by stream and layer, repeated in recomputation, counted without filler."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import OptimizerConfig
from models.layer_map import moe_modules
from models.model import Scores
from models.routing import RouteLog, RouteTap
from models.stream import Stream, pack_sequences
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built, sample_batch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


def stream_of(tokens: int = 4) -> Stream:
    stream = pack_sequences([[1] * (tokens + 1)], [1], tokens, CPU)
    stream.routes = RouteLog()
    return stream


def tap_at(layer: int, **router: Any) -> RouteTap:
    config = SimpleNamespace(moe_router_pre_softmax=router.pop("pre_softmax", False))
    plain: dict[str, Any] = dict(score_function="softmax", expert_bias=None, config=config)
    return RouteTap(layer, 0, SimpleNamespace(**plain | router))


def topk(scores: Tensor, k: int, num_groups: int | None = None, group_topk: int | None = None) -> tuple[Tensor, Tensor]:
    return tuple(torch.topk(scores, k, dim=1))  # pyright: ignore[reportReturnType]


def pick(tap: RouteTap, stream: Stream | None, scores: Tensor) -> tuple[Tensor, Tensor]:
    tap.stream = stream
    return tap.get_replay_topk(scores, 2, None, None, topk)


def test_the_choice_is_topk_in_order_of_expert_numbers() -> None:
    stream = stream_of(2)
    scores = torch.tensor([[0.1, 0.9, 0.3, 0.2], [0.8, 0.1, 0.2, 0.7]])
    values, chosen = pick(tap_at(3), stream, scores)
    assert chosen.tolist() == [[1, 2], [0, 3]]
    torch.testing.assert_close(values, torch.tensor([[0.9, 0.3], [0.8, 0.7]]))
    assert stream.routes is not None and stream.routes.choice[3] is chosen


def test_without_a_stream_nothing_is_changed_or_recorded() -> None:
    values, chosen = pick(tap_at(0), None, torch.tensor([[0.1, 0.9, 0.3, 0.8]]))
    assert chosen.tolist() == [[1, 3]]
    torch.testing.assert_close(values, torch.tensor([[0.9, 0.8]]))


@pytest.mark.parametrize("seed", range(5))
def test_recomputation_repeats_its_forward_with_live_scores(seed: int) -> None:
    """Other logits come in the second time (case 9): same experts, values and gradient of the new scores (case 7)."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, 4, 8, generator=generator)
    tap, stream = tap_at(0), stream_of()
    chosen = pick(tap, stream, first)[1].clone()
    second.requires_grad_()
    values, again = pick(tap, stream, second)
    assert torch.equal(again, chosen) and not torch.equal(chosen, topk(second, 2)[1].sort(-1).values)
    assert torch.equal(values, second.gather(1, chosen))
    values.sum().backward()
    assert second.grad is not None
    assert torch.equal(second.grad, torch.zeros(4, 8).scatter(1, chosen, 1.0))


@pytest.mark.parametrize("seed", range(5))
def test_a_streams_routes_are_never_anothers(seed: int) -> None:
    """Forward 0, 1, 2, then recomputation in another order, as pipelines do (case 8); and two layers of one stream."""
    scores = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(seed))
    taps, streams = [tap_at(1), tap_at(3)], [stream_of() for _ in range(3)]
    for stream, logits in zip(streams, scores, strict=True):
        for layer, tap in enumerate(taps):
            pick(tap, stream, logits[layer])
    for i in (2, 0, 1):
        for layer, tap in enumerate(taps):
            wanted = topk(scores[i, layer], 2)[1].sort(-1).values
            assert torch.equal(pick(tap, streams[i], torch.zeros(4, 8))[1], wanted)
    routes = streams[1].routes
    assert routes is not None
    assert torch.equal(routes.stacked([3, 1]), torch.stack([routes.choice[3], routes.choice[1]], dim=1))


def test_a_layer_that_was_not_reached_is_named() -> None:
    log = RouteLog()
    log.choice[1] = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"layers \[0, 2\].*did not reach"):
        log.stacked([0, 1, 2])


def random_streams(case: Case, count: int, filler: int = 0) -> list[Stream]:
    sequences, prompts, _ = sample_batch(case.config, case.seed, count)
    return [pack_sequences([s], [p], len(s) - 1 + filler, CPU) for s, p in zip(sequences, prompts, strict=True)]


def accumulate(model: Any, streams: list[Stream], note: Any = None) -> None:
    optimizer = model.optimizer(OptimizerConfig(lr=0.0), total_updates=1)  # pyright: ignore[reportCallIssue]
    optimizer.zero_grad()

    def loss(scores: Scores) -> tuple[Tensor, None]:
        if note is not None:
            note()
        return -scores.logprobs.sum(), None

    model.accumulate_gradients(streams, [loss] * len(streams), sum(s.real for s in streams))


@pytest.mark.parametrize("seed", range(5))
def test_the_model_recomputes_along_its_forwards_routes(runtime: Runtime, seed: int) -> None:
    """Between a stream's forward and its recomputation the routers change, as near-tied logits would: routes must not."""
    case = Case(seed=seed, model=dict(recompute="full", dense_layers=[1]))
    with built(case, runtime) as model:
        streams = random_streams(case, 3)
        seen: list[dict[int, Tensor]] = []
        generator = torch.Generator().manual_seed(seed)

        def disturb() -> None:
            log = streams[len(seen)].routes
            assert log is not None
            seen.append({layer: chosen.clone() for layer, chosen in log.choice.items()})
            with torch.no_grad():
                for _, module in moe_modules(model.bare):
                    module.mlp.router.weight.normal_(0.0, 0.1, generator=generator)

        accumulate(model, streams, disturb)
        assert [sorted(one) for one in seen] == [[0, 2, 3]] * 3  # global layer numbers, dense layers left out (case 1)
        for stream, forward in zip(streams, seen, strict=True):
            assert stream.routes is not None
            assert all(torch.equal(stream.routes.choice[layer], chosen) for layer, chosen in forward.items())
        fresh = random_streams(case, 3)
        model.score(fresh)
        moved = [fresh[i].routes.stacked([0, 2, 3]) != streams[i].routes.stacked([0, 2, 3]) for i in range(3)]  # pyright: ignore
        assert all(m.any() for m in moved)  # free, the disturbed routers choose otherwise


def test_taps_sit_in_the_live_routers(runtime: Runtime) -> None:
    with built(Case(model=dict(dense_layers=[0, 2])), runtime) as model:
        routers = [m.router for m in model.bare[0].modules() if hasattr(m, "router")]
        assert [tap.layer for tap in model.taps] == [1, 3] == model.moe_layers
        assert [router.router_replay for router in routers] == model.taps


def test_the_load_behind_the_expert_bias_counts_real_tokens_once(runtime: Runtime) -> None:
    """8 tokens and 8 experts, where Megatron 0.19.2's own mask would be taken for one of experts; filler of 5; recompute."""
    for recompute in ("none", "full"):
        case = Case(model=dict(router_score="sigmoid", load_balancing="expert_bias", expert_bias_rate=0.5, recompute=recompute))
        with built(case, runtime) as model:
            stream = pack_sequences([[5, 6, 7, 8]], [1], 8, CPU)
            counted: list[Tensor] = []
            router = moe_modules(model.bare)[0][1].mlp.router

            def note(router: Any = router, counted: list[Tensor] = counted) -> None:
                counted.append(router.local_tokens_per_expert.clone())

            model.score([stream])  # without gradients: not counted
            accumulate(model, [stream], note)
            assert stream.routes is not None
            loads = torch.bincount(stream.routes.choice[0][:3].flatten(), minlength=8).float()
            forward = loads if recompute == "none" else torch.zeros(8)  # a recomputed forward is counted when it is repeated
            assert torch.equal(counted[0], forward)
            assert torch.equal(router.expert_bias, 0.5 * torch.sign(loads.mean() - loads))
            assert torch.equal(router.local_tokens_per_expert, torch.zeros(8))


def test_load_is_counted_for_the_bias_alone() -> None:
    from models.routing import _count_load

    router = SimpleNamespace(enable_expert_bias=False, local_tokens_per_expert=None)
    _count_load(router, torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool))
    assert router.local_tokens_per_expert is None
