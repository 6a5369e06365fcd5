"""Reading safetensors: against the safetensors library and slices of the whole, and every kind of damage."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from models.convert import safetensors_reader
from models.convert.safetensors_headers import DTYPES, INDEX
from models.convert.safetensors_reader import Reader
from parallel.errors import UsageError

TINY: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8
) | dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)


def every_dtype() -> dict[str, Tensor]:
    torch.manual_seed(0)
    raw = torch.randint(0, 256, (24,), dtype=torch.uint8)
    typed = {f"type {code}": raw.clone().view(dtype) for code, dtype in DTYPES.items() if code != "BOOL"}
    return typed | {"type BOOL": raw > 99, "scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "odd": raw[:3].clone()}


def sharded(folder: Path) -> dict[str, Tensor]:
    """Four tensors in two files with an index."""
    tensors = {name: torch.arange(12.0).reshape(3, 4) + i for i, name in enumerate("abcd")}
    files = {"model-00001-of-00002.safetensors": "ab", "model-00002-of-00002.safetensors": "cd"}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 192}, "weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize("name", ["model.safetensors", "consolidated.safetensors"])
def test_every_type_is_read_as_the_library_wrote_it(tmp_path: Path, name: str) -> None:
    tensors = every_dtype()
    save_file(tensors, tmp_path / name)
    reader = Reader(tmp_path)
    assert reader.names.keys() == tensors.keys()
    for key, tensor in tensors.items():
        entry, read = reader.names[key], reader.read(key)
        assert (entry.dtype, entry.shape, entry.nbytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert bytes(read.reshape(-1).view(torch.uint8).numpy()) == bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def test_what_transformers_saves_in_shards_is_read_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY)).save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    wanted = {name: tensor for file in files for name, tensor in load_file(file).items()}
    reader = Reader(tmp_path)
    assert len(files) > 2
    assert reader.names.keys() == wanted.keys()
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in wanted.items())
    assert reader.bytes_read == sum(tensor.nbytes for tensor in wanted.values())


def random_slice(generator: random.Random, size: int) -> slice:
    start, stop = sorted((generator.randint(0, size), generator.randint(0, size)))
    kinds = [
        slice(None),
        slice(start, stop),
        slice(start, start + 1),
        slice(-2, None),
        slice(start, stop, generator.randint(1, 3)),
    ]
    return generator.choice(kinds)


@pytest.mark.parametrize("shape", [(), (7,), (0, 4), (5, 6), (3, 40, 50), (2, 3, 90, 20)])
def test_a_part_is_that_slice_of_the_whole(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape)
    save_file({"before": torch.rand(3), "tensor": tensor, "x": torch.rand(5)}, tmp_path / "model.safetensors")
    reader, generator = Reader(tmp_path), random.Random(0)
    for _ in range(200):
        index = tuple(random_slice(generator, size) for size in shape[: generator.randint(0, len(shape))])
        part = reader.read("tensor", index)
        assert torch.equal(part, tensor[index]), index
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.nbytes, index  # no hull is kept behind it


@pytest.mark.parametrize(
    ("index", "read"),
    [
        ((slice(2, 5),), 3 * 64 * 2048),  # rows
        ((slice(2, 5), slice(16, 32)), 3 * 16 * 2048),  # of each of three, a part
        ((slice(2, 3), slice(0, 64, 2)), 63 * 2048),  # every second: from the first to the last
        ((slice(0, 8, 4),), 5 * 64 * 2048),
        ((slice(0, 8, 4), slice(0, 2)), 2 * 2 * 2048),  # outer steps are skipped
        ((slice(1, 2), slice(3, 4), slice(0, 256)), 1024),  # of one row, a part
        ((slice(1, 2), slice(3, 6), slice(0, 256)), 3 * 2048),  # of three: short runs, so the rows are read
        ((slice(4, 4),), 0),
    ],
)
def test_only_the_bytes_of_a_part_are_read(tmp_path: Path, index: tuple[slice, ...], read: int) -> None:
    save_file({"tensor": torch.rand(8, 64, 512)}, tmp_path / "model.safetensors")
    reader = Reader(tmp_path)
    reader.read("tensor", index)
    assert reader.bytes_read == read


def test_long_columns_are_read_without_what_lies_between_them(tmp_path: Path) -> None:
    tensor = torch.rand(16, 4096)
    save_file({"tensor": tensor}, tmp_path / "model.safetensors")
    reader = Reader(tmp_path)
    assert torch.equal(reader.read("tensor", (slice(None), slice(2048, 4096))), tensor[:, 2048:])
    assert reader.bytes_read == 16 * 2048 * 4


def test_a_long_read_goes_on_where_the_system_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call gives at most 2 GiB."""
    tensor = torch.rand(5, 7)
    save_file({"tensor": tensor}, tmp_path / "model.safetensors")
    whole = safetensors_reader.os.preadv
    monkeypatch.setattr(safetensors_reader.os, "preadv", lambda fd, views, at: whole(fd, [views[0][:3]], at))
    assert torch.equal(Reader(tmp_path).read("tensor", (slice(1, 4),)), tensor[1:4])


