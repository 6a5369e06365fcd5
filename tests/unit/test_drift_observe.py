"""Passes recorded and compared: routers that answer from a table, so that every metric of a whole model is known."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.layer_map import moe_modules
from models.model import MoEModel
from models.routing import Replay
from models.stream import Stream, pack_sequences
from moe_rl.drift.observe import Compared, PassRecord, RouteObserver
from moe_rl.drift.sums import DriftSums, to_metrics
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built

LN2 = math.log(2)
P, Q = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 8]), torch.tensor([1 / 8, 1 / 2, 1 / 4, 1 / 8])  # {0,1} and {1,2}
R = P.flip(0)  # {2,3}
SHAPE: dict[str, Any] = dict(layers=3, dense_layers=[1], experts=4, topk=2)  # layers 0 and 2 route
BIAS = torch.tensor([0.0, 0.0, 0.025, 0.0])
KINDS: dict[str, tuple[dict[str, Any], float]] = {  # and the margin of P's choice
    "logits": (dict(), LN2),
    "probabilities": (dict(router_pre_softmax=True), 1 / 8),
    # sigmoids 0.6 P = 0.3, 0.15, 0.075, 0.075, the third with its bias 0.1
    "sigmoid": (dict(router_score="sigmoid", load_balancing="expert_bias"), 0.05),
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


def stream_of() -> Stream:
    """Samples 3 and 8. Of the 5 tokens that enter only the first decides no response token; one token of filler."""
    return pack_sequences([[1, 2, 3, 4], [5, 6, 7]], [2, 1], 6, torch.device("cpu"), samples=[3, 8])


def answer(model: MoEModel, tables: dict[int, list[Tensor]], kind: str = "logits") -> None:
    """Makes the routers give each token, filler last, its distribution."""
    for layer, module in moe_modules(model.bare):
        table = torch.stack(tables[layer])
        logits = (0.6 * table).logit() if kind == "sigmoid" else table.log()
        module.mlp.router.gating = lambda hidden, logits=logits: logits[:, None]
        if kind == "sigmoid":
            module.mlp.router.expert_bias.copy_(BIAS)


OLD = {0: [P] * 6, 2: [P] * 6}
NEW = {0: [R, Q, Q, Q, Q, R], 2: [P, P, P, P, Q, R]}


def run(model: MoEModel, stream: Stream, tables: Any, kind: str = "logits", replay: Replay | None = None) -> PassRecord:
    answer(model, tables, kind)
    model.score([stream], None if replay is None else [replay])
    return RouteObserver(model, 1.0).record(stream)


def sums_by_hand(sums: DriftSums) -> dict[str, list[float]]:
    return {name: sums.sum_of(name).tolist() for name in ("change", "flips", "jaccard", "tokens", "router_kl", "gate_shift")}


# P to Q: change 1/2, jaccard 1/3, KL 0.625 log 2, shift over {0,1} 1.5 log 2. On layer 2 for one token alone.
MOVED = {
    "change": [2.0, 0.5],
    "flips": [4, 1],
    "jaccard": [4 / 3, 3 + 1 / 3],
    "tokens": [4, 4],
    "router_kl": [2.5 * LN2, 0.625 * LN2],
    "gate_shift": [6 * LN2, 1.5 * LN2],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_metric_of_known_routers(runtime: Runtime, kind: str) -> None:
    shape, distance = KINDS[kind]
    with built(Case(model=SHAPE | shape), runtime) as model:
        observer, stream = RouteObserver(model, 1.0), stream_of()
        observer.mark(stream, step=1)
        old, new = run(model, stream, OLD, kind), run(model, stream, NEW, kind)
        assert new.choice[:, 0].tolist() == [[2, 3], *[[1, 2]] * 4, [2, 3]] and new.choice.dtype == torch.uint8
        sums = observer.compare([Compared(stream, old, new)])
        found = sums_by_hand(sums)
        for name, values in MOVED.items():
            assert found[name] == pytest.approx(values, abs=2e-6), name
        assert sums.sum_of("scored").tolist() == sums.sum_of("bounded").tolist() == [4, 4]
        assert sums.sum_of("margin").tolist() == pytest.approx([4 * distance] * 2, abs=2e-6)
        assert sums.load.tolist() == [[0, 4, 4, 0], [3, 4, 1, 0]]
        assert sums.any.tolist() == [4, 4]
        metrics = to_metrics([sums], model.config.moe_layers)
        assert metrics["drift/update/flip_rate/layer_02"] == 0.25  # by the model's number, past the dense layer
        prompt = sums_by_hand(observer.compare([Compared(stream, old, new)], "prompt"))  # one token: P to R: all change
        assert (prompt["change"], prompt["flips"], prompt["tokens"]) == ([1, 0], [1, 0], [1, 1])
        # log P / R: 2, 1, -1, -2
        assert prompt["router_kl"] == pytest.approx([(1 + 1 / 4 - 1 / 8 - 1 / 4) * LN2, 0], abs=2e-6)


def test_microbatches_add_up(runtime: Runtime) -> None:
    with built(Case(model=SHAPE), runtime) as model:
        observer, stream = RouteObserver(model, 1.0), stream_of()
        observer.mark(stream, step=1)
        pair = Compared(stream, run(model, stream, OLD), run(model, stream, NEW))
        once, twice = observer.compare([pair]).vector(), observer.compare([pair, pair]).vector()
        torch.testing.assert_close(twice, 2 * once)


def test_under_replay_used_routes_agree_and_the_routers_own_do_not(runtime: Runtime) -> None:
    """Views: what is used is what is forced; "local" is what the routers would choose in the same pass."""
    with built(Case(model=SHAPE), runtime) as model:
        observer, stream = RouteObserver(model, 1.0), stream_of()
        observer.mark(stream, step=1)
        old = run(model, stream, OLD)
        new = run(model, stream, NEW, replay=Replay(old.choice))
        assert torch.equal(new.choice, old.choice)
        used, local = (sums_by_hand(observer.compare([Compared(stream, old, new)], view)) for view in (None, "local"))
        assert (used["change"], used["flips"], used["jaccard"]) == ([0, 0], [0, 0], [4, 4])
        for name in MOVED:
            assert local[name] == pytest.approx(MOVED[name], abs=2e-6)
        assert used["router_kl"] == pytest.approx(MOVED["router_kl"], abs=2e-6)  # distributions are live in both


def test_of_few_observed_rows_each_has_its_own_routes(runtime: Runtime) -> None:
    """Rows 0 (prompt), 2 and 3: 2 goes from Q to P on layer 0, KL 0.5 log 2, shift over {1,2} log 2. And where the old pass is
    replayed too, the margin is that of the routers' own choice: forced {2,3} would have a negative one."""
    with built(Case(model=SHAPE), runtime) as model:
        observer, stream = RouteObserver(model, 1.0), stream_of()
        stream.observe = torch.tensor([0, 2, 3])
        forced = Replay(torch.tensor([2, 3]).expand(6, 2, 2))
        old, new = run(model, stream, {0: [P, P, Q, P, P, P], 2: [P] * 6}), run(model, stream, {0: [P] * 6, 2: [P] * 6})
        sums = observer.compare([Compared(stream, old, new)])
        assert sums.sum_of("scored").tolist() == [2, 2]
        assert sums.sum_of("gate_shift").tolist() == pytest.approx([LN2, 0], abs=2e-6)
        assert sums.sum_of("router_kl").tolist() == pytest.approx([0.5 * LN2, 0], abs=2e-6)
        old = run(model, stream, OLD, replay=forced)
        assert old.choice.unique().tolist() == [2, 3] and old.live.unique().tolist() == [0, 1]
        assert old.margins is not None
        torch.testing.assert_close(old.margins, torch.full((3, 2), LN2))


