"""Replay through a whole model in one process: gates, gradients, recomputation, and passes that must not replay."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from models import build
from models.initialise import initialise
from models.layer_map import let_go_of_graphs, moe_modules
from models.model import MoEModel
from models.routes import filler_routes
from models.routing import Replay, RouteTap, check_replayed, install_taps, open_logs
from moe_rl.reference import Reference
from parallel.runtime import Runtime, started
from tests.distributed.forced import gradients, random_replay, random_streams, routes_of, watched
from tests.distributed.passes import Case, built

MIXED = Case(model=dict(dense_layers=[1]))  # layers 0, 2 and 3 route
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": dict(router_scale=2.5),
    "pre-softmax": dict(router_pre_softmax=True),
    "sigmoid with a bias": dict(router_score="sigmoid", load_balancing="expert_bias", router_scale=1.5),
    "groups": dict(router_groups=4, router_group_topk=1),
    "one expert": dict(topk=1, router_pre_softmax=True),
    "all experts": dict(topk=8),
    "shared expert": dict(shared_ffn=32),
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


def give_bias(model: MoEModel) -> None:
    for _, module in moe_modules(model.bare):
        if module.mlp.router.expert_bias is not None:
            module.mlp.router.expert_bias.copy_(torch.linspace(-0.4, 0.4, model.config.experts))


def gates_by_hand(logits: Tensor, chosen: Tensor, model: dict[str, Any]) -> Tensor:
    """[T, E] from live logits and the chosen ids [T, K]; the bias is no part of them."""
    if model.get("router_score") == "sigmoid":
        picked = logits.sigmoid().gather(1, chosen)
        picked = picked / picked.sum(1, keepdim=True)
    elif model.get("router_pre_softmax"):
        picked = logits.softmax(-1).gather(1, chosen)
    else:
        picked = logits.gather(1, chosen).softmax(-1)
    return torch.zeros_like(logits).scatter(1, chosen, picked * model.get("router_scale", 1.0))


@pytest.mark.parametrize("name", ROUTERS)
def test_forced_experts_have_their_live_gates(runtime: Runtime, name: str) -> None:
    """Cases 1, 7, 16 and 17. Gates of about 1, within 1e-5 of those made anew in float32."""
    case = Case(model=MIXED.model | ROUTERS[name])
    with built(case, runtime) as model:
        give_bias(model)
        streams = random_streams(case, 3)
        replay = random_replay(model, streams)
        with watched(model) as seen:
            model.score(streams, replay)
        assert sorted(seen) == [0, 2, 3]
        outside = 0
        for i, (stream, forced) in enumerate(zip(streams, replay, strict=True)):
            log = stream.routes
            assert log is not None
            for place, layer in enumerate(model.moe_layers):
                chosen, routed = forced.routes[:, place], seen[layer][i]
                wanted = gates_by_hand(routed.logits, chosen, case.model)
                torch.testing.assert_close(routed.gates, wanted, atol=1e-5, rtol=0)
                assert bool((routed.gates.gather(1, chosen) > 0).all())
                assert torch.equal(log.choice[layer], chosen)
                outside += int((log.live[layer] != chosen).any(1).sum())
        assert outside > sum(s.size for s in streams) if case.config.topk < 8 else outside == 0


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["softmax", "pre-softmax", "sigmoid with a bias"])
def test_forced_experts_give_the_router_its_gradient(runtime: Runtime, name: str, recompute: str) -> None:
    """Case 7: every token is sent to experts 2 and 5, whatever it would choose. Gates that are normalised over the two move
    the two experts' rows, in opposite directions where that is a softmax; a softmax over all experts moves them all."""
    case = Case(model=MIXED.model | ROUTERS[name] | dict(recompute=recompute))
    with built(case, runtime) as model:
        streams = random_streams(case, 3)
        replay = [Replay(torch.tensor([2, 5]).expand(s.size, 3, 2)) for s in streams]
        grads = gradients(model, streams, replay)
        live = torch.cat(routes_of(model, streams, "live"))
        assert (live != torch.tensor([2, 5])).any(-1).float().mean() > 0.8
        for layer in model.moe_layers:
            rows = grads[f"decoder.layers.{layer}.mlp.router.weight"]
            touched = (rows.abs().sum(1) > 1e-6).nonzero()[:, 0].tolist()
            assert touched == (list(range(8)) if name == "pre-softmax" else [2, 5])
            if name == "softmax":
                torch.testing.assert_close(rows[2], -rows[5], atol=1e-5, rtol=1e-4)


def test_replaying_what_a_pass_chose_changes_nothing(runtime: Runtime) -> None:
    """Case 17: equal to the bit, in scores and in every gradient."""
    with built(MIXED, runtime) as model:
        streams = random_streams(MIXED, 3, filler=2)
        free = model.score(streams)
        replay = [Replay(routes) for routes in routes_of(model, streams)]
        again = model.score(streams, replay)
        assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(free, again, strict=True))
        plain, forced = gradients(model, streams, None), gradients(model, streams, replay)
        assert all(torch.equal(forced[name], plain[name]) for name in plain)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("source", ["replay", "own"])
