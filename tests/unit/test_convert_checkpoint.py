"""Checkpoints written and read tensor by tensor, against those that models write and load. Layouts: tests/distributed."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from models.convert.checkpoint_reader import CheckpointReader
from models.convert.checkpoint_writer import CheckpointWriter, extra_states
from models.model import MoEModel
from moe_rl import checkpoint
from moe_rl.checkpoint import Progress
from parallel.errors import UsageError
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built
from tests.distributed.updates import update
from tests.unit.test_checkpoint import made
from tests.unit.test_convert_memory import in_a_process

ROOT = Path(__file__).parents[2]
VARIANTS: list[dict[str, Any]] = [
    {},
    dict(dtype="bfloat16"),
    dict(router_score="sigmoid", load_balancing="expert_bias", expert_bias_rate=0.1, dense_layers=[1], shared_ffn=32),
    dict(tie_embeddings=True),
]
SOME = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(5.0), "c": torch.tensor(3)}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


def global_tensors(model: MoEModel) -> dict[str, Tensor]:
    """Of a model in one process, as a checkpoint names them: all experts of a layer are one."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    metadata = {"dp_cp_group": model.groups.collection.dp_cp}
    values: list[Any] = [v for chunk in model.bare for v in chunk.sharded_state_dict(metadata=metadata).values()]
    built = [value.build() if isinstance(value, ShardedTensorFactory) else [value] for value in values]
    shards: list[Any] = [shard for some in built for shard in some if isinstance(shard, ShardedTensor)]
    found: dict[str, Tensor] = {}
    for shard in shards:
        whole = found.setdefault(shard.key, torch.full(shard.global_shape, torch.nan, dtype=shard.data.dtype))
        size = (1,) * shard.prepend_axis_num + tuple(shard.data.shape)
        whole[tuple(slice(o, o + n) for o, n in zip(shard.global_offset, size, strict=True))] = shard.data
    return found


def expected(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def written(path: Path, tensors: dict[str, Tensor], **options: Any) -> None:
    """Each expert by itself, the last first; everything else whole."""
    with CheckpointWriter(path, expected(tensors), **options) as writer:
        for name, tensor in tensors.items():
            if ".experts.experts." in name:
                for expert in reversed(range(len(tensor))):
                    writer.add_rows(name, expert, tensor[expert : expert + 1])
            else:
                writer.add(name, tensor)


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


def contents(path: Path) -> Metadata:
    return pickle.loads((path / ".metadata").read_bytes())


@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "bfloat16", "expert bias, dense, shared", "tied"])
def test_a_model_loads_what_was_written_and_what_it_saves_is_read(
    runtime: Runtime, tmp_path: Path, variant: dict[str, Any]
) -> None:
    """To the bit, and with the same objects beside the weights."""
    with built(Case(model=variant, seed=1), runtime) as model:
        wanted = global_tensors(model)
        checkpoint.save_weights(tmp_path / "saved", model)
    written(tmp_path / "written", wanted, file_bytes=100_000)
    assert len(list((tmp_path / "written").glob("*.distcp"))) > 3
    for name in ("saved", "written"):
        reader = CheckpointReader(tmp_path / name)
        assert equal({key: reader.read(key) for key in reader.names}, wanted)
        assert {key: tuple(kind) for key, kind in reader.names.items()} == expected(wanted)
    objects = [
        {key for key, value in contents(tmp_path / name).state_dict_metadata.items() if isinstance(value, BytesStorageMetadata)}
        for name in ("saved", "written")
    ]
    assert objects[0] == objects[1] == {"common_state/shard_0_1", *extra_states(expected(wanted))}
    with built(Case(model=variant, seed=2), runtime) as model:
        assert not equal(global_tensors(model), wanted)
        checkpoint.load_weights(tmp_path / "written", model)
        assert equal(global_tensors(model), wanted)


