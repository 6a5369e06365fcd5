"""Routes that an engine knows in part, compared over pipeline stages: as in one process."""

import pytest

from moe_rl.collectives import reduce_drift
from moe_rl.drift.observe import Compared, PassRecord, RouteObserver
from moe_rl.drift.sums import to_metrics
from parallel.runtime import Runtime
from tests.distributed.passes import Case, built, sample_batch, streams_here
from tests.distributed.ranks import run_on_ranks

pytestmark = pytest.mark.distributed


def engine_metrics(runtime: Runtime, case: Case) -> dict[str, float]:
    """An engine that says the next expert of every third token, and on the last layer knows none of every second one."""
    with built(case, runtime) as model:
        sequences, prompts, _ = sample_batch(case.config, case.seed)
        streams, _ = streams_here(model, sequences, prompts, budget=60)
        model.score(streams)
        observer, pairs = RouteObserver(model, 0.0), []
        for stream in streams:
            observer.mark(stream, step=1)
            own = observer.record(stream)
            said = own.choice.short()
            third = stream.position % 3 == 0
            said[third] = ((said[third] + 1) % case.config.experts).sort(-1).values
            if 3 in model.moe_layers:
                said[stream.position % 2 == 0, model.moe_layers.index(3)] = -1
            pairs.append(Compared(stream, PassRecord(said, said), own))
        return to_metrics(reduce_drift([observer.compare(pairs)]), case.config.moe_layers, "engine")


def test_a_token_that_is_unknown_on_one_stage_counts_on_none() -> None:
    (alone,) = run_on_ranks(engine_metrics, 1, Case())
    assert alone["drift/engine/flip_rate/layer_00"] == pytest.approx(alone["drift/engine/flip_rate/layer_03"], abs=0.1)
    assert 0.2 < alone["drift/engine/any_layer_flip_rate"] < 0.5  # a third; were unknown tokens steady ones, a sixth
    for layout in (dict(pipeline=2), dict(pipeline=2, virtual_pipeline=2)):
        for split in run_on_ranks(engine_metrics, 2, Case(layout=layout)):
            assert split == pytest.approx(alone, abs=1e-12), layout