def test_recomputation_takes_its_own_streams_routes(runtime: Runtime, seed: int, source: str) -> None:
    """Cases 8 and 9: three forwards, then their recomputations in another order, as pipelines do; in between the routers
    change, as near-tied logits would. With replay and without, each microbatch keeps its own routes."""
    case = Case(seed=seed, model=MIXED.model | dict(recompute="full"))
    with built(case, runtime) as model:
        streams = random_streams(case, 3)
        open_logs(streams, random_replay(model, streams, seed) if source == "replay" else None, model.moe_layers)
        model.bare[0].train()
        generator = torch.Generator().manual_seed(seed)
        with watched(model) as seen:
            scores = [model._forward(model.bare[0], stream) for stream in streams]
            forced = routes_of(model, streams)
            with torch.no_grad():
                for _, module in moe_modules(model.bare):
                    module.mlp.router.weight.normal_(0.0, 0.1, generator=generator)
            order = (2, 0, 1)
            for i in order:
                scores[i].logprobs.sum().backward()
        let_go_of_graphs(model.bare)
        check_replayed(streams, model.moe_layers)
        for i, routes in enumerate(routes_of(model, streams)):
            assert torch.equal(routes, forced[i])
            for place, layer in enumerate(model.moe_layers):
                first, second = seen[layer][i], seen[layer][3 + order.index(i)]
                used = torch.zeros_like(first.gates).scatter(1, routes[:, place], 1.0) > 0
                assert torch.equal(first.gates > 0, used) and torch.equal(second.gates > 0, used)
                assert not torch.allclose(first.gates, second.gates)


def test_only_the_pass_that_is_told_replays(runtime: Runtime) -> None:
    """Case 11: the reference's pass between two of the policy's chooses by itself, and so does a scoring pass."""
    with built(MIXED, runtime) as model:
        reference = Reference(model)
        streams = random_streams(MIXED, 3)
        alone = [s.logprobs for s in model.score(streams)]
        reference_routes = routes_of(model, streams)
        initialise(model.bare, model.config, model.groups, 5)
        free = [s.logprobs for s in model.score(streams)]
        replay = random_replay(model, streams)
        first = [s.logprobs for s in model.score(streams, replay)]
        with reference.in_place():
            between = [s.logprobs for s in model.score(streams)]
        logs = [stream.routes for stream in streams]
        assert all(log is not None and log.replay is None and not log.kept and not log.agreed for log in logs)
        assert all(torch.equal(a, b) for a, b in zip(routes_of(model, streams), reference_routes, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(between, alone, strict=True))
        again = [s.logprobs for s in model.score(streams, replay)]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        after = [s.logprobs for s in model.score(streams)]
        assert all(torch.equal(a, b) for a, b in zip(after, free, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(first, free, strict=True))


class Deaf:
    """Takes the replay and ignores it for one row of one stream."""

    def __init__(self, tap: RouteTap, stream: Any, row: int) -> None:
        self.tap, self.stream, self.row = tap, stream, row

    def get_replay_topk(self, scores: Tensor, topk: int, groups: Any, group_topk: Any, default: Any) -> tuple[Tensor, Tensor]:
        _, chosen = self.tap.get_replay_topk(scores, topk, groups, group_topk, default)
        if self.tap.stream is self.stream:
            chosen = chosen.clone()
            chosen[self.row] = default(scores, topk, num_groups=groups, group_topk=group_topk)[1][self.row]
        return scores.gather(1, chosen), chosen


@pytest.mark.parametrize("training", [False, True])
def test_a_router_that_ignores_the_replay_is_an_error(runtime: Runtime, training: bool) -> None:
    """Case 10: on one layer, for one token of the second of three microbatches."""
    with built(MIXED, runtime) as model:
        streams = random_streams(MIXED, 3)
        replay = random_replay(model, streams)
        model.score(streams, replay)
        live, forced = routes_of(model, streams, "live")[1][:, 1], replay[1].routes[:, 1]
        row = int((live != forced).any(1).nonzero()[-1])
        router = moe_modules(model.bare)[1][1].mlp.router
        router.router_replay = Deaf(model.taps[1], streams[1], row)
        with pytest.raises(
            RuntimeError, match=f"replay, layer 2, microbatch 1, sample 11, token {row}: the router did not use"
        ):
            gradients(model, streams, replay) if training else model.score(streams, replay)


def test_layers_that_were_rebuilt_are_noticed_and_taps_find_them(runtime: Runtime) -> None:
    """Case 4."""
    with built(MIXED, runtime) as model:
        streams = random_streams(MIXED, 2)
        replay = random_replay(model, streams)
        fresh = build.build_chunks(model.config, model.groups, model.megatron_config)
        initialise(fresh, model.config, model.groups, 3)
        model.bare[0].decoder.layers[2] = fresh[0].decoder.layers[2]
        with pytest.raises(RuntimeError, match=r"microbatch 0: layers \[2\] were given routes, but their routers did not run"):
            model.score(streams, replay)
        model.score(streams)
        with pytest.raises(RuntimeError, match=r"no routes were recorded on layers \[2\]"):
            routes_of(model, streams)
        assert [tap.layer for tap in install_taps(model.bare)] == [0, 2, 3]
        model.score(streams, replay)
        assert all(torch.equal(a, b.routes) for a, b in zip(routes_of(model, streams), replay, strict=True))


def test_filler_loads_all_experts_alike(runtime: Runtime) -> None:
    """Cases 2 and 3: a stream of filler alone reaches every expert equally often, and no token is lost."""
    with built(MIXED, runtime) as model:
        stream = random_streams(MIXED, 1, filler=16)[0]
        routes = random_replay(model, [stream])[0].routes
        routes[stream.real :] = filler_routes(16, 2, 8)[:, None]
        with watched(model) as seen:
            model.score([stream], [Replay(routes)])
        for layer in model.moe_layers:
            used = seen[layer][0].gates[stream.real :] > 0
            assert used.sum(0).tolist() == [4] * 8 and used.sum(1).tolist() == [2] * 16
