"""What `moe-rl import` and model.path refuse: one line that names the file or tensor, exit code 2, and nothing left."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_rl import cli
from moe_rl.tasks import ByteTokenizer
from tests.hf_checkpoints import make

SHARDED, TIED = "sharded", "tied"  # beside "moe": which model is broken
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "MOE_RL_ERROR_DIR")


def with_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def broken(directory: Path) -> None:
        found = load_file(directory / "model.safetensors")
        change(found)
        save_file(found, directory / "model.safetensors")

    return broken


def with_config(**changes: Any) -> Callable[[Path], None]:
    def broken(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return broken


def truncated(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def rename(found: dict[str, Tensor]) -> None:
    found["model.layers.1.mlp.experts.2.down.weight"] = found.pop("model.layers.1.mlp.experts.2.down_proj.weight")


GATE, QUERY, HEAD = "model.layers.1.mlp.gate.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"
NOISE = "model.layers.0.mlp.experts.1.up_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "removed": (with_tensors(lambda t: t.pop(GATE)), f"tensor {GATE} [8, 64] is missing"),
    "no output layer": (with_tensors(lambda t: t.pop(HEAD)), f"tensor {HEAD} [259, 64] is missing"),
    "renamed": (with_tensors(rename), "tensor model.layers.1.mlp.experts.2.down_proj.weight [64, 48] is missing"),
    "extra": (
        with_tensors(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(128)})),
        "tensor model.layers.0.self_attn.q_proj.bias [128] is unexpected in a qwen3_moe model",
    ),
    "one expert more": (
        with_tensors(lambda t: t.update({NOISE.replace("experts.1", "experts.8"): torch.ones(48, 64)})),
        "tensor model.layers.0.mlp.experts.8.up_proj.weight [48, 64] is unexpected",
    ),
    "one layer more": (
        with_tensors(lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)})),
        "tensor model.layers.2.input_layernorm.weight [64] is unexpected",
    ),
    "shape": (
        with_tensors(lambda t: t.update({QUERY: t[QUERY][:-2].contiguous()})),
        f"tensor {QUERY} has shape [126, 64], must be [128, 64]",
    ),
    "transposed": (
        with_tensors(lambda t: t.update({NOISE: t[NOISE].T.contiguous()})),
        f"tensor {NOISE} has shape [64, 48], must be [48, 64]",
    ),
    "vocabulary": (with_config(vocab_size=260), "tensor model.embed_tokens.weight has shape [259, 64], must be [260, 64]"),
    "integers": (with_tensors(lambda t: t.update({QUERY: t[QUERY].to(torch.int32)})), f"tensor {QUERY} is int32"),
    "float8 alone": (
        with_tensors(lambda t: t.update({QUERY: t[QUERY].to(torch.float8_e4m3fn)})),
        f"tensor {QUERY} is float8_e4m3fn, and config.json has no quantization_config; must be bfloat16, float16 or float32",
    ),
    "truncated": (truncated, "is cut off"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "holds no *.safetensors"),
    "a shard": (lambda d: (d / "model-00002-of-00003.safetensors").unlink(), "names model-00002-of-00003.safetensors"),
    "no configuration": (lambda d: (d / "config.json").unlink(), "config.json cannot be read: No such file"),
    "configuration cut off": (lambda d: (d / "config.json").write_text('{"model_type": '), "config.json is not JSON"),
    "configuration of bytes": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json is not JSON"),
    "configuration a list": (lambda d: (d / "config.json").write_text("[1]"), "model_type=None: cannot be converted"),
    "family": (with_config(model_type="mamba2"), "model_type=mamba2: cannot be converted; must be one of qwen3, "),
    "family a list": (with_config(model_type=["qwen3"]), "model_type=['qwen3']: cannot be converted"),
    "activation": (with_config(hidden_act="gelu"), "hidden_act=gelu: cannot be converted"),
    "rope": (
        with_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "rope_type=dynamic: cannot be converted; must be one of default, linear, yarn, llama3",
    ),
    "type": (with_config(hidden_size="64"), "config.json cannot be read: StrictDataclassFieldValidationError: "),
    "null": (with_config(num_experts_per_tok=None), "'num_experts_per_tok'"),
    "zero": (with_config(decoder_sparse_step=0), "config.json cannot be read: ZeroDivisionError"),
    "dtype": (with_config(dtype="float12"), "config.json cannot be read: AttributeError: "),
    "negative": (with_config(moe_intermediate_size=-48), "model.moe_ffn=-48: Input should be greater than or equal to 0"),
    "choices": (with_config(num_experts_per_tok=9), "model.topk=9: must be at most model.experts=8"),
    "quantised": (
        with_config(quantization_config={"quant_method": "awq", "bits": 4}),
        "quantization_config.quant_method=awq: must be mxfp4 or fp8",
    ),
    "tied and not": (
        with_tensors(lambda t: t.update({HEAD: t["model.embed_tokens.weight"].clone().index_fill_(0, torch.tensor(258), 0)})),
        f"tensor {HEAD} is not model.embed_tokens.weight, but config.json says tie_word_embeddings=true",
    ),
    "tied, of another shape": (
        with_tensors(lambda t: t.update({HEAD: torch.ones(5, 64)})),
        f"tensor {HEAD} is not model.embed_tokens.weight",
    ),
}
KINDS = {"a shard": SHARDED, "tied and not": TIED, "tied, of another shape": TIED}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    small: dict[str, Any] = dict(vocab_size=259, num_hidden_layers=2)
    made = {"moe": folder / "moe", SHARDED: folder / "sharded", TIED: folder / "tied"}
    make("qwen3_moe", made["moe"], mlp_only_layers=[], **small)
    make("qwen3_moe", made[SHARDED], max_shard_size="350KB", mlp_only_layers=[], **small)
    make("qwen3", made[TIED], **small)
    for directory in made.values():
        ByteTokenizer().save(directory)
    return made


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> str:
    """The one line, after which `folder` holds what it held."""
    before = sorted(folder.rglob("*"))
    assert cli.main([str(argument) for argument in arguments]) == 2
    assert sorted(folder.rglob("*")) == before
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("moe-rl: error: ")
    return lines[0]


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_directory(
    what: str, sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither imported nor trained on; that is found before a process starts."""
    source = shutil.copytree(sources[KINDS.get(what, "moe")], tmp_path / "hf")
    break_it, text = BROKEN[what]
    break_it(source)
    line = refused(capsys, tmp_path, "import", source, tmp_path / "ckpt")
    assert text in line and str(source) in line
    monkeypatch.setattr("parallel.launch.launch", lambda *_: pytest.fail("processes were started"))
    run = tmp_path / "run.yaml"
    run.write_text(f"run: {{dir: {tmp_path}/runs}}\nmodel: {{path: {source}}}\ntask: {{name: addition}}\n")
    for command in (["train"], ["sft", "sft.steps=1"], ["train", "run.processes=2"], ["eval"]):
        line = refused(capsys, tmp_path, command[0], run, *command[1:])
        assert text in line and str(source) in line


