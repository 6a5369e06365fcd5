"""`moe-rl import` and `moe-rl export` through the command line: there and back, to the bit."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.convert import hashing
from models.convert.checkpoint_reader import CheckpointReader
from moe_rl import checkpoint, cli
from moe_rl.tasks import ByteTokenizer
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built
from tests.hf_checkpoints import FAMILIES, make

Tensors = dict[str, Tensor]


def tensors(directory: Path) -> Tensors:
    """As the safetensors library reads them."""
    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


def same(ours: Tensors, theirs: Tensors) -> bool:
    """Names, types, shapes and bytes."""
    assert ours.keys() == theirs.keys()
    return all(_same(ours[name], theirs[name]) for name in ours)


def _same(one: Tensor, other: Tensor) -> bool:
    as_bytes = [tensor.contiguous().view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*as_bytes)


def config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def rewrite(directory: Path, change: Callable[[Tensors], Tensors | None]) -> Tensors:
    """Changes the tensors of a directory with one file."""
    found = tensors(directory)
    found = change(found) or found
    save_file(found, directory / "model.safetensors", {"format": "pt"})
    return found


def there_and_back(source: Path, folder: Path, *options: str) -> Path:
    """Imported to folder/ckpt, exported to folder/back."""
    assert cli.main(["import", str(source), str(folder / "ckpt")]) == 0
    assert cli.main(["export", str(folder / "ckpt"), str(folder / "back"), *options]) == 0
    return folder / "back"


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE in float32 with the byte tokenizer, in one file."""
    directory = tmp_path_factory.mktemp("source") / "hf"
    make("qwen3_moe", directory, vocab_size=259, num_hidden_layers=2)
    ByteTokenizer().save(directory)
    (directory / "chat_template.jinja").write_text("{% for turn in messages %}{{ turn.content }}\n{% endfor %}")
    return directory