def edited(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The header of `file` changed, the data as they were."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def remove_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def rename_tensor(folder: Path) -> None:
    edited(folder / "model-00002-of-00002.safetensors", lambda header: header.update(other=header.pop("c")))


def repeat_tensor(folder: Path) -> None:
    edited(folder / "model-00002-of-00002.safetensors", lambda header: header.update(b=header.pop("c")))


def truncate(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-20])


def lengthen(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes() + b"12345")


def exchange_shards(folder: Path) -> None:
    names = {"a": 2, "b": 1, "c": 1, "d": 2}
    weight_map = {name: f"model-0000{number}-of-00002.safetensors" for name, number in names.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def empty(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")


def pointer(folder: Path) -> None:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 144\n"
    (folder / "model-00001-of-00002.safetensors").write_bytes(text)


def rubbish(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes((9).to_bytes(8, "little") + b'{"a": [1]')


def reshape(folder: Path) -> None:
    edited(folder / "model-00001-of-00002.safetensors", lambda header: header["b"].update(shape=[3, 5]))


def overlap(folder: Path) -> None:
    edited(folder / "model-00001-of-00002.safetensors", lambda header: header["b"].update(data_offsets=[40, 88]))


def retype(folder: Path) -> None:
    edited(folder / "model-00001-of-00002.safetensors", lambda header: header["a"].update(dtype="F6_E2M3"))


def shapeless(folder: Path) -> None:
    edited(folder / "model-00001-of-00002.safetensors", lambda header: header["a"].pop("shape"))


def twice(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    text = b'{"a": {}, "a": {}}'
    file.write_bytes(len(text).to_bytes(8, "little") + text)


def no_map(folder: Path) -> None:
    (folder / INDEX).write_text('{"metadata": {}}')


def no_index(folder: Path) -> None:
    (folder / INDEX).write_text("")


def no_files(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def pickled(folder: Path) -> None:
    no_files(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")


def folder_for_a_file(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (remove_shard, r"index\.json: names model-00002-of-00002\.safetensors, which is not there; fetch it"),
        (folder_for_a_file, r"index\.json: names model-00001-of-00002\.safetensors, which is not there"),
        (rename_tensor, r"model-00002-of-00002\.safetensors: lacks the tensor c that model\.safetensors\.index\.json lists"),
        (exchange_shards, r"model-00002-of-00002\.safetensors: lacks the tensor a that model\.safetensors\.index\.json lists"),
        (repeat_tensor, r"model-00002-of-00002\.safetensors: tensor b is also in model-00001-of-00002\.safetensors"),
        (truncate, r"model-00002-of-00002\.safetensors: tensor d is cut off: it ends at byte \d+, the file at \d+; fetch"),
        (lengthen, r"model-00002-of-00002\.safetensors: has 5 bytes behind its last tensor"),
        (empty, r"model-00001-of-00002\.safetensors: has no safetensors header \(0 bytes in all\)"),
        (pointer, r"model-00001-of-00002\.safetensors: is a Git LFS pointer, not the weights; fetch them with git lfs pull"),
        (rubbish, r"model-00001-of-00002\.safetensors: its JSON cannot be read: Expecting"),
        (reshape, r"tensor b: shape \[3, 5\] of float32 takes 60 bytes, the header gives it 48"),
        (overlap, r"tensor b does not begin where the one before it ends"),
        (retype, r"tensor a: dtype F6_E2M3 is not known; known are F64, F32"),
        (shapeless, r"tensor a: the header does not say dtype, shape and offsets"),
        (twice, r"its JSON cannot be read: a is there twice"),
        (no_map, r"index\.json: has no weight_map from tensors to files"),
        (no_index, r"index\.json: its JSON cannot be read: Expecting value"),
        (no_files, r"holds no \*\.safetensors; name the directory of a model in Hugging Face's format"),
        (pickled, r"holds pytorch_model\.bin and no \*\.safetensors; convert it first, by transformers'"),
    ],
)
def test_damage_is_found_on_opening(tmp_path: Path, damage: Callable[[Path], None], text: str) -> None:
    sharded(tmp_path)
    Reader(tmp_path)
    damage(tmp_path)
    with pytest.raises(UsageError, match=rf"^{re.escape(str(tmp_path))}.*{text}") as caught:
        Reader(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path / 'none'}: is not a directory")):
        Reader(tmp_path / "none")


def test_a_file_that_shrinks_while_it_is_open_is_noticed(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    reader = Reader(tmp_path)
    truncate(tmp_path)
    assert torch.equal(reader.read("c"), tensors["c"])
    with pytest.raises(UsageError, match=r"00002\.safetensors: tensor d is cut off now, on opening it was not"):
        reader.read("d")
    remove_shard(tmp_path)
    with pytest.raises(UsageError, match=r"00002\.safetensors: tensor d cannot be read: No such file"):
        reader.read("d")
