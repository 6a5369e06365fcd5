"""A critic in a checkpoint, in one process: trained on as if it had not stopped, and left alone by what wants the policy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import OptimizerConfig
from models.optimizer import Optimizer
from moe_rl import checkpoint, checkpoint_paths
from moe_rl.checkpoint import CriticState, Progress
from parallel.errors import UsageError
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case
from tests.distributed.value_passes import both, same, set_head, update_policy, update_values, weights

SETTINGS = OptimizerConfig(lr=1e-2, schedule="linear", min_lr=1e-4, weight_decay=0.1)
BIASED: dict[str, Any] = dict(router_score="sigmoid", load_balancing="expert_bias", expert_bias_rate=0.1)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


VARIANTS: list[dict[str, Any]] = [{}, dict(dtype="bfloat16"), BIASED | dict(dense_layers=[1]), dict(tie_embeddings=True)]


def state(optimizer: Optimizer) -> list[Tensor]:
    """Of every part in order: master weights, moments and step counts."""
    parts = [part.optimizer for part in optimizer.megatron.chained_optimizers]
    pairs = [(p, part.state[p]) for part in parts for group in part.param_groups for p in group["params"]]
    return [t.detach().clone() for p, moments in pairs for t in (p, *(moments[name] for name in sorted(moments)))]


@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "bfloat16", "expert bias", "tied"])
def test_training_goes_on_as_if_it_had_not_stopped(runtime: Runtime, tmp_path: Path, variant: dict[str, Any]) -> None:
    """Two updates of both, saved, two more; against: loaded into models of other weights, two more. All equal to the bit."""

    def updates(policy: Any, optimizer: Optimizer, critic: CriticState, seeds: tuple[int, int]) -> list[float]:
        return [norm for i in seeds for norm in (update_policy(policy, optimizer, i), update_values(*critic, i))]

    with both(Case(model=variant), runtime) as (policy, model):
        optimizer, critic = policy.optimizer(SETTINGS, 20), CriticState(model, model.optimizer(SETTINGS, 20))
        updates(policy, optimizer, critic, (0, 1))
        path = checkpoint.save(tmp_path, Progress(3, 48, 12, 0.25), policy, optimizer, keep=2, critic=critic)
        norms = updates(policy, optimizer, critic, (2, 3))
        wanted = [weights(policy), weights(model)]
        states = state(optimizer) + state(critic.optimizer)
    with both(Case(model=variant, seed=100), runtime) as (policy, model):
        set_head(model, 1)
        optimizer, critic = policy.optimizer(SETTINGS, 20), CriticState(model, model.optimizer(SETTINGS, 20))
        assert checkpoint.load(path, policy, optimizer, critic) == Progress(3, 48, 12, 0.25)
        assert updates(policy, optimizer, critic, (2, 3)) == norms and all(norms)
        assert same(weights(policy), wanted[0]) and same(weights(model), wanted[1])
        ours = state(optimizer) + state(critic.optimizer)
        assert len(ours) == len(states) and all(torch.equal(a, b) for a, b in zip(ours, states, strict=True))
        assert critic.optimizer.lr == optimizer.lr


SMALL = Case(model=dict(layers=2))


@pytest.fixture(scope="module")
def saved(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Steps of two layers: one with a critic, one without."""
    folder = tmp_path_factory.mktemp("saved")
    with both(SMALL, runtime) as (policy, model):
        set_head(model, 4)
        optimizer, critic = policy.optimizer(SETTINGS, 20), CriticState(model, model.optimizer(SETTINGS, 20))
        having = checkpoint.save(folder / "a", Progress(1, 0, 0, 0.0), policy, optimizer, keep=1, critic=critic)
        return having, checkpoint.save(folder / "b", Progress(1, 0, 0, 0.0), policy, optimizer, keep=1)


def test_what_reads_a_policy_alone_does_not_see_the_critic(runtime: Runtime, saved: tuple[Path, Path]) -> None:
    having, lacking = saved
    assert checkpoint_paths.find(having.parent) == having
    with both(SMALL, runtime) as (policy, _):
        wanted = weights(policy)
    for path in saved:
        with both(Case(model=dict(layers=2), seed=1), runtime) as (policy, critic):
            assert not same(weights(policy), wanted)
            before = weights(critic)
            checkpoint.load_weights(path, policy)
            assert same(weights(policy), wanted)
            assert checkpoint.load(path, policy, policy.optimizer(SETTINGS, 20)).step == 1
            assert same(weights(policy), wanted) and same(weights(critic), before)


def test_another_runs_critic_is_taken_over_without_its_optimizer(runtime: Runtime, saved: tuple[Path, Path]) -> None:
    with both(SMALL, runtime) as (_, critic):
        set_head(critic, 4)
        wanted = weights(critic)
        assert wanted["value_head.weight"].any()
    with both(Case(model=dict(layers=2), seed=1), runtime) as (_, critic):
        checkpoint.load_critic_weights(saved[0], critic)
        assert same(weights(critic), wanted)


def test_a_step_without_a_critic_is_refused_where_one_is_wanted(runtime: Runtime, saved: tuple[Path, Path]) -> None:
    with both(SMALL, runtime) as (policy, model):
        critic, before = CriticState(model, model.optimizer(SETTINGS, 20)), weights(policy)
        with pytest.raises(UsageError, match=r"step_000001: holds no critic, .*; begin anew under another run\.name"):
            checkpoint.load(saved[1], policy, policy.optimizer(SETTINGS, 20), critic)
        with pytest.raises(UsageError, match=r"^some\.key=.*step_000001: holds no critic; name a checkpoint of a run that"):
            checkpoint.load_critic_weights(saved[1], model, "some.key")
        assert same(weights(policy), before)


def test_a_critic_of_another_model_and_a_policy_are_refused(runtime: Runtime, saved: tuple[Path, Path]) -> None:
    with both(Case(model=dict(layers=1)), runtime) as (_, critic):
        with pytest.raises(
            UsageError,
            match=r"critic: does not fit this model: model\.layers=1 \(the checkpoint: 2\); decoder\.layers\.1\.\S+ is ",
        ):
            checkpoint.load_critic_weights(saved[0], critic)
    with pytest.raises(
        UsageError, match=r"^checkpoint\.load=.*: is the critic in a checkpoint, no checkpoint; name .*step_000001$"
    ):
        checkpoint_paths.find(saved[0] / "critic")


def test_a_step_whose_critic_was_cut_off_does_not_count(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import dist_checkpointing

    write = dist_checkpointing.save

    def cut_off(content: Any, folder: str, *strategy: Any, **settings: Any) -> Any:
        if folder.endswith("critic"):
            raise KeyboardInterrupt
        return write(content, folder, *strategy, **settings)

    with both(SMALL, runtime) as (policy, model):
        optimizer, critic = policy.optimizer(SETTINGS, 20), CriticState(model, model.optimizer(SETTINGS, 20))
        first = checkpoint.save(tmp_path, Progress(1, 0, 0, 0.0), policy, optimizer, keep=1, critic=critic)
        monkeypatch.setattr(dist_checkpointing, "save", cut_off)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, Progress(2, 0, 0, 0.0), policy, optimizer, keep=1, critic=critic)
        assert checkpoint_paths.newest(tmp_path) == first
        monkeypatch.undo()
        second = checkpoint.save(tmp_path, Progress(2, 0, 0, 0.0), policy, optimizer, keep=1, critic=critic)
    assert [p.name for p in tmp_path.iterdir()] == [second.name]
    assert checkpoint_paths.find(tmp_path) == second and (second / "critic" / "metadata.json").exists()
