"""Case 11: with replay on, the reference and the critic choose their own experts and leave the policy's replay as it was."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import OptimizerConfig
from models.model import MoEModel
from moe_rl.algorithms.config import AlgorithmSection, CriticOptimizer, CriticSection
from moe_rl.config import DriftSection, ReplaySection, RolloutSection
from moe_rl.critic import Critic
from moe_rl.microbatches import Minibatch, Prepared
from moe_rl.reference import Reference
from moe_rl.replay import Routes, check_rollout_routes
from moe_rl.types import Problem, Response, Rollout
from moe_rl.update import PolicyUpdate
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built, sample_batch

CASE = Case(model=dict(dense_layers=[1]))
LAYERS = [0, 2, 3]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


def rollouts() -> list[Rollout]:
    sequences, prompts, _ = sample_batch(CASE.config, CASE.seed, 8)
    return [
        Rollout(i, Problem(str(i), "", ""), s[:p], Response(s[p:], [-5.0] * (len(s) - p), "stop"), "", 0.0)
        for i, (s, p) in enumerate(zip(sequences, prompts, strict=True))
    ]


def engine_routes(model: MoEModel) -> Routes:
    """Such as no router of ours would choose."""
    generator, config, held = torch.Generator().manual_seed(0), model.config, {}
    for rollout in rollouts():
        tokens = len(rollout.prompt_ids) + len(rollout.response.token_ids) - 1
        routes = torch.rand(tokens, len(LAYERS), config.experts, generator=generator).topk(config.topk).indices
        held[rollout.index] = check_rollout_routes(routes, rollout.index, tokens, LAYERS, config.topk, config.experts)
    return held


def policy_of(model: MoEModel, mode: str) -> PolicyUpdate:
    algorithm = AlgorithmSection(name="ppo", minibatches=2, microbatch_tokens=40)
    return PolicyUpdate(model, algorithm, RolloutSection(), DriftSection(), ReplaySection.model_validate({"mode": mode}))


def prepared(policy: PolicyUpdate) -> list[Minibatch]:
    minibatches = policy.prepare(rollouts(), 0, 1, engine_routes(policy.model))
    for part in parts_of(minibatches):
        part.advantages = torch.linspace(-1, 1, len(part.sequence))
        part.returns = torch.ones(len(part.sequence))
    return minibatches


def parts_of(minibatches: list[Minibatch]) -> list[Prepared]:
    return [part for minibatch in minibatches for part in minibatch.parts]


def chosen(part: Prepared) -> Tensor:
    log = part.microbatch.stream.routes
    assert log is not None
    return log.stacked(LAYERS).clone()


def assert_free(parts: list[Prepared]) -> None:
    """The pass before this was made by the routers alone."""
    for part in parts:
        log = part.microbatch.stream.routes
        assert log is not None and log.replay is None and log.kept == log.agreed == {}
        assert all(torch.equal(log.choice[layer], log.live[layer]) for layer in LAYERS)


@pytest.mark.parametrize("mode", ["r2", "r3", "filtered"])
def test_reference_and_critic_replay_nothing_and_disturb_no_replay(runtime: Runtime, mode: str) -> None:
    with built(CASE, runtime) as model:
        plain = policy_of(model, "off")
        free = prepared(plain)
        plain.score_old(free)
        free_routes, free_logprobs = [chosen(p) for p in parts_of(free)], [p.old_logprobs for p in parts_of(free)]
        policy, reference = policy_of(model, mode), Reference(model)
        minibatches = prepared(policy)
        policy.score_old(minibatches)
        parts = parts_of(minibatches)
        held = [part.replay for part in parts]
        assert all(replay is not None for replay in held)
        before = [replay.routes.clone() for replay in held if replay is not None]

        policy.score_reference(minibatches, reference)
        assert_free(parts)
        # the reference is what the policy is now: as free as the free pass, to the bit, and not as the replaying one
        for part, routes, logprobs in zip(parts, free_routes, free_logprobs, strict=True):
            assert part.ref_logprobs is not None and logprobs is not None
            assert torch.equal(chosen(part), routes) and torch.equal(part.ref_logprobs, logprobs)
        assert mode != "r3" or any(not torch.equal(a.ref_logprobs, a.old_logprobs) for a in parts)  # pyright: ignore

        critic = Critic(model, CriticSection(optimizer=CriticOptimizer(lr=0.01)), 0, 10)
        critic.score(minibatches)
        assert_free(parts)
        for part, routes in zip(parts, free_routes, strict=True):
            assert torch.equal(chosen(part), routes)  # it has the policy's trunk still
            assert part.old_values is not None and part.old_values.tolist() == [0.0] * len(part.sequence)

        optimizer = model.optimizer(OptimizerConfig(lr=0.02), total_updates=10)
        for minibatch in minibatches * 2:
            critic.step(minibatch)
            assert_free(minibatch.parts)
            policy.step(minibatch, optimizer, None)
            for part in minibatch.parts:  # and yet the policy's update was held to its routes
                log = part.microbatch.stream.routes
                assert log is not None and part.replay is not None and log.replay is part.replay
                if mode != "filtered":
                    assert torch.equal(chosen(part), part.replay.routes.long())
        for part, replay, routes in zip(parts, held, before, strict=True):
            assert replay is not None and part.replay is replay and torch.equal(replay.routes, routes)
        assert any(not torch.equal(chosen(p), live(p)) for p in parts)  # the routers would have gone elsewhere


def live(part: Prepared) -> Any:
    log = part.microbatch.stream.routes
    assert log is not None
    return log.stacked(LAYERS, "live")


def test_what_was_recorded_of_the_old_pass_outlives_the_critics(runtime: Runtime) -> None:
    """The critic's passes overwrite the stream's log; drift compares with what was recorded before."""
    drifts = []
    for with_critic in (False, True):
        with built(CASE, runtime) as model:
            policy = policy_of(model, "off")
            minibatches = prepared(policy)
            policy.score_old(minibatches)
            if with_critic:
                critic = Critic(model, CriticSection(optimizer=CriticOptimizer(lr=0.05)), 0, 10)
                critic.score(minibatches)
            optimizer = model.optimizer(OptimizerConfig(lr=0.02), total_updates=10)
            for minibatch in minibatches:
                if with_critic:
                    critic.step(minibatch)  # pyright: ignore[reportPossiblyUnboundVariable]
                drifts.append(policy.step(minibatch, optimizer, None).drift[""].vector())
    assert torch.equal(drifts[0], drifts[2]) and torch.equal(drifts[1], drifts[3])
    assert not torch.equal(drifts[0], drifts[1])
