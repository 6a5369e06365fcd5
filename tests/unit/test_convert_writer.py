"""Writing safetensors: what others read of it, and that nothing is left of an export that did not end."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from models.convert import placing, safetensors_writer
from models.convert.safetensors_headers import INDEX
from models.convert.safetensors_reader import Reader
from models.convert.safetensors_writer import Writer
from parallel.errors import UsageError
from tests.unit.test_convert_reader import TINY, every_dtype

ROOT = Path(__file__).parents[2]


def expected(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def written(path: Path, tensors: dict[str, Tensor], shard_bytes: int = 10**9) -> None:
    with Writer(path, expected(tensors), shard_bytes) as writer:
        for name in reversed(tensors):
            writer.add(name, tensors[name])


SOME = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(5.0)}


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    """Types of every width, in an order that would leave the wide ones unaligned."""
    tensors = {"first": torch.tensor([1, 2, 3], dtype=torch.uint8)} | every_dtype()
    written(tmp_path / "out", tensors)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert read[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
    assert all(entry.offset % entry.dtype.itemsize == 0 for entry in Reader(tmp_path / "out").names.values())


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_transformers_loads_the_model_that_was_written(tmp_path: Path, shard_bytes: int) -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY))
    model.save_pretrained(tmp_path / "saved")
    reader = Reader(tmp_path / "saved")
    stored = {name: (entry.dtype, entry.shape) for name, entry in reader.names.items()}
    with Writer(tmp_path / "out", stored, shard_bytes) as writer:
        for name in stored:
            writer.add(name, reader.read(name))
        writer.add_file("config.json", tmp_path / "saved" / "config.json")
        writer.add_file("generation_config.json", b"{}")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    wanted = model.state_dict()
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())
    assert (tmp_path / "out" / INDEX).exists() == (shard_bytes == 20_000)


def test_shards_take_tensors_in_order_until_they_are_full(tmp_path: Path) -> None:
    """Sizes 40, 40, 100, 4, 60 in files of at most 100: the third fills one of its own."""
    sizes = {"a": 10, "b": 10, "c": 25, "d": 1, "e": 15}
    written(tmp_path / "out", {name: torch.ones(size) for name, size in sizes.items()}, shard_bytes=100)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 244}
    assert index["weight_map"] == {
        "a": "model-00001-of-00003.safetensors",
        "b": "model-00001-of-00003.safetensors",
        "c": "model-00002-of-00003.safetensors",
        "d": "model-00003-of-00003.safetensors",
        "e": "model-00003-of-00003.safetensors",
    }


def test_rows_may_come_in_any_order(tmp_path: Path) -> None:
    tensor = torch.rand(7, 3, 5).bfloat16()
    with Writer(tmp_path / "out", expected({"x": tensor, "y": tensor[0]})) as writer:
        writer.add_rows("x", 4, tensor[4:])
        writer.add("y", tensor[0])
        writer.add_rows("x", 0, tensor[:4])
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(read["x"], tensor) and torch.equal(read["y"], tensor[0])


def test_a_transposed_tensor_is_written_as_it_reads(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    written(tmp_path / "out", {"x": tensor})
    assert load_file(tmp_path / "out" / "model.safetensors")["x"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("c", torch.ones(5), "c was not expected"),
        ("b", torch.ones(6), r"b has shape \(6,\), expected was \(5,\)"),
        ("b", torch.ones(5).half(), r"b is torch\.float16, expected was torch\.float32"),
        ("a", SOME["a"], "a was added twice"),
    ],
)
def test_what_was_not_expected_ends_it(tmp_path: Path, name: str, tensor: Tensor, text: str) -> None:
    with pytest.raises(RuntimeError, match=text), Writer(tmp_path / "out", expected(SOME)) as writer:
        writer.add("a", SOME["a"])
        writer.add(name, tensor)
    assert not list(tmp_path.iterdir())


def test_what_was_not_added_ends_it(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="a was not added whole, nor were 1 others"),
        Writer(tmp_path / "out", expected(SOME)) as writer,
    ):
        writer.add_rows("a", 1, SOME["a"][1:])
    assert not list(tmp_path.iterdir())


def test_a_file_beside_the_tensors_is_not_written_twice(tmp_path: Path) -> None:
    for name in ("model.safetensors", INDEX, "config.json"):
        with (
            pytest.raises(RuntimeError, match=f"{name} is written already"),
            Writer(tmp_path / "out", expected(SOME)) as writer,
        ):
            writer.add_file("config.json", b"{}")
            writer.add_file(name, b"{}")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), Writer(tmp_path / "deep" / "out", expected(SOME)) as writer:
        writer.add("a", SOME["a"])
        assert (tmp_path / "deep" / ".out.part" / "model.safetensors").exists()
        raise error
    assert not list((tmp_path / "deep").iterdir())


def test_a_place_that_is_taken_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("out", "file", "out/notes"):
        with pytest.raises(UsageError, match=re.escape(f"{tmp_path / name}: exists already; name another directory, or rem")):
            written(tmp_path / name, SOME)
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path / 'file' / '.out.part'}: cannot be written: Not a directory; ")):
        written(tmp_path / "file" / "out", SOME)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["file", "out", "out/notes"]


def test_a_mounted_disk_is_refused_before_anything_is_written() -> None:
    with pytest.raises(UsageError, match="^/proc: a disk is mounted there; name a directory in it"):
        written(Path("/proc"), SOME)


def test_an_empty_directory_a_link_and_a_part_of_a_killed_export_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part" / "model-00001-of-00002.safetensors").write_bytes(b"half")
    written(tmp_path / "link", SOME)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "out"]


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = placing.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(placing.shutil, "disk_usage", lambda _: usage._replace(free=60))
    with pytest.raises(UsageError, match=r"out: 2\d\d bytes are to be written and its disk has 60 free; name another disk"):
        written(tmp_path / "out", SOME)
    assert not list(tmp_path.iterdir())


def test_a_long_write_goes_on_where_the_system_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = safetensors_writer.os.pwrite
    monkeypatch.setattr(safetensors_writer.os, "pwrite", lambda fd, data, at: whole(fd, data[:7], at))
    written(tmp_path / "out", SOME)
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(read[name], SOME[name]) for name in SOME)


def in_a_process(code: str, *args: object) -> subprocess.Popen[str]:
    start = (
        "import sys, time, resource, torch\nfrom pathlib import Path\nfrom models.convert.safetensors_writer import Writer\n"
    )
    command = [sys.executable, "-c", start + textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_disk_that_fills_up_is_said_in_a_line_and_leaves_nothing(tmp_path: Path) -> None:
    """The system refuses files of more than 1 MB (EFBIG): the same path as a full disk or an exceeded quota."""
    code = """
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        with Writer(Path(sys.argv[1]), {"a": (torch.float32, (100_000,)), "b": (torch.float32, (200_000,))}) as writer:
            writer.add("a", torch.ones(100_000))
            print("one is written")
            writer.add("b", torch.ones(200_000))
    """
    out, err = in_a_process(code, tmp_path / "out").communicate(timeout=60)
    assert out == "one is written\n"
    last = err.strip().splitlines()[-1]
    assert re.search(
        r"UsageError: .*/\.out\.part/model\.safetensors: File too large: 1,200,\d\d\d bytes are needed in all and "
        r"[\d,]+ are left; nothing was kept, make room or name another disk",
        last,
    )
    assert not list(tmp_path.iterdir())


def test_a_killed_export_is_not_at_its_place(tmp_path: Path) -> None:
    code = """
        with Writer(Path(sys.argv[1]), {"a": (torch.float32, (10,)), "b": (torch.float32, (10,))}) as writer:
            writer.add("a", torch.ones(10))
            writer.add("b", torch.ones(10))
            print("written", flush=True)
            time.sleep(60)
    """
    with in_a_process(code, tmp_path / "out") as process:
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir()] == [".out.part"]
    written(tmp_path / "out", SOME)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
