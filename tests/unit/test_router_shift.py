"""RSPO's factor: by hand, and measured in a model against its full router scores."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from models.config import OptimizerConfig
from models.layer_map import moe_modules
from models.model import MoEModel
from moe_rl.algorithms.config import AlgorithmSection
from moe_rl.config import DriftSection, ReplaySection, RolloutSection
from moe_rl.microbatches import Minibatch
from moe_rl.router_shift import log_factor, measure_router_shift
from moe_rl.types import Problem, Response, Rollout
from moe_rl.update import PolicyUpdate
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built, sample_batch

LAYERS = [0, 2, 3]  # layer 1 is dense


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


def test_the_factor_by_hand() -> None:
    # Means over layers: 0, 0.1, (0.05 + 0.25) / 2 = 0.15, 0.5, 1e4; the floor 0.8 is at 0.2231
    shifts = torch.tensor([[0.0, 0.0], [0.1, 0.1], [0.05, 0.25], [0.5, 0.5], [1e4, 1e4]], dtype=torch.float64)
    wanted = [0, -0.1, -0.15, math.log(0.8), math.log(0.8)]
    assert log_factor(shifts, 0.8).tolist() == pytest.approx(wanted, abs=1e-12)
    assert log_factor(shifts[:1], 0.8).exp().tolist() == [1]


def test_the_mean_is_over_layers_before_the_floor() -> None:
    """One layer far off, three still: exp(-1 / 4) = 0.78 is above the floor 0.5, which that layer alone would break."""
    assert log_factor(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), 0.5).tolist() == pytest.approx([-0.25])
    assert log_factor(torch.tensor([[1.0]]), 0.5).tolist() == pytest.approx([math.log(0.5)])


def test_a_floor_of_1_switches_it_off() -> None:
    assert log_factor(torch.tensor([[0.3], [0.0]]), 1.0).tolist() == [0, 0]


def test_no_tokens() -> None:
    assert log_factor(torch.zeros(0, 3), 0.8).tolist() == []


def prepared(model: MoEModel, mode: str = "off", floor: float = 0.8) -> tuple[PolicyUpdate, list[Minibatch]]:
    """Two minibatches of several microbatches, with an advantage for each sequence."""
    case = Case(model=dict(dense_layers=[1]))
    sequences, prompts, _ = sample_batch(case.config, 0, 8)
    rollouts = [
        Rollout(i, Problem(str(i), "", ""), s[:p], Response(s[p:], [-5.0] * (len(s) - p), "stop"), "", 0.0)
        for i, (s, p) in enumerate(zip(sequences, prompts, strict=True))
    ]
    algorithm = AlgorithmSection(name="gmpo", minibatches=2, microbatch_tokens=40, router_shift=True, router_shift_floor=floor)
    replay = ReplaySection.model_validate({"mode": mode})
    policy = PolicyUpdate(model, algorithm, RolloutSection(), DriftSection(enabled=False), replay)
    minibatches = policy.prepare(rollouts, 0, 1)
    for part in (part for minibatch in minibatches for part in minibatch.parts):
        part.advantages = torch.linspace(-1, 1, 8)[part.microbatch.members][part.sequence]
    policy.score_old(minibatches)
    return policy, minibatches


def router_probabilities(model: MoEModel, minibatch: Minibatch) -> list[Tensor]:
    """By microbatch [T, 3, E]: log of the softmax over all experts of what each router's weights make of its own inputs."""
    seen: dict[int, Tensor] = {}
    hooks = []
    for layer, module in moe_modules(model.bare):

        def note(router: torch.nn.Module, args: tuple[Tensor, ...], output: object, layer: int = layer) -> None:
            seen[layer] = args[0].detach().flatten(0, -2).double() @ router.weight.detach().double().t()  # pyright: ignore

        hooks.append(module.mlp.router.register_forward_hook(note))
    found = []
    for stream in minibatch.streams:
        model.score([stream])
        found.append(torch.stack([seen[layer] for layer in LAYERS], dim=1).log_softmax(-1))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("mode", ["off", "r2"])