def test_targets_that_cannot_be(sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("mine")
    for target, text in (
        ("taken", "taken: exists already; name another directory, or remove it first"),
        ("file", "file: exists already"),
        ("file/ckpt", "cannot be written: Not a directory"),
        ("/proc/nothing/ckpt", "/proc/nothing"),
    ):
        assert text in refused(capsys, tmp_path, "import", sources["moe"], tmp_path / target)


def test_sources_that_are_none(sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = sources["moe"] / "config.json"
    assert f"HF_DIR={file}: config.json cannot be read: Not a directory" in refused(
        capsys, tmp_path, "import", file, tmp_path / "ckpt"
    )
    assert "HF_DIR=Qwen/Qwen3-30B-A3B: config.json cannot be read: No such file or directory" in refused(
        capsys, tmp_path, "import", "Qwen/Qwen3-30B-A3B", tmp_path / "ckpt"
    )


def test_settings_that_do_not_fit_the_weights(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(f"run: {{dir: {tmp_path}/runs}}\nmodel: {{path: {sources['moe']}}}\ntask: {{name: addition}}\n")
    for setting, text in (
        ("model.layers=1", "model.layers=1: the weights in "),
        ("model.layers=3", " have 2; leave model.layers out"),
        ("model.hidden=32", " have 64; leave model.hidden out"),
        ("model.vocab_size=300", "model.vocab_size=300: the weights in "),
        ("model.tie_embeddings=true", " have False; leave model.tie_embeddings out"),
    ):
        assert text in refused(capsys, tmp_path, "train", run, setting)
