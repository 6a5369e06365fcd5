"""Rollout routes through the whole loop, in this process: taken from the engine, forced, compared, refused where wrong."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_rl.drift import traces
from moe_rl.rollouts.engine import Engine, Request
from moe_rl.session import opened
from moe_rl.trainer import Trainer
from moe_rl.types import Response, Sampling
from tests.distributed.runs import Runs

pytestmark = pytest.mark.distributed

Alter = Callable[[int, Tensor], Tensor | None]


class AlteredEngine:
    """An engine that says of its routes something else than what they were."""

    def __init__(self, engine: Engine, alter: Alter) -> None:
        self.engine, self.alter = engine, alter

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, routes: bool = True) -> list[Response]:
        found = self.engine.generate(requests, sampling, routes=routes)
        return [r if r.routes is None else replace(r, routes=self.alter(i, r.routes)) for i, r in enumerate(found)]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def train(runs: Runs, name: str, *overrides: str, alter: Alter | None = None) -> dict[str, Any]:
    """The metrics of one step."""
    config = runs.config(name, "run.steps=1", "drift.trace_every=1", *overrides)
    with opened(config, {"train": 1}) as session:
        if alter is not None:
            session = replace(session, engine=AlteredEngine(session.engine, alter))
        Trainer(session).run()
    return runs.steps(name)[1]


def columns(runs: Runs, name: str) -> dict[str, np.ndarray]:
    return dict(traces.read(runs.folder / name / "traces" / "step_000001.parquet").columns)


def test_with_the_same_kernels_r3_is_r2(runs: Runs) -> None:
    """The embedded engine and the trainer's pass choose alike, so it makes no difference whose routes are replayed."""
    off, r2, r3 = (train(runs, mode, f"replay.mode={mode}") for mode in ("off", "r2", "r3"))
    assert r2 == r3
    assert r3["drift/engine/expert_change_rate/mean"] == r3["drift/engine/prompt/expert_change_rate/mean"] == 0
    for metrics in (r2, off):
        rate = "drift/update/expert_change_rate/mean" if metrics is off else "drift/update/local/expert_change_rate/mean"
        assert metrics[f"{rate}/minibatch_0"] == 0  # case 31
        assert metrics[f"{rate}/minibatch_1"] > 0
        # the pass that the update does not make is another one: along old routes without replay, free with it
        assert metrics["attribution/routing_abs"] > 1e-3 and metrics["attribution/weights_abs"] > 1e-3
    assert r2["drift/update/expert_change_rate/worst"] == 0
    assert [r2[f"replay/stale_fraction/age_{i}"] > 0 for i in range(4)] == [False, True, True, True]
    found = columns(runs, "r3")
    assert np.array_equal(found["rollout_routes"], found["old_routes"])
    flips = (found["old_routes"] != found["new_routes"]).any(axis=(1, 2))
    assert not flips[found["update"] == 0].any() and flips[found["update"] == 3].any()


def shifted(sample: int, routes: Tensor) -> Tensor:
    return ((routes.long() + 1) % 8).sort(-1).values.to(torch.uint8)


def test_altered_rollout_routes_are_forced_and_seen(runs: Runs) -> None:
    plain = train(runs, "plain", "replay.mode=r3")
    altered = train(runs, "altered", "replay.mode=r3", alter=shifted)
    assert altered["drift/engine/expert_change_rate/mean"] > 0.3 and plain["drift/engine/expert_change_rate/mean"] == 0
    assert altered["drift/update/expert_change_rate/worst"] == 0  # old pass and update take the same routes
    assert altered["drift/update/local/expert_change_rate/mean/minibatch_0"] == 0  # with the same weights, both live alike
    assert altered["replay/stale_fraction/age_0"] > 0.3
    assert altered["rollout/logprob_gap_max"] > 100 * plain["rollout/logprob_gap_max"]  # along other experts than it sampled by
    found = columns(runs, "altered")
    assert np.array_equal(found["rollout_routes"], found["old_routes"])
    only_seen = train(runs, "seen", alter=shifted)  # replay off: seen, and without effect
    assert only_seen["drift/engine/expert_change_rate/mean"] > 0.3
    assert only_seen["rollout/logprob_gap_max"] == plain["rollout/logprob_gap_max"]


def test_unknown_rows_fall_back_to_the_live_router_and_are_counted(runs: Runs) -> None:
    """Case 12."""

    def half(sample: int, routes: Tensor) -> Tensor:
        routes = routes.to(torch.int16)
        routes[::2] = -1
        return routes

    found = train(runs, "half", "replay.mode=r3", alter=half)
    assert 0.45 < found["replay/unknown_fraction/mean"] < 0.65
    assert found["replay/stale_fraction/age_0"] == found["drift/engine/expert_change_rate/mean"] == 0
    assert 0 < found["drift/update/expert_change_rate/mean"] < found["drift/update/local/expert_change_rate/mean"]
    rows = columns(runs, "half")["rollout_routes"]
    assert ((rows == -1).all(axis=(1, 2)) == (columns(runs, "half")["position"] % 2 == 0)).all()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda i, r: None if i == 5 else r, "sample 5: the engine returned none; replay.mode=r3 needs them"),
        (lambda i, r: torch.cat([r, r]) if i == 6 else r, r"sample 6: shape .* must be"),
        (lambda i, r: r[:-1] if i == 2 else r, r"sample 2: shape .* must be"),
        (lambda i, r: r[:, :3] if i == 2 else r, r"sample 2: shape .* must be"),
        (lambda i, r: r.fill_(0) if i == 3 else r, "sample 3, token 0, layer 0: expert 0 stands there twice"),
        (lambda i, r: r + 7 if i == 4 else r, r"sample 4, token 0, layer 0: expert \d+ is outside \[0, 8\)"),
    ],
)
def test_a_wrong_route_ends_the_run_with_the_sample_named(runs: Runs, fault: Alter, text: str) -> None:
    """Cases 10, 13 and 14: none, twice, too short, without a layer, all zero, out of range."""
    with pytest.raises(ValueError, match=text):
        train(runs, "wrong", "replay.mode=r3", alter=fault)


def test_a_trace_and_attribution_each_look_at_their_own_number_of_sequences(runs: Runs) -> None:
    """Of 4 minibatches of 4 sequences; the free pass is made of probed ones alone."""
    few = train(runs, "few", "replay.mode=r2", "drift.probe_sequences=2", "drift.trace_sequences=1")
    many = train(runs, "many", "replay.mode=r2", "drift.probe_sequences=2", "drift.trace_sequences=3")
    explained = {key: value for key, value in few.items() if key.startswith(("attribution/", "drift/update/free/"))}
    assert len(explained) > 20 and explained == {key: many[key] for key in explained}
    for name, count in (("few", 1), ("many", 3)):
        found = columns(runs, name)
        assert [len(np.unique(found["sample"][found["update"] == i])) for i in range(4)] == [count] * 4


def test_gates_and_margins_in_a_trace_are_those_of_the_routes_beside_them(runs: Runs) -> None:
    """One of two experts: p of what the router itself chooses is at least 1/2, and its margin p - (1 - p), also where replay
    forces the other one."""
    train(runs, "two", "model.experts=2", "model.topk=1", "model.router_pre_softmax=true", "replay.mode=r2")
    found = columns(runs, "two")
    for which in ("old", "new"):
        gates, margins = found[f"{which}_gates"][..., 0], found[f"{which}_margin"]
        assert np.isfinite(gates).all() and gates.min() >= 0.5
        assert margins == pytest.approx(2 * gates - 1, abs=1e-6)
    assert (found["old_routes"] != found["new_routes"]).any()