def test_ties_and_equal_passes_do_not_drift(runtime: Runtime) -> None:
    with built(Case(model=SHAPE), runtime) as model:
        observer, stream = RouteObserver(model, 1.0), stream_of()
        observer.mark(stream, step=1)
        even = {layer: [torch.full((4,), 0.25)] * 6 for layer in (0, 2)}
        old, new = run(model, stream, even), run(model, stream, even)
        sums = observer.compare([Compared(stream, old, new)])
        names = ("change", "flips", "router_kl", "gate_shift", "margin")
        assert [sums.sum_of(name).tolist() for name in names] == [[0, 0]] * 5
        assert (sums.sum_of("bounded").tolist(), sums.any.tolist()) == ([4, 4], [0, 4])


@pytest.mark.parametrize(("topk", "flips", "change", "bounded"), [(1, [4, 1], [4.0, 1.0], 4), (4, [0, 0], [0.0, 0.0], 0)])
def test_one_expert_and_all_experts(runtime: Runtime, topk: int, flips: list[int], change: list[float], bounded: int) -> None:
    with built(Case(model=SHAPE | dict(topk=topk, router_pre_softmax=True)), runtime) as model:
        observer, stream = RouteObserver(model, 1.0), stream_of()
        observer.mark(stream, step=1)
        sums = observer.compare([Compared(stream, run(model, stream, OLD), run(model, stream, NEW))])
        assert (sums.sum_of("flips").tolist(), sums.sum_of("change").tolist()) == (flips, change)
        assert sums.sum_of("bounded").tolist() == [bounded] * 2
        assert sums.sum_of("margin").tolist() == pytest.approx([1 / 4 * bounded] * 2)
        assert sums.sum_of("router_kl").tolist() == pytest.approx(MOVED["router_kl"], abs=2e-6)


