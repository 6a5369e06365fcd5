"""The embedded engine samples the same in every layout, and what it says of its samples is what a plain forward says.

Log-probabilities: measured differences up to 2e-6 (another order of sums with the cache); 1e-4 is what is promised.
"""

from typing import Any

import pytest

from moe_rl.types import Sampling
from tests.distributed.generation import generated, letters
from tests.distributed.passes import Case
from tests.distributed.ranks import run_on_ranks

pytestmark = pytest.mark.distributed

STOP = frozenset(range(16))
SAMPLINGS = [Sampling(20, 1.0, stop_token_ids=STOP), Sampling(20, 0.7, stop_token_ids=STOP, stop=("abc", "dd"))]
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"tensor": 2},
        {"pipeline": 2},
        {"pipeline": 2, "virtual_pipeline": 2},
        {"expert": 2},
        {"expert": 2, "dispatcher": "allgather"},
        {"expert_tensor": 2, "dispatcher": "allgather"},
    ],
    4: [
        {"tensor": 2, "expert": 2},
        {"pipeline": 2, "virtual_pipeline": 2, "expert": 2},
        {"expert": 4},
        {"tensor": 2, "pipeline": 2, "expert": 2, "dispatcher": "allgather"},
    ],
}


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return run_on_ranks(generated, 1, [(Case(budget=100), sampling) for sampling in SAMPLINGS])[0]


def check(got: dict[str, Any], alone: dict[str, Any], name: object) -> None:
    assert got["tokens"] and all(tokens == alone["tokens"][i] for i, tokens in got["tokens"].items()), name
    assert all(reason == alone["finish"][i] for i, reason in got["finish"].items()), name
    assert got["compared"] > 50 and got["gap"] <= 1e-4, (name, got["gap"])
    assert got["routes"] > 200 and got["wrong_routes"] == 0, name


def test_one_process(alone: list[dict[str, Any]]) -> None:
    texts = 0
    cut = run_on_ranks(generated, 1, [(Case(budget=3), sampling) for sampling in SAMPLINGS])[0]
    for got, whole, sampling in zip(cut, alone, SAMPLINGS, strict=True):
        check(whole, whole, "alone")
        check(got, whole, "three at a time")  # the same prompt and seed: the same response, whatever else is in the batch
        for i, tokens in whole["tokens"].items():
            said = any(stop in letters(tokens) for stop in sampling.stop)
            assert not any(stop in letters(tokens[:-1]) for stop in sampling.stop)
            stopped = tokens[-1] in STOP or said
            assert not STOP & set(tokens[:-1]) and (stopped or len(tokens) == 20)
            texts += said
            assert whole["finish"][i] == ("stop" if stopped else "length")
    assert alone[0]["tokens"] != alone[1]["tokens"]
    assert texts > 2  # responses that a stop text ended


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout(ranks: int, alone: list[dict[str, Any]]) -> None:
    jobs = [(Case(layout=layout, budget=100), sampling) for layout in LAYOUTS[ranks] for sampling in SAMPLINGS]
    for (case, sampling), got in zip(jobs, run_on_ranks(generated, ranks, jobs)[0], strict=True):
        check(got, alone[SAMPLINGS.index(sampling)], (case.layout, sampling.temperature))