def test_with_unchanged_weights_the_factor_is_exactly_1(runtime: Runtime, mode: str) -> None:
    with built(Case(model=dict(dense_layers=[1])), runtime) as model:
        policy, minibatches = prepared(model, mode)
        for minibatch in minibatches:
            replay = [part.replay for part in minibatch.parts if part.replay is not None] or None
            measure_router_shift(policy.observer, minibatch.parts, replay, 0.8)
            for part in minibatch.parts:
                assert part.log_router_shift is not None
                assert part.log_router_shift.tolist() == [0.0] * len(part.sequence) != []


def test_after_an_update_it_is_what_full_router_scores_say(runtime: Runtime) -> None:
    """exp(-mean over layers and the two old experts of |log p_new - log p_old|), at the position that decides the token."""
    with built(Case(model=dict(dense_layers=[1])), runtime) as model:
        policy, (first, second) = prepared(model, floor=0.001)
        old = router_probabilities(model, second)
        optimizer = model.optimizer(OptimizerConfig(lr=0.02), total_updates=10)
        update = policy.step(first, optimizer, None, moved=False)
        assert update.metrics is not None and "router_shift/factor_mean" not in update.metrics.means()
        assert all(part.log_router_shift is None for part in first.parts)  # nothing has moved yet, and no pass is made
        new = router_probabilities(model, second)
        wanted = []
        for part, before, after in zip(second.parts, old, new, strict=True):
            chosen = before.topk(2, dim=-1).indices
            moved = (after - before).gather(-1, chosen).abs().mean((1, 2))
            wanted.append((-moved)[part.microbatch.stream.score_at])
        update = policy.step(second, optimizer, None)
        found = [part.log_router_shift for part in second.parts if part.log_router_shift is not None]
        assert torch.cat(wanted).max() < -0.01  # far from 1 ...
        assert len({round(float(x), 4) for x in torch.cat(wanted)}) > 20  # ... and from each other
        torch.testing.assert_close(torch.cat(found).double(), torch.cat(wanted), atol=1e-5, rtol=0)
        assert update.metrics is not None
        mean = float(torch.cat(wanted).exp().mean())
        assert update.metrics.means()["router_shift/factor_mean"] == pytest.approx(mean, abs=1e-5)


def test_the_floor_holds_in_a_step_and_the_ratio_has_the_factor(runtime: Runtime) -> None:
    """With the routers turned around every token is at the floor; log ratio = log train - log old + log 0.9."""
    with built(Case(model=dict(dense_layers=[1])), runtime) as model:
        policy, (_, second) = prepared(model, floor=0.9)
        for _, module in moe_modules(model.bare):
            with torch.no_grad():
                module.mlp.router.weight.mul_(-1)
        optimizer = model.optimizer(OptimizerConfig(lr=0.0), total_updates=10)
        update = policy.step(second, optimizer, None)
        ratios = []
        for part in second.parts:
            assert part.log_router_shift is not None and part.train_logprobs is not None and part.old_logprobs is not None
            assert part.log_router_shift.tolist() == pytest.approx([math.log(0.9)] * len(part.sequence))
            ratios.append((part.train_logprobs - part.old_logprobs).double() + math.log(0.9))
        assert update.metrics is not None
        assert update.metrics.means()["ratio/log_abs_mean"] == pytest.approx(float(torch.cat(ratios).abs().mean()), abs=1e-6)


def test_along_replayed_routes_the_old_choice_is_the_replayed_one(runtime: Runtime) -> None:
    """The measuring pass replays too, so that inputs of later routers are those of the update."""
    with built(Case(model=dict(dense_layers=[1])), runtime) as model:
        policy, (first, second) = prepared(model, "r2", floor=0.001)
        optimizer = model.optimizer(OptimizerConfig(lr=0.02), total_updates=10)
        policy.step(first, optimizer, None, moved=False)
        replay = [part.replay for part in second.parts if part.replay is not None]
        measure_router_shift(policy.observer, second.parts, replay, 0.001)
        for part, forced in zip(second.parts, replay, strict=True):
            log = part.microbatch.stream.routes
            assert log is not None and log.replay is forced
            assert torch.equal(log.stacked(LAYERS), forced.routes.long())
            assert part.log_router_shift is not None and float(part.log_router_shift.max()) < 0
