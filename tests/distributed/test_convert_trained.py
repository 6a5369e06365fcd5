"""Runs from Hugging Face checkpoints, through the real trainer: what they learnt, exported and opened by transformers, gives
the trainer's log-probabilities. Families with routers, biases, sinks and latent attention under replay, and a dense model.

Exported weights are the trainer's to the bit, so only float32's noise is left: as in tests/unit/test_convert_parity.py.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.convert.exporting import export_directory
from moe_rl import checkpoint
from moe_rl.drift.command import drift
from moe_rl.report.command import report
from parallel.config import ParallelConfig
from parallel.groups import Groups, process_groups
from parallel.runtime import started
from tests.distributed.ranks import train_on_ranks
from tests.distributed.runs import Runs
from tests.hf_checkpoints import make
from tests.parity import differing_routes, error, live_says, load, sequences, transformers_says

pytestmark = pytest.mark.distributed

YAML = """
run: {steps: 2}
task: {name: jsonl, scorer: "tests.distributed.rewards:share_of_even", eval_size: 8}
rollout: {prompts: 4, responses: 4, max_response_tokens: 6}
algorithm: {name: grpo, minibatches: 2}
optimizer: {lr: 1e-3}
drift: {probe_every: 1, trace_every: 1}
eval: {problems: 4}
tracking: {rollouts_every: 0}
"""
RUNS: dict[str, tuple[str, list[str]]] = {
    "gpt_oss-TP2-EP2-r3": ("gpt_oss", ["parallel.tensor=2", "parallel.expert=2", "replay.mode=r3"]),
    "deepseek_v3-EP2-r2": ("deepseek_v3", ["parallel.expert=2", "replay.mode=r2", "model.load_balancing=expert_bias"]),
    "olmoe-TP2": ("olmoe", ["parallel.tensor=2"]),
    "qwen3-TP2": ("qwen3", ["parallel.tensor=2"]),
    "qwen3-PP2-ppo": ("qwen3", ["parallel.pipeline=2", "algorithm.name=ppo", "optimizer.lr=1e-4"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    runs.yaml.write_text(YAML, encoding="utf-8")
    configs = []
    for name, (family, settings) in RUNS.items():
        directory = runs.folder / "hf" / family
        if not directory.exists():
            make(family, directory, vocab_size=259)
        configs.append(runs.config(name, f"model.path={directory}", "model.tokenizer=bytes", *settings))
    train_on_ranks(2, configs)
    return runs


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with started(seed=0, threads=1, timeout_seconds=60), process_groups(ParallelConfig()) as groups:
        yield groups


@pytest.mark.parametrize("name", RUNS)
def test_trained_weights_mean_the_same_in_transformers(name: str, runs: Runs, groups: Groups, tmp_path: Path) -> None:
    trained = runs.folder / name / "checkpoints" / "step_000002"
    export_directory(trained, tmp_path / "out")
    model = load(runs.folder / "hf" / RUNS[name][0], groups, torch.device("cpu"))
    rows = sequences(259, (60, 20))
    before = live_says(model, rows)
    checkpoint.load_weights(trained, model)
    ours = live_says(model, rows)
    theirs = transformers_says(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), rows)
    assert error(ours, theirs) < 6e-5 and (theirs.margin < 3e-5 or not differing_routes(ours, theirs))
    assert error(ours, before) > 1e-2  # it has learnt something


@pytest.mark.parametrize("name", RUNS)
def test_the_run_measured_what_the_model_has(name: str, runs: Runs) -> None:
    lines = runs.steps(name)
    assert len(lines) == 3 and all(math.isfinite(value) for line in lines for value in line.values() if value is not None)
    routes = [key for key in lines[-1] if key.startswith("drift/") and "logprob_shift" not in key]
    assert bool(routes) == (not name.startswith("qwen3"))
    for line in lines[1:]:
        assert line["rollout/logprob_gap_max"] < 1e-4  # the engine's log-probabilities are the trainer's
        if "replay.mode=r3" in RUNS[name][1]:
            assert line["drift/engine/flip_rate/mean"] == 0


def test_a_dense_run_says_that_it_has_no_drift(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs.folder / "qwen3-TP2"
    drift([path], last=10)
    text = "qwen3-TP2 has a dense model: no layer routes, so there is no drift to show"
    assert text in capsys.readouterr().out
    report([path], path / "report.html")
    assert text in capsys.readouterr().out
    assert (path / "report.html").stat().st_size > 0
