"""The embedded engine samples the same in every layout, and what it says of its samples is what a plain forward says.

Log-probabilities: with a cache sums are taken in another order. Over seeds 0-5 of all jobs below they differed by at most
GAPSEEN; what is promised is 1e-4, what is asserted 2e-5. Tokens and routes never differed. They could: where a uniform falls
within 1e-6 of a boundary, or two experts are that close, another order of sums decides otherwise.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from moe_rl.types import Sampling
from tests.distributed.generation import Job, argmaxes, generated, permuted
from tests.distributed.passes import Case
from tests.distributed.ranks import run_on_ranks

pytestmark = pytest.mark.distributed

STOP = frozenset(range(16))
LENGTH = 20
SAMPLINGS = {
    "1.0": Sampling(LENGTH, 1.0, stop_token_ids=STOP),
    "0.7": Sampling(LENGTH, 0.7, stop_token_ids=STOP),
    "greedy": Sampling(8, 0.0),
    "no stop": Sampling(6, 1.0),
    "one token": Sampling(1, 1.0, stop_token_ids=STOP),
}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"tensor": 2},
        {"pipeline": 2},
        {"pipeline": 2, "virtual_pipeline": 2},
        {"expert": 2},
        {},
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
ALLGATHER = {"expert": 2, "dispatcher": "allgather"}
VARIANTS: list[dict[str, Any]] = [
    dict(dense_layers=[0, 2], tie_embeddings=True, vocab_size=20, kv_heads=1),
    dict(router_score="sigmoid", load_balancing="expert_bias", router_groups=4, router_group_topk=2, shared_ffn=32),
]
UNEQUAL, ONES, LONELY = (1, 60, 1, 59, 2), (1,) * 7, (3,)


def job(layout: dict[str, Any], sampling: str, **changes: Any) -> Job:
    case: dict[str, Any] = {key: changes.pop(key) for key in ("model", "budget") if key in changes}
    return Job(Case(layout, case.get("model", {}), case.get("budget", 100)), SAMPLINGS[sampling], **changes)


def jobs(world: int) -> list[Job]:
    every = [job(layout, name) for layout in LAYOUTS[world] for name in ("1.0", "0.7")]
    if world == 4:
        return [*every, job({"expert": 4}, "1.0", lengths=LONELY), job(LAYOUTS[4][3], "no stop", lengths=UNEQUAL, second=0)]
    return [
        *every,
        *(job(layout, "greedy") for layout in LAYOUTS[2][:4]),
        # three at a time, so that ranks need different numbers of batches; a rank without any request
        *(job(layout, "1.0", budget=3) for layout in ({"expert": 2}, {"tensor": 2}, ALLGATHER)),
        *(job(layout, "1.0", second=0) for layout in ({"expert": 2}, ALLGATHER, {})),
        job({"expert": 2}, "1.0", lengths=LONELY),
        # all prompts of one token: the first pass looks like a decoding step
        *(job(layout, "no stop", lengths=ONES) for layout in ({"tensor": 2}, {"expert": 2})),
        *(job(layout, "no stop", lengths=UNEQUAL) for layout in (ALLGATHER, {"expert": 2}, {"tensor": 2}, LAYOUTS[2][6])),
        *(job(layout, "one token") for layout in ({"pipeline": 2}, {"expert": 2})),
        *(job(layout, "0.7", model=model) for layout in ({"tensor": 2}, {"expert": 2}, LAYOUTS[2][2]) for model in VARIANTS),
    ]


def alone(what: Job) -> Job:
    """One process, all at once."""
    case = Case(model=what.case.model, budget=100, seed=what.case.seed)
    return Job(case, what.sampling, what.lengths)


Results = dict[tuple[int, str], dict[str, Any]]


def key(world: int, what: Job) -> tuple[int, str]:
    return world, repr(what)


@pytest.fixture(scope="module")
def results() -> Results:
    split = {2: jobs(2), 4: jobs(4)}
    single = [*map(alone, [*split[2], *split[4]]), job({}, "1.0", budget=3), job({}, "1.0", budget=1)]
    split[1] = list({key(1, one): one for one in single}.values())
    return {
        key(world, one): got
        for world, some in split.items()
        for one, got in zip(some, run_on_ranks(generated, world, some)[0], strict=True)
    }


def check(got: dict[str, Any], wanted: dict[str, Any], what: Job) -> None:
    assert got["tokens"] and all(tokens == wanted["tokens"][i] for i, tokens in got["tokens"].items())
    assert all(reason == wanted["finish"][i] for i, reason in got["finish"].items())
    assert got["compared"] == sum(map(len, got["tokens"].values())) * what.case.parallel.tensor
    if what.sampling.temperature:
        assert got["gap"] < 2e-5
        gaps = [abs(a - b) for i, ours in got["logprobs"].items() for a, b in zip(ours, wanted["logprobs"][i], strict=True)]
        assert max(gaps) < 2e-5
    else:
        assert not any(any(logprobs) for logprobs in got["logprobs"].values())
    entered = sum(what.lengths[i] + len(tokens) - 1 for i, tokens in got["tokens"].items())
    assert got["routes"] == entered * len(what.case.config.moe_layers) and got["wrong_routes"] == 0


@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_samples_what_one_process_samples(results: Results, world: int) -> None:
    for what in jobs(world):
        check(results[key(world, what)], results[key(1, alone(what))], what)


@pytest.mark.parametrize("budget", [100, 3, 1])
def test_one_process_agrees_with_its_own_recompute_however_many_at_once(results: Results, budget: int) -> None:
    what = job({}, "1.0", budget=budget)
    check(results[key(1, what)], results[key(1, alone(what))], what)


def test_a_rank_with_less_to_do_does_all_of_it(results: Results) -> None:
    """Eleven requests; the second rank of two takes its first two, or none."""
    some, none = (results[key(2, job({"expert": 2}, "1.0", second=n))] for n in (2, 0))
    assert (sorted(some["tokens"]), sorted(none["tokens"])) == ([0, 1, 2, 3, 4, 6, 8, 10], [0, 2, 4, 6, 8, 10])
    assert sorted(results[key(2, job({"expert": 2}, "1.0", lengths=LONELY))]["tokens"]) == [0]


def ends_well(tokens: Sequence[int], reason: str, sampling: Sampling) -> bool:
    if any(token in sampling.stop_token_ids for token in tokens[:-1]):
        return False
    stopped = tokens[-1] in sampling.stop_token_ids
    return reason == ("stop" if stopped else "length") and (stopped or len(tokens) == sampling.max_tokens)


@pytest.mark.parametrize("name", ["1.0", "0.7", "no stop", "one token"])
def test_a_response_ends_at_its_first_stop_token_or_at_its_length(results: Results, name: str) -> None:
    lengths = {"lengths": UNEQUAL} if name == "no stop" else {}
    got = results[key(1, job({}, name, **lengths))]
    assert all(ends_well(tokens, got["finish"][i], SAMPLINGS[name]) for i, tokens in got["tokens"].items())
    reasons = set(got["finish"].values())
    assert reasons == ({"stop", "length"} if name in ("1.0", "0.7") else {"length"})


def test_greedy_takes_the_likeliest_token_of_a_plain_forward(results: Results) -> None:
    what = job({}, "greedy")
    tokens = results[key(1, what)]["tokens"]
    assert len(tokens) == 11 and len({tuple(t) for t in tokens.values()}) > 5
    assert run_on_ranks(argmaxes, 1, what, tokens)[0] == tokens


def test_a_seed_gives_its_response_whatever_else_is_in_the_batch(results: Results) -> None:
    what = job({}, "1.0", budget=5)
    assert run_on_ranks(permuted, 1, what)[0] == list(results[key(1, alone(what))]["tokens"].values())
    assert results[key(1, job({}, "1.0"))]["tokens"] != results[key(1, job({}, "0.7"))]["tokens"]
