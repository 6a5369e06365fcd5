"""The probe set in one process: how far things moved, and a second pass, for the noise, that really has another shape."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from models.layer_map import moe_modules
from models.model import Scores
from models.stream import Stream
from moe_rl.algorithms.config import AlgorithmSection
from moe_rl.config import DriftSection, ReplaySection, RolloutSection
from moe_rl.drift.probe import ProbeSet
from moe_rl.types import Problem, Response, Rollout
from moe_rl.update import PolicyUpdate
from parallel.errors import UsageError
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


def rollout(index: int, tokens: int) -> Rollout:
    """Of which `tokens` enter the model, the first as prompt."""
    response = Response([(7 * index + i) % 250 for i in range(tokens)], [-5.0] * tokens, "length")
    return Rollout(index, Problem(str(index), "", ""), [index], response, "", 0.0)


@pytest.mark.parametrize(
    ("lengths", "budget", "first", "second"),
    [
        ([6, 6, 6, 6], 100, [24], [12, 12]),
        ([5, 3, 4, 4], 8, [8, 8], [4, 4, 3, 5]),
        ([6, 6, 6, 6], 6, [6, 6, 6, 6], [12, 12]),  # as when each of four ranks has one
        ([6, 6, 6], 6, [6, 6, 6], [12, 6]),
        ([9], 100, [9], [18]),
        ([1], 100, [1], [2]),
    ],
)
def test_noise_is_measured_in_another_batch_shape(
    runtime: Runtime, tmp_path: Path, lengths: list[int], budget: int, first: list[int], second: list[int]
) -> None:
    with built(Case(), runtime) as model:
        update = PolicyUpdate(model, AlgorithmSection(), RolloutSection(), DriftSection(), ReplaySection())
        probe = ProbeSet(update, 16, budget, tmp_path)
        probe.begin([rollout(i, tokens) for i, tokens in enumerate(lengths)])
        passes: list[list[list[int]]] = []
        score = model.score

        def watched(streams: Sequence[Stream], replay: Any = None) -> list[Scores]:
            passes.append([stream.lengths for stream in streams])
            return score(streams, replay)

        model.score = watched
        metrics = probe.measure()
        assert [[sum(held) for held in one] for one in passes] == [first, second]
        assert metrics["drift/noise/expert_change_rate/worst"] == 0  # float32 on a CPU
        assert metrics["drift/probe/logprob_shift"] == metrics["drift/probe/router_shift/worst"] == 0
        assert 0 <= metrics["drift/noise/logprob_shift"] < 1e-5


@pytest.mark.parametrize("spoilt", [b"", b"rubbish", None])
def test_a_probe_set_that_is_damaged_is_named(runtime: Runtime, tmp_path: Path, spoilt: bytes | None) -> None:
    """None: a bit in the middle."""
    with built(Case(), runtime) as model:
        update = PolicyUpdate(model, AlgorithmSection(), RolloutSection(), DriftSection(), ReplaySection())
        probe = ProbeSet(update, 16, 100, tmp_path)
        probe.begin([rollout(i, 6) for i in range(4)])
        data = bytearray(probe.path.read_bytes())
        data[len(data) // 2] ^= 4
        probe.path.write_bytes(data if spoilt is None else spoilt)
        with pytest.raises(UsageError, match=r"probe\.npz: cannot be read: .*; put back what was there, or begin anew"):
            probe.resume()


def test_how_far_a_router_has_moved(runtime: Runtime, tmp_path: Path) -> None:
    """One router grows by half, which moves log-probabilities too, and nothing else; the noise is as it was."""
    with built(Case(model=dict(dense_layers=[1])), runtime) as model:
        update = PolicyUpdate(model, AlgorithmSection(), RolloutSection(), DriftSection(), ReplaySection())
        probe = ProbeSet(update, 16, 100, tmp_path)
        probe.begin([rollout(i, 6) for i in range(4)])
        router = dict(moe_modules(model.bare))[2].mlp.router
        with torch.no_grad():
            router.weight.mul_(1.5)
        found = probe.measure()
        shifts = {key.split("/")[-1]: value for key, value in found.items() if key.startswith("drift/probe/router_shift/")}
        wanted = {"layer_00": 0, "layer_02": 0.5, "layer_03": 0, "mean": 1 / 6, "worst": 0.5}
        assert shifts == pytest.approx(wanted, abs=1e-6)
        assert found["drift/probe/logprob_shift"] > 1e-4 > found["drift/noise/logprob_shift"]
        assert found["drift/probe/expert_change_rate/layer_02"] == 0  # the same order of the same logits
