"""A step's passes in one process: what is replayed in which, and drift that must be zero where nothing has moved."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import OptimizerConfig
from models.layer_map import moe_modules
from models.model import MoEModel
from models.optimizer import Optimizer
from moe_rl.algorithms.config import AlgorithmSection
from moe_rl.collectives import reduce_drift
from moe_rl.config import DriftSection, ReplaySection, RolloutSection
from moe_rl.drift.sums import to_metrics
from moe_rl.reference import Reference
from moe_rl.replay import check_rollout_routes
from moe_rl.types import Problem, Response, Rollout
from moe_rl.update import Minibatch, PolicyUpdate
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built, sample_batch

MIXED = Case(model=dict(dense_layers=[1]))  # layers 0, 2 and 3 route
COUNT = 8


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


def rollouts_of(case: Case) -> list[Rollout]:
    sequences, prompts, _ = sample_batch(case.config, case.seed, COUNT)
    return [
        Rollout(i, Problem(str(i), "", ""), s[:p], Response(s[p:], [-5.0] * (len(s) - p), "stop"), "", 0.0)
        for i, (s, p) in enumerate(zip(sequences, prompts, strict=True))
    ]


def policy_of(model: MoEModel, mode: str = "off", epochs: int = 1, **replay: Any) -> PolicyUpdate:
    algorithm = AlgorithmSection(name="grpo", minibatches=2, epochs=epochs, microbatch_tokens=40)
    section = ReplaySection.model_validate(dict(mode=mode) | replay)
    return PolicyUpdate(model, algorithm, RolloutSection(), DriftSection(scores_share=1.0), section)


def engine_routes(model: MoEModel, rollouts: list[Rollout], seed: int = 0) -> dict[int, Tensor]:
    """Such as no router of ours would choose: each sample's, of all its tokens but the last."""
    generator, config, held = torch.Generator().manual_seed(seed), model.config, {}
    for rollout in rollouts:
        tokens = len(rollout.prompt_ids) + len(rollout.response.token_ids) - 1
        routes = torch.rand(tokens, len(model.moe_layers), config.experts, generator=generator).topk(config.topk).indices
        held[rollout.index] = check_rollout_routes(routes, rollout.index, tokens, model.moe_layers, config.topk, config.experts)
    return held


def prepared(policy: PolicyUpdate, rollouts: list[Rollout], routes: dict[int, Tensor] | None = None) -> list[Minibatch]:
    """With an advantage for each sequence, from -1 to 1."""
    minibatches = policy.prepare(rollouts, 0, 1, routes)
    for part in (part for minibatch in minibatches for part in minibatch.parts):
        part.advantages = torch.linspace(-1, 1, len(rollouts))[part.microbatch.members][part.sequence]
    return minibatches


def adam(model: MoEModel, lr: float = 0.02) -> Optimizer:
    return model.optimizer(OptimizerConfig(lr=lr), total_updates=10)


def own_routes(minibatch: Minibatch, routes: dict[int, Tensor]) -> list[Tensor]:
    """What each stream's tokens should have: the samples' own routes, one after the other (without filler here)."""
    return [torch.cat([routes[i] for i in part.microbatch.members]).long() for part in minibatch.parts]