def test_megatron_reads_the_metadata(runtime: Runtime, tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing import load_content_metadata, load_tensors_metadata

    written(tmp_path / "written", SOME)
    assert load_content_metadata(str(tmp_path / "written")) == {"ranks": 1}
    found: dict[str, Any] = load_tensors_metadata(str(tmp_path / "written"))
    assert {key: (tensor.dtype, tuple(tensor.global_shape)) for key, tensor in found.items()} == expected(SOME)


def test_of_a_run_the_weights_alone_are_read(runtime: Runtime, tmp_path: Path) -> None:
    with built(Case(model=dict(layers=1)), runtime) as model:
        optimizer = made(model)
        update(model, optimizer, 0)
        path = checkpoint.save(tmp_path, Progress(1, 0, 0, 0.0), model, optimizer, keep=1)
        wanted = global_tensors(model)
    assert any(key.startswith("optimizer.") for key in contents(path).state_dict_metadata)
    reader = CheckpointReader(path)
    assert equal({key: reader.read(key) for key in reader.names}, wanted)


INDICES: list[tuple[slice, ...]] = [
    (),
    (slice(1, 4),),
    (slice(0, 6, 2), slice(1, 3)),
    (slice(2, 3), slice(0, 4, 3), slice(1, 5, 2)),
    (slice(None), slice(None), slice(4, None)),
    (slice(3, 3),),
]


@pytest.mark.parametrize("rows", [1, 2, 4, 6])
def test_a_part_is_that_slice_of_the_whole(tmp_path: Path, rows: int) -> None:
    """Of a tensor in chunks of `rows` rows."""
    tensor = torch.rand(6, 4, 7)
    with CheckpointWriter(tmp_path / "out", expected({"x": tensor})) as writer:
        for start in range(0, 6, rows):
            writer.add_rows("x", start, tensor[start : start + rows])
    reader = CheckpointReader(tmp_path / "out")
    for index in INDICES * 2:
        part = reader.read("x", index)
        assert torch.equal(part, tensor[index]), index
        part.fill_(torch.nan)  # what is kept of a chunk is not what was given


def test_only_chunks_with_a_part_of_it_are_read_and_not_twice_in_a_row(tmp_path: Path) -> None:
    tensor = torch.rand(6, 4, 7)
    written(tmp_path / "out", {"layer.experts.experts.linear_fc1.weight": tensor})
    reader = CheckpointReader(tmp_path / "out")
    for start in (0, 2, 4):
        reader.read("layer.experts.experts.linear_fc1.weight", (slice(3, 4), slice(start, start + 2)))
    assert reader.bytes_read == 4 * 7 * 4
    reader.read("layer.experts.experts.linear_fc1.weight", (slice(1, 3),))
    assert reader.bytes_read == 3 * 4 * 7 * 4


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("d", torch.ones(5), "d was not expected"),
        ("b", torch.ones(6), r"b: \(6,\) at \(0,\) is no part of the expected \(5,\)"),
        ("b", torch.ones(5, 1), r"b: \(5, 1\) at \(0, 0\) is no part of the expected \(5,\)"),
        ("b", torch.ones(5).half(), r"b is torch\.float16, expected was torch\.float32"),
        ("a", SOME["a"], "a was added twice"),
        ("b", torch.ones(4), "b was not added whole, nor were 1 others"),
    ],
)
def test_what_was_not_expected_ends_it(tmp_path: Path, name: str, tensor: Tensor, text: str) -> None:
    with pytest.raises(RuntimeError, match=text), CheckpointWriter(tmp_path / "out", expected(SOME)) as writer:
        writer.add("a", SOME["a"])
        writer.add(name, tensor)
    assert not list(tmp_path.iterdir())


def test_a_part_of_a_tensor_is_saved_without_the_rest_of_it(tmp_path: Path) -> None:
    rows = torch.rand(1000, 100)
    written(tmp_path / "out", {"x": rows[:2], "y": rows.T[:2]})
    assert (tmp_path / "out" / "__0_0.distcp").stat().st_size < 20_000
    reader = CheckpointReader(tmp_path / "out")
    assert torch.equal(reader.read("x"), rows[:2]) and torch.equal(reader.read("y"), rows.T[:2])


def test_a_place_that_is_taken_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "out", SOME)
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path / 'out'}: exists already; name another directory")):
        written(tmp_path / "out", SOME)
    assert CheckpointReader(tmp_path / "out").names.keys() == SOME.keys()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), CheckpointWriter(tmp_path / "out", expected(SOME)) as writer:
        writer.add("a", SOME["a"])
        assert (tmp_path / ".out.part" / "__0_0.distcp").exists()
        raise error
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_is_said_in_a_line_and_leaves_nothing(tmp_path: Path) -> None:
    code = """if True:
        import resource, sys, torch
        from pathlib import Path
        from models.convert.checkpoint_writer import CheckpointWriter
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        kinds = {"a": (torch.float32, (100_000,)), "b": (torch.float32, (200_000,))}
        with CheckpointWriter(Path(sys.argv[1]), kinds) as writer:
            writer.add("a", torch.ones(100_000))
            writer.add("b", torch.ones(200_000))
    """
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert re.search(
        r"UsageError: .*/\.out\.part/__0_0\.distcp: File too large: 1,208,192 bytes are needed in all and [\d,]+ are left; "
        "nothing was kept, make room or name another disk$",
        done.stderr.strip().splitlines()[-1],
    )
    assert not list(tmp_path.iterdir())


def lost_file(path: Path) -> None:
    (path / "__0_1.distcp").unlink()