def test_group_limited_routers(runtime: Runtime) -> None:
    """Two groups of four, one of which is used: the better by its best two. Experts 0 and 1, weights 16 and 8 of 24; the other
    group has 15 and 8. Next in the group is weight 2: a margin of log 4. Then the other group overtakes it."""
    old = torch.tensor([16.0, 8, 2, 1, 15, 8, 1, 1]) / 52
    new = torch.tensor([16.0, 8, 2, 1, 17, 8, 1, 1]) / 54
    shape = SHAPE | dict(experts=8, router_groups=2, router_group_topk=1)
    with built(Case(model=shape), runtime) as model:
        observer, stream = RouteObserver(model, 1.0), stream_of()
        observer.mark(stream, step=1)
        first, second = (run(model, stream, {0: [old] * 6, 2: [table] * 6}) for table in (old, new))
        sums = observer.compare([Compared(stream, first, second)])
        assert second.choice[0].tolist() == [[0, 1], [4, 5]]
        assert (sums.sum_of("change").tolist(), sums.sum_of("jaccard").tolist()) == ([0, 4], [4, 0])
        assert sums.sum_of("margin").tolist() == pytest.approx([4 * math.log(4)] * 2, abs=1e-5)
        shift = math.log(54 / 52)
        assert sums.sum_of("gate_shift").tolist() == pytest.approx([0, 4 * shift], abs=1e-5)
        assert sums.sum_of("router_kl").tolist() == pytest.approx([0, 4 * (shift - 15 / 52 * math.log(17 / 15))], abs=1e-5)


def test_without_observed_rows_routes_are_compared_and_scores_are_not(runtime: Runtime) -> None:
    with built(Case(model=SHAPE), runtime) as model:
        observer, stream = RouteObserver(model, 0.0), stream_of()
        observer.mark(stream, step=1)
        old, new = run(model, stream, OLD), run(model, stream, NEW)
        assert (stream.observe, old.gates, old.margins) == (None, None, None)
        sums = observer.compare([Compared(stream, old, new)])
        assert (sums.sum_of("change").tolist(), sums.sum_of("scored").tolist()) == ([2, 0.5], [0, 0])
        observer.mark(stream, step=1, full=frozenset(stream.samples))
        assert stream.observe is not None and stream.observe.tolist() == [0, 1, 2, 3, 4]  # no filler


def test_what_an_engine_did_not_know_is_in_no_count(runtime: Runtime) -> None:
    """Of the four response tokens the first is unknown on one layer: it is compared on none, and is no steady token either."""
    with built(Case(model=SHAPE), runtime) as model:
        observer, stream = RouteObserver(model, 0.0), stream_of()
        old, new = run(model, stream, OLD), run(model, stream, NEW)
        engine = old.choice.to(torch.int16)
        engine[1, 1] = -1
        sums = observer.compare([Compared(stream, PassRecord(engine, engine), new)])
        assert (sums.sum_of("tokens").tolist(), sums.sum_of("flips").tolist()) == ([3, 3], [3, 1])
        assert sums.any.tolist() == [3, 3]
        still = observer.compare([Compared(stream, PassRecord(engine, engine), old)])
        assert still.any.tolist() == [0, 3]


def observer_of(share: float) -> RouteObserver:
    config = SimpleNamespace(moe_layers=(0,), router_score="softmax", router_pre_softmax=False)
    model: Any = SimpleNamespace(config=config, moe_layers=[0])
    return RouteObserver(model, share)


def observed(share: float, samples: list[int], lengths: list[int], step: int, filler: int = 0, parts: int = 1) -> set[Any]:
    """(sample, position) of the rows that are kept."""
    found = set()
    for rank in range(parts):
        sequences = [[1] * (n + 1) for n in lengths]
        size = sum(lengths) + filler
        stream = pack_sequences(sequences, [1] * len(lengths), size, torch.device("cpu"), samples=samples, part=(rank, parts))
        observer_of(share).mark(stream, step)
        assert stream.observe is not None
        for row in (stream.first + stream.observe).tolist():
            found.add((samples[int(stream.row[row])], int(stream.position[row])))
    return found


def test_which_rows_are_kept_does_not_depend_on_the_layout() -> None:
    whole = observed(0.3, [5, 9, 2], [40, 30, 50], step=4)
    assert 20 < len(whole) < 52  # 36 of 120; the standard deviation of as many independent draws is 5
    assert observed(0.3, [2, 5, 9], [50, 40, 30], step=4, filler=8, parts=4) == whole
    alone = [observed(0.3, [sample], [n], step=4, filler=1) for sample, n in ((5, 40), (9, 30), (2, 50))]
    assert set().union(*alone) == whole
    assert observed(0.3, [5, 9, 2], [40, 30, 50], step=5) != whole
    assert observed(0.1, [5, 9, 2], [40, 30, 50], step=4) < whole


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("step", [0, 1, 7, 1000])
def test_the_share_is_kept_to_and_spread(share: float, step: int) -> None:
    """Of 64 samples of 256 tokens, and of the first half of either, within four standard deviations of independent draws."""
    kept = observed(share, list(range(100, 164)), [256] * 64, step)
    parts = [(64 * 256, kept), (64 * 128, [p for _, p in kept if p < 128]), (32 * 256, [s for s, _ in kept if s < 132])]
    for tokens, found in parts:
        assert len(found) == pytest.approx(share * tokens, abs=4 * math.sqrt(share * tokens))
