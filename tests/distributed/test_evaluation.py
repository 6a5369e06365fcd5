"""`moe-rl eval` on real weights: the same responses and figures in every layout and batch size, figures that follow from the
responses, and a run that stays as it is."""

import hashlib
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.layouts import LAYOUTS, name
from tests.distributed.ranks import train_on_ranks
from tests.distributed.runs import Runs

pytestmark = pytest.mark.distributed

PROBLEMS, SAMPLES = 13, 3  # neither of which two ranks share evenly
WAYS = {
    "greedy": [],
    "sampled": ["eval.temperature=1", f"eval.samples={SAMPLES}", "eval.k=[1,2]"],
    # 6 and 2 problems at a time, where the others take all at once
    "few": ["eval.temperature=1", f"eval.samples={SAMPLES}", "eval.k=[1,2]", "rollout.max_batch=6"],
}
FILE = "base-step_000000-test"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    found = Runs(tmp_path_factory.mktemp("evaluations"))
    train_on_ranks(1, [found.config("base", "sft.steps=3", "run.steps=0")])
    test = found.folder / "test.jsonl"
    test.write_text("".join(json.dumps({"prompt": "7" * (i % 4) + f"{i}?", "answer": "x"}) + "\n" for i in range(PROBLEMS)))
    shared = [
        f"checkpoint.load={found.folder / 'base'}",
        "task.train_path=null",  # an evaluation needs none
        f"task.eval_path={test}",
        "task.scorer=tests.distributed.rewards:mostly_even",
        f"rollout.stop_token_ids={list(range(3, 60))}",
        "eval.problems=null",
    ]
    configs: dict[int, list[Any]] = {1: [], 2: []}
    for layout, (world, settings) in LAYOUTS.items():
        configs[world] += [found.config(name(layout, way), *shared, *settings, *keys) for way, keys in WAYS.items()]
    for world, here in configs.items():
        train_on_ranks(world, here, "eval")
    return found


def read(runs: Runs, run: str) -> tuple[str, dict[str, Any]]:
    """The file of responses and the figures."""
    folder = runs.folder / run / "eval"
    figures = json.loads((folder / f"{FILE}.json").read_text(encoding="utf-8"))
    return (folder / f"{FILE}.jsonl").read_text(encoding="utf-8"), figures


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one"])
def test_every_layout_and_batch_gives_the_same(runs: Runs, layout: str, way: str) -> None:
    ours, wanted = read(runs, name(layout, way)), read(runs, name("one", way if way == "greedy" else "sampled"))
    assert ours[0] == wanted[0]
    assert ours[1]["figures"] == wanted[1]["figures"]
    assert (ours[1]["problems"], ours[1]["heldout_problems"]) == (PROBLEMS, PROBLEMS)


def test_the_figures_follow_from_the_responses(runs: Runs) -> None:
    text, found = read(runs, name("one", "sampled"))
    lines = [json.loads(line) for line in text.splitlines()]
    groups = [lines[i : i + SAMPLES] for i in range(0, len(lines), SAMPLES)]
    assert len(groups) == PROBLEMS
    for i, group in enumerate(groups):
        assert [line["sample"] for line in group] == list(range(SAMPLES))
        assert {(line["problem"], line["prompt"]) for line in group} == {
            (f"{runs.folder / 'test.jsonl'}:{i + 1}", "7" * (i % 4) + f"{i}?")
        }
    assert len({line["response"] for line in lines}) > 1.5 * PROBLEMS
    assert {line["stopped"] for line in lines} == {"eos", "stop", "length"}
    assert all(line["tokens"] == 6 for line in lines if line["stopped"] == "length")

    def check(key: str, values: list[float]) -> None:
        assert found["figures"][key]["value"] == pytest.approx(np.mean(values), rel=1e-12), key
        assert found["figures"][key]["stderr"] == pytest.approx(np.std(values, ddof=1) / len(values) ** 0.5, rel=1e-12), key

    passed = [[line["passed"] for line in group] for group in groups]
    assert 0 < sum(map(sum, passed)) < len(lines)
    check("pass_at_1", [np.mean(some) for some in passed])
    check("pass_at_2", [np.mean([any(pair) for pair in itertools.combinations(some, 2)]) for some in passed])
    check("reward_mean", [np.mean([line["reward"] for line in group]) for group in groups])
    check("response_length_mean", [np.mean([line["tokens"] for line in group]) for group in groups])
    check("response_truncated_fraction", [np.mean([line["stopped"] == "length" for line in group]) for group in groups])
    check("response_eos_fraction", [np.mean([line["stopped"] == "eos" for line in group]) for group in groups])
    lengths = [line["tokens"] for line in lines]
    assert found["figures"]["response_length_median"]["value"] == statistics.median(lengths)
    assert found["figures"]["response_length_p95"]["value"] == np.percentile(lengths, 95, method="inverted_cdf")
    assert found["figures"]["response_length_max"]["value"] == max(lengths)


def test_a_run_that_is_evaluated_stays_as_it_is(runs: Runs) -> None:
    """And of two evaluations of one checkpoint both stay, with the same figures as the run itself found."""
    base = runs.folder / "base"

    def contents() -> dict[Path, str]:
        files = [path for path in base.rglob("*") if path.is_file() and "eval" not in path.parts]
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = contents()
    train_on_ranks(1, [runs.config("base"), runs.config("base")], "eval")  # its own newest checkpoint
    assert contents() == before and len(before) > 5
    problems = "step_000000-problems"
    names = {path.name for path in (base / "eval").iterdir()}
    assert names == {f"{problems}{more}.{kind}" for more in ("", ".2") for kind in ("json", "jsonl")} | {"log.txt"}
    figures, again = (json.loads((base / "eval" / f"{problems}{more}.json").read_text())["figures"] for more in ("", ".2"))
    assert figures == again
    within = {key.removeprefix("eval/"): value for key, value in runs.steps("base")[0].items() if key.startswith("eval/")}
    assert within.pop("problems") == 6
    assert within == {
        key: value
        for name, figure in figures.items()
        for key, value in ((name, figure["value"]), (f"{name}_stderr", figure["stderr"]))
        if value is not None
    }