def cut_off(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", 1000)


def no_config(path: Path) -> None:
    (path / "metadata.json").unlink()


def other_format(path: Path) -> None:
    (path / "metadata.json").write_text('{"sharded_backend": "zarr"}')


def bad_config(path: Path) -> None:
    (path / "metadata.json").write_text("{")


def no_contents(path: Path) -> None:
    (path / ".metadata").unlink()


def bad_contents(path: Path) -> None:
    (path / ".metadata").write_bytes(b"rubbish")


def short_contents(path: Path) -> None:
    os.truncate(path / ".metadata", 100)


def other_contents(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps({}))


def other_attribute(path: Path) -> None:
    whole = (path / ".metadata").read_bytes()
    assert b"chunks" in whole
    (path / ".metadata").write_bytes(whole.replace(b"chunks", b"chunkz"))


def endless_frame(path: Path) -> None:
    whole = bytearray(pickle.dumps(contents(path), protocol=4))
    assert whole[2:3] == pickle.FRAME
    whole[3:11] = b"\xff" * 8
    (path / ".metadata").write_bytes(whole)


def changed(path: Path, change: Callable[[Metadata], object]) -> None:
    metadata = contents(path)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def lost_chunk(path: Path) -> None:
    def change(metadata: Metadata) -> None:
        tensor: Any = metadata.state_dict_metadata["b"]
        tensor.chunks.clear()

    changed(path, change)


def lost_place(path: Path) -> None:
    changed(path, lambda metadata: metadata.storage_data.clear())


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lost_file, r"__0_1\.distcp: is not there, and holds the tensor b; name a complete checkpoint"),
        (cut_off, r"__0_0\.distcp: tensor a is cut off: it ends at byte \d+, the file at 1000; name a complete"),
        (no_config, r": is no complete checkpoint, it has no metadata\.json; name a step_NNNNNN of a run"),
        (other_format, r"metadata\.json: sharded_backend=zarr: must be torch_dist"),
        (bad_config, r"metadata\.json: cannot be read: Expecting"),
        (no_contents, r"\.metadata: cannot be read: .*No such file"),
        (bad_contents, r"\.metadata: cannot be read"),
        (short_contents, r"\.metadata: cannot be read"),
        (other_contents, r"\.metadata: holds dict, no checkpoint's table of contents"),
        (other_attribute, r"\.metadata: cannot be read: .*'chunks'"),
        (endless_frame, r"\.metadata: cannot be read: FRAME length exceeds"),
        (lost_chunk, r"\.metadata: not all of the tensor b was saved"),
        (lost_place, r"\.metadata: does not say where the tensor a lies"),
    ],
)
def test_damage_is_found_on_opening(tmp_path: Path, damage: Callable[[Path], None], text: str) -> None:
    path = tmp_path / "out"
    written(path, SOME, file_bytes=1)
    CheckpointReader(path)
    damage(path)
    with pytest.raises(UsageError, match=f"^{re.escape(str(path))}.*{text}") as caught:
        CheckpointReader(path)
    assert "\n" not in str(caught.value)


def test_rubbish_in_a_file_is_found_on_reading(tmp_path: Path) -> None:
    written(tmp_path / "out", SOME)
    file = tmp_path / "out" / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(UsageError, match=r"__0_0\.distcp: tensor a cannot be read: .*; name a complete checkpoint"):
        CheckpointReader(tmp_path / "out").read("a")


def test_files_of_another_checkpoint_are_found_on_reading(tmp_path: Path) -> None:
    written(tmp_path / "one", {"x": torch.ones(4, 6)})
    written(tmp_path / "other", {"x": torch.ones(6, 4)})
    shutil.copy(tmp_path / "other" / "__0_0.distcp", tmp_path / "one")
    with pytest.raises(UsageError, match=r"tensor x is torch\.float32 \[6, 4\] there, \.metadata says torch\.float32 \[4, 6\]"):
        CheckpointReader(tmp_path / "one").read("x")


def test_peak_memory_is_near_one_tensor_of_a_300_mb_checkpoint(tmp_path: Path) -> None:
    """Tensors of 20 MB in chunks of 10: what writing, reading a few rows of each, and reading the whole takes beyond that."""
    code = """
        import json
        from models.convert.checkpoint_reader import CheckpointReader
        from models.convert.checkpoint_writer import CheckpointWriter
        names = list(NAMES)[:15]
        with CheckpointWriter(folder / "warm", {"x": (torch.float32, (3,))}) as writer:
            writer.add("x", torch.ones(3))
        CheckpointReader(folder / "warm").read("x").sum()
        peaks, before = [], start()
        limit(LIMIT)
        with CheckpointWriter(folder / "out", {name: NAMES[name] for name in names}, file_bytes=100_000_000) as writer:
            for i, name in enumerate(names):
                for first in (0, 500):
                    writer.add_rows(name, first, torch.full((500, 5000), float(i)))
        peaks.append(resident("VmHWM") - before)
        reader, before = CheckpointReader(folder / "out"), start()
        for i, name in enumerate(names):
            assert reader.read(name, (slice(498, 502),)).sum() == i * 20_000
        peaks.append(resident("VmHWM") - before)
        before = start()
        for i, name in enumerate(names):
            assert reader.read(name).sum() == i * 5_000_000
        peaks.append(resident("VmHWM") - before)
        print(json.dumps(peaks))
    """
    of_writing, of_rows, of_all = json.loads(in_a_process(code, tmp_path))
    assert of_writing < 15_000_000
    assert of_rows < 15_000_000
    assert of_all < 35_000_000