def used(minibatch: Minibatch, what: str = "choice") -> list[Tensor]:
    return [part.microbatch.stream.routes.stacked([0, 2, 3], what).clone() for part in minibatch.parts]  # pyright: ignore


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def drift_of(policy: PolicyUpdate, updates: list[Any]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for view in updates[0].drift:
        sums = reduce_drift([update.drift[view] for update in updates])
        metrics |= to_metrics(sums, policy.model.config.moe_layers, "update", view or None)
    return metrics


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("mode", ["off", "r2", "r3"])
def test_at_the_first_minibatch_nothing_has_drifted(runtime: Runtime, mode: str, recompute: str) -> None:
    """Case 31: the passes before and in the first update have the same weights and batches, so on the CPU every measure is
    exactly 0, in the routers' own choices too; in the second update the weights have moved, and none is."""
    with built(Case(model=MIXED.model | dict(recompute=recompute)), runtime) as model:
        policy, rollouts = policy_of(model, mode), rollouts_of(MIXED)
        minibatches = prepared(policy, rollouts, engine_routes(model, rollouts) if mode == "r3" else None)
        policy.score_old(minibatches)
        optimizer = adam(model)
        updates = [policy.step(minibatch, optimizer, None) for minibatch in minibatches]
        moved = "" if mode == "off" else "local/"
        for metric in ("expert_change_rate", "flip_rate"):
            for layer in ("layer_00", "layer_02", "layer_03", "worst"):
                rates = [drift_of(policy, updates)[f"drift/update/{moved}{metric}/{layer}/minibatch_{i}"] for i in (0, 1)]
                assert rates[0] == 0 < rates[1]
        first, second = (drift_of(policy, [update]) for update in updates)
        for metric in ("router_kl", "gate_shift"):
            assert first[f"drift/update/{metric}/worst"] == 0 < second[f"drift/update/{metric}/mean"]
        assert first[f"drift/update/{moved}jaccard/mean"] == 1 and first[f"drift/update/{moved}any_layer_flip_rate"] == 0
        assert first["drift/update/margin/worst"] > 0
        if mode != "off":  # the routes used are forced ones
            assert second["drift/update/expert_change_rate/worst"] == 0
        assert updates[0].metrics is not None
        assert updates[0].metrics.means()["ratio/mean"] == pytest.approx(1.0, abs=1e-6)


def test_the_rollouts_routes_are_replayed_in_the_old_pass_and_every_update(runtime: Runtime) -> None:
    """Case 12: each sample's routes at its own tokens, through minibatches and microbatches of several samples. Case 11: the
    reference's pass between them is as free as it was before."""
    with built(MIXED, runtime) as model:
        reference, rollouts = Reference(model), rollouts_of(MIXED)
        free = policy_of(model)
        plain = prepared(free, rollouts)
        free.score_old(plain)
        model_routes = [used(m) for m in plain]
        optimizer = adam(model)
        free.step(plain[0], optimizer, None)  # now policy and reference differ
        policy, routes = policy_of(model, "r3"), engine_routes(model, rollouts)
        minibatches = prepared(policy, rollouts, routes)
        policy.score_old(minibatches)
        assert any(len(part.microbatch.members) > 1 for m in minibatches for part in m.parts)
        for minibatch in minibatches:
            assert equal(used(minibatch), own_routes(minibatch, routes))
        policy.score_reference(minibatches, reference)
        for i, minibatch in enumerate(minibatches):
            assert equal(used(minibatch), model_routes[i])
            for part, old in zip(minibatch.parts, plain[i].parts, strict=True):
                assert part.ref_logprobs is not None and old.old_logprobs is not None
                assert torch.equal(part.ref_logprobs, old.old_logprobs)
        for minibatch in minibatches * 2:
            policy.step(minibatch, optimizer, None)
            assert equal(used(minibatch), own_routes(minibatch, routes))


def test_the_old_passs_routes_are_replayed_in_updates_alone(runtime: Runtime) -> None:
    with built(MIXED, runtime) as model:
        policy, rollouts = policy_of(model, "r2"), rollouts_of(MIXED)
        minibatches = prepared(policy, rollouts)
        policy.score_old(minibatches)
        assert all(part.microbatch.stream.routes.replay is None for m in minibatches for part in m.parts)  # pyright: ignore
        old = [used(m) for m in minibatches]
        optimizer = adam(model)
        for i, minibatch in enumerate(minibatches * 2):
            policy.step(minibatch, optimizer, None)
            assert equal(used(minibatch), old[i % 2])
            assert equal(used(minibatch, "live"), old[i % 2]) == (i == 0)  # the routers have long moved on


def test_filtered_replay_lies_between_replay_and_none(runtime: Runtime) -> None:
    """Kept entries are the old pass's, all others the live router's. A share near 0 keeps all, one of 1 what is live anyway."""
    refused = []
    for share in (1e-6, 0.7, 1.0):
        with built(MIXED, runtime) as model:
            policy, rollouts = policy_of(model, "filtered", keep_share=share), rollouts_of(MIXED)
            minibatches = prepared(policy, rollouts)
            policy.score_old(minibatches)
            old, optimizer = used(minibatches[1]), adam(model)
            for minibatch in minibatches:
                policy.step(minibatch, optimizer, None)
            count = 0
            for i, (choice, live) in enumerate(zip(used(minibatches[1]), used(minibatches[1], "live"), strict=True)):
                log = minibatches[1].parts[i].microbatch.stream.routes
                kept = torch.stack([log.kept[layer] for layer in (0, 2, 3)], dim=1)  # pyright: ignore
                count += int((~kept).sum())
                stays = (choice[..., :, None] == old[i][..., None, :]).any(-1)
                assert bool((stays | (choice[..., :, None] == live[..., None, :]).any(-1)).all())
                assert bool(((old[i][..., :, None] == choice[..., None, :]).any(-1) | ~kept).all())
                if share == 1.0:
                    assert torch.equal(choice, live)
            refused.append(count)
    assert refused[0] == 0 < refused[1] < refused[2]


def test_a_sample_without_routes_is_named(runtime: Runtime) -> None:
    """Case 14."""
    with built(MIXED, runtime) as model:
        policy, rollouts = policy_of(model, "r3"), rollouts_of(MIXED)
        routes = engine_routes(model, rollouts)
        del routes[5]
        with pytest.raises(ValueError, match="rollout routes, sample 5: no rank has them"):
            prepared(policy, rollouts, routes)
        with pytest.raises(ValueError, match=r"replay\.mode=r3: the rollout engine recorded no routes"):
            prepared(policy, rollouts)


def test_unknown_rollout_routes_are_the_live_routers(runtime: Runtime) -> None:
    """Case 12: of one sample everything, of the others nothing is unknown; where unknown, used is what is live, and the log
    counts it."""
    with built(MIXED, runtime) as model:
        policy, rollouts = policy_of(model, "r3"), rollouts_of(MIXED)
        routes = engine_routes(model, rollouts)
        routes[3] = torch.full_like(routes[3], -1, dtype=torch.int16)
        minibatches = prepared(policy, rollouts, routes)
        policy.score_old(minibatches)
        unknown = 0
        for minibatch in minibatches:
            for part, choice, live in zip(minibatch.parts, used(minibatch), used(minibatch, "live"), strict=True):
                stream, wanted = part.microbatch.stream, own_routes(Minibatch([], [part], minibatch.denominators, 0), routes)[0]
                mine = torch.tensor([stream.samples[int(row)] == 3 for row in stream.row])
                assert torch.equal(choice[mine], live[mine]) and torch.equal(choice[~mine], wanted[~mine])
                unknown += sum(int((~kept).sum()) for kept in stream.routes.kept.values())  # pyright: ignore
        assert unknown == routes[3].numel()


def test_without_instruments_and_replay_routers_need_not_show_what_they_choose(runtime: Runtime) -> None:
    """As a fused router does not: it never asks the tap."""
    with built(MIXED, runtime) as model:
        for _, module in moe_modules(model.bare):
            module.mlp.router.router_replay = None
        algorithm = AlgorithmSection(name="grpo", minibatches=2, microbatch_tokens=40)
        policy = PolicyUpdate(model, algorithm, RolloutSection(), DriftSection(enabled=False), ReplaySection())
        minibatches = prepared(policy, rollouts_of(MIXED))
        policy.score_old(minibatches)
        optimizer = adam(model)
        updates = [policy.step(minibatch, optimizer, None) for minibatch in minibatches]
        assert [update.drift for update in updates] == [{}, {}] and updates[1].grad_norm > 0
        with pytest.raises(RuntimeError, match=r"no routes were recorded on layers \[0, 2, 3\]"):
            policy_of(model).score_old(minibatches)


@pytest.mark.parametrize(("name", "clip"), [("grpo", 0.02), ("gspo", 0.01)])
def test_the_tokens_that_are_called_clipped_are_those_that_the_loss_counts(runtime: Runtime, name: str, clip: float) -> None:
    """Under GSPO whole sequences: a token's gradient is cut where its sequence's is."""
    with built(MIXED, runtime) as model:
        algorithm = AlgorithmSection.model_validate(dict(name=name, minibatches=2, clip_low=clip, clip_high=clip))
        policy = PolicyUpdate(model, algorithm, RolloutSection(), DriftSection(), ReplaySection())
        minibatches = prepared(policy, rollouts_of(MIXED))
        policy.score_old(minibatches)
        optimizer = adam(model)
        first, second = (policy.step(minibatch, optimizer, None) for minibatch in minibatches)
        counts = []
        for update, minibatch in zip((first, second), minibatches, strict=True):
            cut = [policy.gradient_cut(part, minibatch.denominators) for part in minibatch.parts]
            if name == "gspo":
                cut = [c.split(torch.bincount(p.sequence).tolist()) for c, p in zip(cut, minibatch.parts, strict=True)]
                assert all(len(set(sequence.tolist())) == 1 for part in cut for sequence in part)
                cut = [torch.stack([sequence[0] for sequence in part]) for part in cut]
            counts.append(float(torch.cat(list(cut)).double().mean()))
            assert update.metrics is not None
            assert counts[-1] == pytest.approx(update.metrics.means()["ratio/clip_fraction"])
        assert counts[0] == 0 < counts[1] < 1
