"""What a process keeps of models and groups that it has done with: nothing, however many it builds."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest

from models.config import OptimizerConfig
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case
from tests.distributed.value_passes import both, update_policy, update_values

CASES = {
    "plain": Case(),
    "recomputed": Case(model=dict(recompute="full")),
    "shared expert, dense layer": Case(model=dict(shared_ffn=32, dense_layers=[1])),
    "all-gather": Case(layout=dict(dispatcher="allgather")),
    "auxiliary loss": Case(model=dict(load_balancing="aux_loss", tie_embeddings=True)),
}


def gloo_threads() -> int:
    names = (Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task"))
    return sum("gloo" in name for name in names)


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_has_trained_is_freed_and_its_groups_with_it(name: str) -> None:
    """The last pass has gradients, as a critic's has in PPO. Groups go where the world goes on, too."""
    with started(seed=0, threads=1, timeout_seconds=60) as runtime:
        gc.collect()
        before = gloo_threads()
        for _ in range(2):  # a second build finds what the first has left
            left, most = built_and_trained(CASES[name], runtime)
            gc.collect()
            assert [ref() for ref in left] == [None, None]
            assert gloo_threads() - before < (most - before) / 10


def built_and_trained(case: Case, runtime: Runtime) -> tuple[list[weakref.ref[Any]], int]:
    """The modules, weakly, and how many threads there were beside them."""
    with both(case, runtime) as (policy, critic):
        update_policy(policy, policy.optimizer(OptimizerConfig(lr=1e-2), 10), 0)
        update_values(critic, critic.optimizer(OptimizerConfig(lr=1e-2), 10), 0)
        return [weakref.ref(policy.bare[0]), weakref.ref(critic.bare[0])], gloo_threads()