@pytest.fixture
def copy(moe: Path, tmp_path: Path) -> Path:
    return shutil.copytree(moe, tmp_path / "hf")


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_the_same(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several files: every tensor, setting and small file, and transformers gives the same logits."""
    model = make(family, tmp_path / "hf", max_shard_size="300KB")
    ByteTokenizer().save(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    back, count = there_and_back(tmp_path / "hf", tmp_path), len(tensors(tmp_path / "hf"))
    assert same(tensors(back), tensors(tmp_path / "hf"))
    said = capsys.readouterr().out
    assert f"{count} tensors" in said and f"{count} of them are as they were imported" in said
    expected = config(tmp_path / "hf")
    if family == "deepseek_v3":  # transformers writes none of the tensors for multi-token prediction that it counts there
        expected["num_nextn_predict_layers"] = 0
    assert config(back) == expected
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (back / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    tokens = torch.randint(0, 131, (2, 24))
    again = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "ckpt", "hf"]


def test_every_kind_of_file_beside_the_weights_comes_back(moe: Path, tmp_path: Path) -> None:
    source = shutil.copytree(moe, tmp_path / "hf")
    for name in ("vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "modeling.py"):
        (source / name).write_text(f"of {name}")
    (source / "README.md").write_text("not ours")
    back = there_and_back(source, tmp_path)
    names = {path.name for path in source.iterdir()} - {"README.md"}
    assert {path.name for path in back.iterdir()} == names
    for name in names - {"config.json", "model.safetensors"}:
        assert (back / name).read_bytes() == (source / name).read_bytes()
    text = "naïve 日本 🙂\n\x00 <s> a  b"
    assert ByteTokenizer().encode(text.replace("<s>", "")) == AutoTokenizer.from_pretrained(moe).encode(text.replace("<s>", ""))


def test_types_are_kept_tensor_by_tensor(copy: Path, tmp_path: Path) -> None:
    """Also where two of them share a tensor in the checkpoint: queries and keys, gate and up projection."""
    wide = ("norm.weight", "mlp.gate.weight", "k_proj.weight", "experts.3.up_proj.weight")

    def change(found: Tensors) -> Tensors:
        return {name: value if name.endswith(wide) else value.bfloat16() for name, value in found.items()}

    source = rewrite(copy, change)
    assert {value.dtype for value in source.values()} == {torch.float32, torch.bfloat16}
    back = there_and_back(copy, tmp_path)
    assert same(tensors(back), source)
    assert config(back)["dtype"] == "bfloat16"  # what most are


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_bfloat16_with_a_float32_bias_of_the_router(family: str, tmp_path: Path) -> None:
    make(family, tmp_path / "hf", dtype=torch.bfloat16, num_hidden_layers=2)
    source = tensors(tmp_path / "hf")
    if family == "deepseek_v3":
        source = rewrite(
            tmp_path / "hf", lambda found: {n: v.float() if n.endswith("correction_bias") else v for n, v in found.items()}
        )
        assert source["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    back = there_and_back(tmp_path / "hf", tmp_path)
    assert same(tensors(back), source) and config(back) == config(tmp_path / "hf") | (
        {"num_nextn_predict_layers": 0} if family == "deepseek_v3" else {}
    )


def test_float16_comes_back_and_is_trained_in_float32(copy: Path, tmp_path: Path, runtime: Runtime) -> None:
    source = rewrite(copy, lambda found: {name: value.half() for name, value in found.items()})
    (copy / "config.json").write_text(json.dumps(config(copy) | {"dtype": "float16"}))
    back = there_and_back(copy, tmp_path)
    assert same(tensors(back), source) and config(back)["dtype"] == "float16"
    from models.convert.huggingface import describe

    with built(Case(model=describe(copy).values | dict(preset=None), seed=3), runtime) as model:
        checkpoint.load_weights(tmp_path / "ckpt", model)
        weight = dict(model.bare[0].named_parameters())["decoder.final_layernorm.weight"]
        assert weight.dtype == torch.float32 and torch.equal(weight, source["model.norm.weight"].float())


def test_an_export_may_be_in_another_type_and_in_files_of_a_size(moe: Path, tmp_path: Path) -> None:
    back = there_and_back(moe, tmp_path, "--dtype", "bfloat16")
    assert same(tensors(back), {name: value.bfloat16() for name, value in tensors(moe).items()})
    assert config(back) == config(moe) | {"dtype": "bfloat16"}


def test_a_tied_output_layer_that_is_in_the_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make("qwen3", tmp_path / "hf")
    source = rewrite(tmp_path / "hf", lambda found: found | {"lm_head.weight": found["model.embed_tokens.weight"].clone()})
    back = there_and_back(tmp_path / "hf", tmp_path)
    said = capsys.readouterr().out
    assert "not converted, since this model has no such part of its own: lm_head.weight\n" in said
    assert same(tensors(back), {name: value for name, value in source.items() if name != "lm_head.weight"})
    again = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_layers_for_multi_token_prediction_are_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("deepseek_v3", tmp_path / "hf", num_hidden_layers=2)
    whole = tensors(tmp_path / "hf")
    more = {name.replace("layers.1.", "layers.2."): value.clone() for name, value in whole.items() if "layers.1." in name}
    more |= {
        "model.layers.2.eh_proj.weight": torch.ones(64, 128),
        "model.layers.2.shared_head.head.weight": torch.ones(131, 64),
    }
    rewrite(tmp_path / "hf", lambda found: found | more)
    back = there_and_back(tmp_path / "hf", tmp_path)
    assert f" and {len(more) - 1} more\n" in capsys.readouterr().out
    assert same(tensors(back), whole)
    assert config(back) == config(tmp_path / "hf") | {"num_nextn_predict_layers": 0}


def test_large_tensors_go_through_in_parts(
    moe: Path, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 1.5 KB, so of 6 rows: across queries and keys, gate and up; and Megatron loads what lies in many chunks."""
    monkeypatch.setattr(hashing, "_BLOCK", 1536)
    back = there_and_back(moe, tmp_path)
    assert same(tensors(back), tensors(moe))
    reader = CheckpointReader(tmp_path / "ckpt")
    assert len(reader._tensors["embedding.word_embeddings.weight"].chunks) == -(-320 // 6)
    from models.convert.huggingface import describe

    with built(Case(model=describe(moe).values | dict(preset=None), seed=3), runtime) as model:
        checkpoint.load_weights(tmp_path / "ckpt", model)
        found = dict(model.bare[0].named_parameters())["embedding.word_embeddings.weight"]
        assert torch.equal(found[:259], tensors(moe)["model.embed_tokens.weight"])


def test_paths_as_people_write_them(moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub's cache, which is links to blobs; relative, with spaces and slashes at the end, into folders that are not there."""
    (tmp_path / "snapshots" / "a b").mkdir(parents=True)
    for number, path in enumerate(sorted(moe.iterdir())):
        shutil.copy(path, tmp_path / str(number))
        (tmp_path / "snapshots" / "a b" / path.name).symlink_to(f"../../{number}")
    (tmp_path / "link").symlink_to("snapshots/a b")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", "link/", "new folder/in it/ckpt/"]) == 0
    assert cli.main(["export", "./new folder/in it/ckpt/", "back/"]) == 0
    shutil.rmtree("snapshots")
    assert same(tensors(tmp_path / "back"), tensors(moe))
    assert not any(path.is_symlink() for path in (tmp_path / "back").iterdir())
    (tmp_path / "empty").mkdir()  # may be there, and be where a link leads
    os.symlink("empty", "to_empty")
    assert cli.main(["export", "new folder/in it/ckpt", "to_empty", "--like", str(moe)]) == 0
    assert same(tensors(tmp_path / "empty"), tensors(moe))
