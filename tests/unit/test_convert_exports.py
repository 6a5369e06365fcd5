"""`moe-rl export` of what was trained: the values are the trainer's, and what would mean something else is refused."""

import json
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from models.config import ModelConfig, OptimizerConfig
from models.convert import live, manifest
from models.convert.exporting import export_directory
from models.convert.huggingface import describe
from models.model import MoEModel
from models.stream import pack_sequences
from moe_rl import checkpoint, cli
from moe_rl.checkpoint import CriticState, Progress
from moe_rl.tasks import ByteTokenizer
from parallel.config import ParallelConfig
from parallel.groups import process_groups
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built
from tests.distributed.updates import update
from tests.distributed.value_passes import both, set_head
from tests.hf_checkpoints import make
from tests.unit.test_convert_commands import config, same, tensors

SEQUENCES = [[5, 17, 99, 200, 3, 3, 42, 258], [7, 8, 250, 1, 2]]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("origin") / "hf"
    make("qwen3_moe", directory, vocab_size=259, num_hidden_layers=2)
    ByteTokenizer().save(directory)
    return directory


def scores(model: MoEModel) -> list[float]:
    """Log-probabilities of every token but a sequence's first."""
    streams = [pack_sequences([ids], [1], len(ids) - 1, model.device) for ids in SEQUENCES]
    return [p for scored in model.score(streams) for p in scored.logprobs.tolist()]


def transformers_scores(directory: Path) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for ids in SEQUENCES:
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            found += logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return found


def saved(model: MoEModel, run: Path, steps: int = 1) -> list[float]:
    """Trains and saves that many steps in a run's directory; what the last weights score."""
    optimizer = model.optimizer(OptimizerConfig(lr=1e-2), total_updates=20)
    for step in range(1, steps + 1):
        update(model, optimizer, step)
        checkpoint.save(run / "checkpoints", Progress(step, 0, step, 0.0), model, optimizer, keep=2)
    return scores(model)


