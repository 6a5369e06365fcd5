"""model.path in several processes: each rank's part is the directory's, and what such a run exports is what it computed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.config import OptimizerConfig
from models.convert import live
from models.convert.huggingface import describe
from models.model import MoEModel
from models.stream import pack_sequences
from moe_rl import checkpoint, cli
from moe_rl.checkpoint import Progress
from moe_rl.tasks import ByteTokenizer
from parallel.config import ParallelConfig
from parallel.groups import process_groups
from parallel.runtime import Runtime
from tests.distributed.ranks import run_on_ranks
from tests.distributed.updates import update
from tests.hf_checkpoints import make
from tests.unit.test_convert_commands import same, tensors
from tests.unit.test_convert_exports import SEQUENCES, transformers_scores

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3_moe", 2, dict(expert=2)),
    ("qwen3_moe", 4, dict(tensor=2, expert=2)),
    ("qwen3_moe", 2, dict(pipeline=2)),
    ("qwen3", 4, dict(tensor=4)),
    ("gpt_oss", 2, dict(tensor=2)),
    ("deepseek_v3", 2, dict(pipeline=2)),
]


def trained(runtime: Runtime, source: Path, layout: dict[str, Any], folder: Path) -> list[float] | None:
    """Saves as loaded, and after an update; scores of the latter, where the last stage is."""
    with process_groups(ParallelConfig(**layout)) as groups:
        model = MoEModel(describe(source).model(source), groups, runtime.device, seed=1)
        live.load(source, model)
        optimizer = model.optimizer(OptimizerConfig(lr=1e-2), total_updates=10)
        for step in (0, 1):
            if step:
                update(model, optimizer, seed=3)
            checkpoint.save(folder / "checkpoints", Progress(step, 0, 0, 0.0), model, optimizer, keep=2)
        size = -(-max(map(len, SEQUENCES)) // 8) * 8
        part = (groups.tensor.rank, groups.tensor.size)
        scored = model.score([pack_sequences([ids], [1], size, model.device, part=part) for ids in SEQUENCES])
        return [p for scores in scored for p in scores.logprobs.tolist()] or None


@pytest.mark.parametrize(("family", "world", "layout"), LAYOUTS, ids=lambda value: str(value))
def test_what_is_exported_is_what_was_computed(family: str, world: int, layout: dict[str, Any], tmp_path: Path) -> None:
    """As loaded, to the bit; after an update, transformers scores as the trainer. 260 words: four ranks have 80 rows each."""
    kv_heads: dict[str, Any] = {} if family == "deepseek_v3" else {"num_key_value_heads": 4}
    make(family, tmp_path / "hf", vocab_size=260, **kv_heads)
    ByteTokenizer().save(tmp_path / "hf")
    scores = run_on_ranks(trained, world, tmp_path / "hf", layout, tmp_path / "run")
    (tmp_path / "hf").rename(tmp_path / "moved")
    for step in (0, 1):
        source = tmp_path / "run" / "checkpoints" / f"step_{step:06d}"
        assert cli.main(["export", str(source), str(tmp_path / f"out{step}")]) == 0
    assert same(tensors(tmp_path / "out0"), tensors(tmp_path / "moved"))
    wanted = next(part for part in scores if part)
    assert transformers_scores(tmp_path / "out1") == pytest.approx(wanted, abs=1e-5)
    assert transformers_scores(tmp_path / "out0") != pytest.approx(wanted, abs=1e-2)


def sft(source: Path, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    run = folder / "run.yaml"
    run.write_text(f"run: {{dir: {folder}/runs}}\nmodel: {{path: {source}}}\ntask: {{name: addition}}\n")
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-P", "-m", "moe_rl.cli", "sft", str(run), *overrides]
    environment |= {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def load_tied(runtime: Runtime, source: Path) -> str:
    with process_groups(ParallelConfig(tensor=2)) as groups:
        model = MoEModel(describe(source).model(source), groups, runtime.device, seed=1)
        before = [parameter.clone() for chunk in model.bare for parameter in chunk.parameters()]
        try:
            live.load(source, model)
        except ValueError as error:
            after = [parameter for chunk in model.bare for parameter in chunk.parameters()]
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
            return str(error)
        return ""


def test_a_tied_output_layer_is_compared_before_a_weight_changes(tmp_path: Path) -> None:
    """Each rank compares other rows, and all hear of the one that differs."""
    make("qwen3", tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
    save_file(found, tmp_path / "hf" / "model.safetensors")
    assert run_on_ranks(load_tied, 2, tmp_path / "hf") == ["", ""]
    found["lm_head.weight"][130, 63] += 1
    save_file(found, tmp_path / "hf" / "model.safetensors")
    told = run_on_ranks(load_tied, 2, tmp_path / "hf")
    assert told[0] == told[1] and "tensor lm_head.weight is not model.embed_tokens.weight" in told[0]


def test_a_run_from_a_directory_and_one_that_breaks(tmp_path: Path) -> None:
    """Through the command line, in two processes: no import of its own, and one line where a tensor is missing."""
    make("qwen3_moe", tmp_path / "hf", vocab_size=259, num_hidden_layers=2)
    ByteTokenizer().save(tmp_path / "hf")
    quick = ["sft.steps=1", "sft.warmup_updates=0", "eval.problems=2", "rollout.max_response_tokens=2"]
    done = sft(tmp_path / "hf", tmp_path, "parallel.expert=2", *quick)
    assert done.returncode == 0, done.stderr
    assert cli.main(["export", str(tmp_path / "runs" / "run"), str(tmp_path / "out")]) == 0
    ours, theirs = tensors(tmp_path / "out"), tensors(tmp_path / "hf")
    assert ours.keys() == theirs.keys() and not all(torch.equal(ours[name], theirs[name]) for name in ours)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    del found["model.norm.weight"]
    save_file(found, tmp_path / "hf" / "model.safetensors")
    done = sft(tmp_path / "hf", tmp_path, "run.name=broken", "run.processes=2")
    assert done.returncode == 2
    assert done.stderr == f"moe-rl: error: {tmp_path}/hf: tensor model.norm.weight [64] is missing\n"
    assert not (tmp_path / "runs" / "broken").exists()