def error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    target = Path(str(arguments[1]))
    before = sorted(target.parent.iterdir())
    assert cli.main(["export", *map(str, arguments)]) == 2
    assert sorted(target.parent.iterdir()) == before
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture(scope="module")
def run(origin: Path, runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run with two checkpoints from model.path, whose directory is gone since; and what its last weights score."""
    folder = tmp_path_factory.mktemp("run")
    source = shutil.copytree(origin, folder / "hf")
    settings = describe(source).model(source).model_copy(update=dict(max_positions=99, tokenizer=str(source)))
    with process_groups(ParallelConfig()) as groups:
        model = MoEModel(settings, groups, runtime.device, seed=7)
        live.load(source, model)
        logprobs = saved(model, folder / "runs" / "rl", steps=2)
    shutil.rmtree(source)
    return folder / "runs" / "rl", logprobs


def test_a_run_gives_its_newest_weights(
    run: tuple[Path, list[float]], origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Computed by transformers, they score as in the trainer; it takes neither the origin nor the run's settings."""
    directory, wanted = run
    assert cli.main(["export", str(directory), str(tmp_path / "out")]) == 0
    assert "/step_000002 in " in capsys.readouterr().out
    assert transformers_scores(tmp_path / "out") == pytest.approx(wanted, abs=1e-5)
    assert transformers_scores(origin) != pytest.approx(wanted, abs=0.1)
    assert config(tmp_path / "out") == config(origin)  # max_positions bounds the run alone
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (origin / name).read_bytes()
    assert cli.main(["export", str(directory / "checkpoints" / "step_000001"), str(tmp_path / "first")]) == 0
    assert transformers_scores(tmp_path / "first") != pytest.approx(wanted, abs=0.01)


def test_another_type_and_files_of_a_size(run: tuple[Path, list[float]], tmp_path: Path) -> None:
    newest = run[0] / "checkpoints" / "step_000002"
    assert cli.main(["export", str(newest), str(tmp_path / "whole")]) == 0
    assert cli.main(["export", str(newest), str(tmp_path / "half"), "--dtype", "bfloat16", "--shard-gb", "1"]) == 0
    whole = tensors(tmp_path / "whole")
    assert same(tensors(tmp_path / "half"), {name: value.bfloat16() for name, value in whole.items()})
    assert config(tmp_path / "half")["dtype"] == "bfloat16"
    export_directory(newest, tmp_path / "parts", shard_bytes=200_000)
    files = sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert same(tensors(tmp_path / "parts"), whole)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    assert transformers_scores(tmp_path / "parts") == pytest.approx(run[1], abs=1e-5)


def test_another_directory_may_say_what_the_model_is(
    run: tuple[Path, list[float]], origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    like = shutil.copytree(origin, tmp_path / "like")
    (like / "config.json").write_text(json.dumps(config(origin) | {"max_position_embeddings": 7777}))
    (like / "model.safetensors").unlink()
    assert cli.main(["export", str(run[0]), str(tmp_path / "out"), "--like", str(like)]) == 0
    assert config(tmp_path / "out")["max_position_embeddings"] == 7777
    capsys.readouterr()
    for key, value, text in (
        ("rms_norm_eps", 1e-3, "was trained with model.norm_epsilon=1e-06, "),
        ("norm_topk_prob", False, "was trained with model.router_pre_softmax=False, "),
        ("num_hidden_layers", 3, "was trained with model.layers=2, "),
        ("vocab_size", 200, "was trained with model.vocab_size=259, "),
    ):
        (like / "config.json").write_text(json.dumps(config(origin) | {key: value}))
        line = error(capsys, run[0], tmp_path / "no", "--like", like)
        assert text in line and "name a fitting directory with --like" in line
    make("qwen3", like, vocab_size=259, num_hidden_layers=2)
    capsys.readouterr()
    assert "was trained with model." in error(capsys, run[0], tmp_path / "no", "--like", like)
    assert "--like=nowhere: config.json cannot be read" in error(capsys, run[0], tmp_path / "no", "--like", "nowhere")


def test_a_setting_that_gives_the_weights_another_meaning(
    origin: Path, runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = describe(origin).model(origin).model_copy(update=dict(rope_base=5000.0))
    with process_groups(ParallelConfig()) as groups:
        saved(MoEModel(settings, groups, runtime.device, seed=7), tmp_path / "run")
    line = error(capsys, tmp_path / "run", tmp_path / "out")
    assert "was trained with model.rope_base=5000.0, " in line and "config.json says 10000.0" in line


def test_what_is_no_checkpoint_or_not_all_of_one(
    run: tuple[Path, list[float]], origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "empty" / "checkpoints").mkdir(parents=True)
    for path in (tmp_path / "nowhere", tmp_path / "runs" / "empty"):
        assert f"CKPT={path}: holds no complete checkpoint" in error(capsys, path, tmp_path / "out")
    assert f"CKPT={origin}: is a Hugging Face directory" in error(capsys, origin, tmp_path / "out")
    newest = run[0] / "checkpoints" / "step_000002"

    def broken(name: str) -> Path:
        shutil.rmtree(tmp_path / "ckpt", ignore_errors=True)
        return shutil.copytree(newest, tmp_path / "ckpt") / name

    broken("__0_0.distcp").unlink()
    assert "__0_0.distcp: is not there" in error(capsys, tmp_path / "ckpt", tmp_path / "out")
    file = broken("__0_0.distcp")
    file.write_bytes(file.read_bytes()[:200_000])
    assert "__0_0.distcp: tensor " in (line := error(capsys, tmp_path / "ckpt", tmp_path / "out")) and "is cut off" in line
    file = broken(".metadata")
    whole = bytearray(file.read_bytes())
    for bit in random.Random(0).sample(range(8 * len(whole)), 20):  # unpickled, it may ask for any amount of memory
        whole[bit // 8] ^= 1 << bit % 8
        file.write_bytes(whole)
        assert ".metadata: is not what was saved: its hash is" in error(capsys, tmp_path / "ckpt", tmp_path / "out")
        whole[bit // 8] ^= 1 << bit % 8
    file = broken(".metadata")
    contents = pickle.loads(file.read_bytes())
    del contents.state_dict_metadata["decoder.layers.0.mlp.router.weight"]
    file.write_bytes(pickle.dumps(contents))
    manifest.write(tmp_path / "ckpt", manifest.listed(tmp_path / "ckpt", {}))
    line = error(capsys, tmp_path / "ckpt", tmp_path / "out")
    assert "tensor decoder.layers.0.mlp.router.weight is missing, must be [8, 64]" in line
    broken("model.json").write_text("{")
    assert "model.json: cannot be read" in error(capsys, tmp_path / "ckpt", tmp_path / "out")
    broken("huggingface/config.json").write_text("{")
    assert "config.json is not JSON" in error(capsys, tmp_path / "ckpt", tmp_path / "out")
    broken("huggingface/tensors.json").write_text("[]")
    assert "tensors.json: cannot be read" in error(capsys, tmp_path / "ckpt", tmp_path / "out")


def test_ppo_gives_its_policy(runtime: Runtime, tmp_path: Path) -> None:
    with both(Case(model=dict(layers=2)), runtime) as (policy, model):
        set_head(model, 1)
        critic = CriticState(model, model.optimizer(OptimizerConfig(), 20))
        optimizer = policy.optimizer(OptimizerConfig(), 20)
        checkpoint.save(tmp_path / "run" / "checkpoints", Progress(1, 0, 0, 0.0), policy, optimizer, keep=1, critic=critic)
        wanted = scores(policy)
    assert (tmp_path / "run" / "checkpoints" / "step_000001" / "critic").is_dir()
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert transformers_scores(tmp_path / "out") == pytest.approx(wanted, abs=1e-5)


PRESETS: list[dict[str, Any]] = [
    {},
    dict(dense_layers=[1], router_pre_softmax=True, tie_embeddings=True),
    dict(experts=0, topk=0, moe_ffn=0),
    dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32), vocab_size=300),
]


@pytest.mark.parametrize("variant", PRESETS, ids=["tiny_moe", "dense layers, tied", "dense", "yarn"])
def test_a_model_that_was_made_here(runtime: Runtime, tmp_path: Path, variant: dict[str, Any]) -> None:
    """Of Qwen3's shape: transformers computes the same, and its tokenizer is the one of bytes."""
    with built(Case(model=dict(layers=2) | variant, seed=5), runtime) as model:
        wanted = saved(model, tmp_path / "run")
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert transformers_scores(tmp_path / "out") == pytest.approx(wanted, abs=1e-5)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("plain text", "naïve — 日本語 🙂", " \n\t  two  spaces ", "\x00\x1f\x7f", "".join(map(chr, range(0x2500)))):
        ids = ByteTokenizer().encode(text)
        assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (ByteTokenizer.pad_id, ByteTokenizer.eos_id)


def test_a_tokenizer_beside_a_preset_is_kept(origin: Path, runtime: Runtime, tmp_path: Path) -> None:
    """With the checkpoint: its directory may be gone."""
    tokenizer = shutil.copytree(origin, tmp_path / "words")
    (tokenizer / "tokenizer_config.json").write_text(
        json.dumps(json.loads((origin / "tokenizer_config.json").read_text()) | {"model_max_length": 4321})
    )
    settings = ModelConfig.model_validate(Case(model=dict(layers=1)).config.model_dump() | {"tokenizer": str(tokenizer)})
    with process_groups(ParallelConfig()) as groups:
        saved(MoEModel(settings, groups, runtime.device, seed=7), tmp_path / "run")
    shutil.rmtree(tokenizer)
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 4321
    assert config(tmp_path / "out")["num_hidden_layers"] == 1


def test_a_model_of_no_known_family(runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for variant, text in (
        (dict(router_score="sigmoid", expert_bias=True), "model.router_score=sigmoid"),
        (dict(shared_ffn=32), "model.shared_ffn=32"),
        (dict(qk_norm=False), "model.qk_norm=False"),
    ):
        with built(Case(model=dict(layers=1) | variant), runtime) as model:
            checkpoint.save_weights(tmp_path / "ckpt", model)
        line = error(capsys, tmp_path / "ckpt", tmp_path / "out")
        assert f"CKPT={tmp_path}/ckpt: {text}: no Qwen3 has that" in line and "--like" in line
    (tmp_path / "ckpt" / "model.json").unlink()  # as other programs write checkpoints
    assert "was not made from a Hugging Face model" in error(capsys, tmp_path / "ckpt", tmp_path / "out")
