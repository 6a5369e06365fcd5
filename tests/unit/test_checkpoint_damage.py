"""What a damaged checkpoint and a disk that cannot be written do: one line, and nothing that was there is lost."""

import contextlib
import hashlib
import itertools
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from models.config import OptimizerConfig
from models.convert import manifest
from moe_rl import checkpoint, checkpoint_paths
from moe_rl.checkpoint import CriticState, Progress, Saver, files
from moe_rl.checkpoint.shards import Shards
from moe_rl.config import CheckpointSection
from parallel.config import ParallelConfig
from parallel.errors import UsageError
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built
from tests.distributed.runs import differing, read, tensors
from tests.distributed.updates import update
from tests.distributed.value_passes import both

SETTINGS = OptimizerConfig(lr=1e-2)
CASE = Case(model=dict(layers=1))


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


@pytest.fixture(scope="module")
def saved(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoints/ with steps 1 and 2."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    with built(CASE, runtime) as model:
        optimizer = model.optimizer(SETTINGS, 20)
        for step in (1, 2):
            update(model, optimizer, step)
            checkpoint.save(directory, Progress(step, 0, 0, 0.0), model, optimizer, keep=2)
    return directory


@pytest.fixture
def here(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def content(directory: Path) -> dict[str, str]:
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def flip(path: Path, place: int = -100) -> None:
    """One bit of it."""
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit in a shard": (lambda p: flip(p / "__0_0.distcp"), r"__0_0\.distcp: is not what was saved: its hash is \w+, \w+ was"),
    "bit in the middle": (lambda p: flip(p / "__0_0.distcp", 40_000), r"__0_0\.distcp: is not what was saved"),
    "shard cut off": (lambda p: cut(p / "__0_0.distcp"), r"__0_0\.distcp: has [\d,]+ bytes, [\d,]+ were saved"),
    "shard gone": (lambda p: (p / "__0_0.distcp").unlink(), r"__0_0\.distcp: No such file or directory"),
    "table of contents": (lambda p: flip(p / ".metadata"), r"\.metadata: is not what was saved"),
    "table of contents gone": (lambda p: (p / ".metadata").unlink(), r"\.metadata: No such file"),
    "format": (lambda p: cut(p / "metadata.json"), r"metadata\.json: has \d+ bytes"),
    "model": (lambda p: flip(p / "model.json"), r"model\.json: is not what was saved"),
    "no manifest": (lambda p: os.remove(p / "manifest.json"), r"manifest\.json: cannot be read: No such file or directory"),
    "manifest cut off": (lambda p: cut(p / "manifest.json"), r"manifest\.json: cannot be read: "),
    "manifest of nothing": (
        lambda p: (p / "manifest.json").write_text('{"hash": "blake2b-128", "files": {}}'),
        r"manifest\.json: cannot be read: it lists no file",
    ),
    "manifest of no size": (
        lambda p: (p / "manifest.json").write_text('{"hash": "blake2b-128", "files": {"a": [Infinity, ""]}}'),
        r"manifest\.json: cannot be read: cannot convert float infinity",
    ),
    "manifest of no name": (
        lambda p: (p / "manifest.json").write_text('{"hash": "blake2b-128", "files": {"\\u0000": [1, ""]}}'),
        r"manifest\.json: cannot be read: it lists what can be no file",
    ),
    "manifest of brackets": (lambda p: (p / "manifest.json").write_text("[" * 10**5), r"manifest\.json: cannot be read: max"),
    "manifest of another kind": (lambda p: (p / "manifest.json").write_text("[]"), r"manifest\.json: cannot be read: "),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_goes_on_from_the_one_before_a_damaged_one(runtime: Runtime, here: Path, damage: str) -> None:
    spoil, reason = DAMAGES[damage]
    spoil(here / "step_000002")
    before, said = content(here / "step_000002"), list[str]()
    assert checkpoint.intact(here, said.append) == here / "step_000001"
    (line,) = said
    assert re.search(rf"^warning: {re.escape(str(here / 'step_000002'))}: is damaged: .*{reason}", line)
    assert line.endswith("; it is put aside as damaged_step_000002, and the run goes on from step_000001")
    assert content(here / "damaged_step_000002") == before  # kept, to look at
    assert checkpoint_paths.newest(here) == here / "step_000001"


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_that_is_named_is_an_error(runtime: Runtime, here: Path, damage: str) -> None:
    spoil, reason = DAMAGES[damage]
    path = here / "step_000002"
    spoil(path)
    before = content(here)
    with built(CASE, runtime) as model:
        with pytest.raises(UsageError, match=rf"^checkpoint\.load={re.escape(str(path))}: is damaged: .*{reason}"):
            checkpoint.load_weights(path, model)
    with pytest.raises(UsageError, match=reason):
        manifest.check(path)
    assert content(here) == before


def test_where_all_are_damaged_nothing_is_touched(runtime: Runtime, here: Path) -> None:
    for step in (1, 2):
        flip(here / f"step_00000{step}" / "__0_0.distcp")
    before = content(here)
    with pytest.raises(UsageError, match=r"step_000002: is damaged: .*; no other checkpoint in .* is whole: mend it, or begin"):
        checkpoint.intact(here, print)
    assert content(here) == before
    assert checkpoint.intact(here / "nothing", print) is None


@contextlib.contextmanager
def as_somebody_else() -> Iterator[None]:
    """Root may read anything."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("inside", ["", "step_000002", "step_000002/__0_0.distcp", "step_000002/manifest.json"])
def test_what_may_not_be_read_is_neither_absent_nor_damaged(runtime: Runtime, here: Path, inside: str) -> None:
    """The run neither begins anew nor goes on from an older one."""
    place = here / inside
    for folder in here.parents:
        if folder.is_relative_to(here.parents[2]):
            folder.chmod(0o755)
    before, mode = content(here), place.stat().st_mode
    place.chmod(0)
    try:
        with as_somebody_else(), pytest.raises(UsageError, match=r"cannot be read: .*Permission denied; mend it"):
            checkpoint.intact(here, print)
    finally:
        place.chmod(mode)
    assert content(here) == before


def test_links_to_what_is_not_there_are_no_absence(runtime: Runtime, here: Path) -> None:
    """As of a disk that is not mounted."""
    (here / "step_000003").symlink_to("/nowhere/step_000003")
    said = list[str]()
    assert checkpoint.intact(here, said.append) == here / "step_000002"
    assert len(said) == 1 and "step_000003/manifest.json: cannot be read: No such file" in said[0]
    assert (here / "damaged_step_000003").is_symlink()
    (here.parent / "link").symlink_to("/nowhere")
    with pytest.raises(UsageError, match=r"link: cannot be read: No such file or directory; mend it, or choose another run"):
        checkpoint.intact(here.parent / "link", print)


def test_of_a_checkpoint_that_lies_elsewhere_the_link_is_removed(runtime: Runtime, here: Path) -> None:
    elsewhere = (here / "step_000001").rename(here.parent / "elsewhere")
    (here / "step_000001").symlink_to(elsewhere)
    before = content(elsewhere)
    files.retire(here, 1, 0)
    assert [path.name for path in here.iterdir()] == ["step_000002"] and content(elsewhere) == before
    (here / ".step_000009.old").write_text("a file")
    (here / ".step_000009.part").symlink_to("/nowhere")
    files.begin(here / "step_000003")
    assert sorted(path.name for path in here.iterdir()) == [".step_000003.part", "step_000002"]


def test_an_old_one_that_cannot_be_removed_is_said_to_be_that(
    runtime: Runtime, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", "__0_0.distcp")

    with built(CASE, runtime) as model:
        optimizer = model.optimizer(SETTINGS, 20)
        monkeypatch.setattr(shutil, "rmtree", refused)
        with pytest.raises(UsageError, match=r"/\.step_000001\.old: cannot be removed: Permission denied; the new checkpoint"):
            checkpoint.save(here, Progress(3, 0, 0, 0.0), model, optimizer, keep=2)
    assert checkpoint_paths.newest(here) == here / "step_000003"


@pytest.mark.parametrize("text", [b"", b"[]", b'{"parallel": 3}', b"\xe1", None])
def test_a_layout_that_cannot_be_read_is_left_to_who_reads_it_all(tmp_path: Path, text: bytes | None) -> None:
    path = tmp_path / "step_000002_1"
    checkpoint_paths.begun_layout(path).parent.mkdir(parents=True)
    if text is not None:
        checkpoint_paths.begun_layout(path).write_bytes(text)
    checkpoint_paths.check_layout(path, ParallelConfig(), 1)


def test_what_was_damaged_before_is_not_written_over(runtime: Runtime, here: Path) -> None:
    (here / "damaged_step_000002").mkdir()
    cut(here / "step_000002" / "__0_0.distcp")
    checkpoint.intact(here, print)
    assert (here / "damaged_step_000002.2" / "__0_0.distcp").exists()


def test_the_newest_complete_one_is_found_beside_broken_ones(here: Path) -> None:
    for step, spoil in ((3, cut), (4, os.remove)):
        shutil.copytree(here / "step_000002", here / f"step_00000{step}")
        spoil(here / f"step_00000{step}" / "__0_0.distcp")
    shutil.copytree(here / "step_000002", here / "step_000005")
    (here / "step_000005" / "metadata.json").unlink()
    assert checkpoint_paths.newest(here) == here / "step_000002"
    assert checkpoint_paths.find(here) == here / "step_000002"


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk, writing more fails: with EFBIG."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A small disk at `folder`."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


CANNOT = r"step_000003: cannot be saved: .*{}; what was saved before is as it was: make room or mend it"


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("size", [100, 10_000, 100_000])
def test_a_full_disk_leaves_what_was_there(runtime: Runtime, here: Path, size: int, background: bool) -> None:
    before = content(here)
    with built(CASE, runtime) as model:
        optimizer = model.optimizer(SETTINGS, 20)
        saver = Saver(here, CheckpointSection(asynchronous=background, keep=1))
        with pytest.raises(UsageError, match=CANNOT.format("File too large")), files_of_at_most(size):
            saver.save(Progress(3, 0, 0, 0.0), model, optimizer)
            saver.finish()
        assert content(here) == before and sorted(path.name for path in here.iterdir()) == ["step_000001", "step_000002"]
        saver.save(Progress(3, 0, 0, 0.0), model, optimizer)  # and with room it goes on
        saver.finish()
    assert [path.name for path in here.iterdir()] == ["step_000003"]


@pytest.mark.parametrize("background", [False, True])
def test_what_goes_well_after_something_that_did_not_mends_nothing(
    runtime: Runtime, here: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy's file does not fit and the critic's would."""
    before = content(here)
    with both(CASE, runtime) as (model, value):
        optimizer, critic = model.optimizer(SETTINGS, 20), CriticState(value, value.optimizer(SETTINGS, 20))
        real, calls = Shards.write, itertools.count()

        def write(shards: Shards) -> list[Path]:
            if next(calls) == 0:
                with files_of_at_most(10_000):
                    return real(shards)
            return real(shards)

        monkeypatch.setattr(Shards, "write", write)
        saver = Saver(here, CheckpointSection(asynchronous=background, keep=1))
        with pytest.raises(UsageError, match=CANNOT.format("File too large")):
            saver.save(Progress(3, 0, 0, 0.0), model, optimizer, critic=critic)
            saver.finish()
    assert content(here) == before


def test_a_full_tmpfs_leaves_what_was_there(runtime: Runtime, saved: Path, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in (saved / "step_000001").iterdir())
    with tmpfs(tmp_path / "disk", f"{size * 3 // 2048}k") as disk, built(CASE, runtime) as model:
        optimizer, directory = model.optimizer(SETTINGS, 20), disk / "checkpoints"
        first = checkpoint.save(directory, Progress(1, 0, 0, 0.0), model, optimizer, keep=2)
        before = content(directory)
        for _ in range(2):
            with pytest.raises(UsageError, match=CANNOT.format("No space left on device")):
                checkpoint.save(directory, Progress(3, 0, 0, 0.0), model, optimizer, keep=2)
            assert content(directory) == before
        assert checkpoint.load(first, model, optimizer).step == 1


def test_where_nothing_may_be_written_one_line_says_so(runtime: Runtime, here: Path) -> None:
    with built(CASE, runtime) as model:
        optimizer = model.optimizer(SETTINGS, 20)
        here.chmod(0o555)
        try:
            with as_somebody_else(), pytest.raises(UsageError, match=CANNOT.format("Permission denied")):
                checkpoint.save(here, Progress(3, 0, 0, 0.0), model, optimizer, keep=2)
        finally:
            here.chmod(0o755)
    assert sorted(path.name for path in here.iterdir()) == ["step_000001", "step_000002"]


def test_what_is_saved_in_the_background_is_what_was_there_when_it_was_saved(runtime: Runtime, tmp_path: Path) -> None:
    """The same bytes as a checkpoint that training waited for, however many updates follow before it is written."""
    with built(CASE, runtime) as model:
        optimizer = model.optimizer(SETTINGS, 20)
        update(model, optimizer, 0)
        wanted = checkpoint.save(tmp_path / "wanted", Progress(1, 0, 0, 0.0), model, optimizer, keep=1)
        saver = Saver(tmp_path / "ours", CheckpointSection(asynchronous=True))
        saver.save(Progress(1, 0, 0, 0.0), model, optimizer)
        for i in (1, 2):
            update(model, optimizer, i)
        assert checkpoint_paths.newest(tmp_path / "ours") is None
        saver.finish()
        ours = checkpoint_paths.newest(tmp_path / "ours")
        assert ours is not None
        assert len(tensors(read(wanted))) > 30 and not differing(read(ours), read(wanted))
        assert shards(ours) == shards(wanted)


def shards(path: Path) -> dict[str, manifest.Entry]:
    return {name: entry for name, entry in (manifest.read(path) or {}).items() if name.endswith(".distcp")}


def test_a_thread_that_breaks_off_publishes_nothing(runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise SystemExit  # which a thread dies of without a word

    with built(CASE, runtime) as model:
        saver = Saver(tmp_path, CheckpointSection(asynchronous=True))
        monkeypatch.setattr(manifest, "digest", broken)
        saver.save(Progress(1, 0, 0, 0.0), model, model.optimizer(SETTINGS, 20))
        with pytest.raises(UsageError, match=r"step_000001: cannot be saved: .*step_000001: its writing thread broke off"):
            saver.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keep", "keep_every", "stay"), [(2, 0, [3, 5, 6]), (1, 2, [2, 3, 4, 6]), (1, 5, [3, 5, 6]), (9, 0, [1, 2, 3, 4, 5, 6])]
)
def test_the_last_and_every_so_many_and_pinned_ones_stay(here: Path, keep: int, keep_every: int, stay: list[int]) -> None:
    """Six steps, the third pinned, and two within a step, of which one is; beside them one that is broken, which counts for
    nothing and is left alone."""
    for name in ("step_000002_1", "step_000003_1"):
        shutil.copytree(here / "step_000001", here / name)
    (here / "step_000003_1" / files.PINNED).touch()
    for step in (3, 4, 5, 6, 7):
        shutil.copytree(here / "step_000001", here / f"step_00000{step}")
    (here / "step_000003" / files.PINNED).touch()
    cut(here / "step_000007" / "__0_0.distcp")
    files.retire(here, keep, keep_every)
    whole = [step for step, path in checkpoint_paths.numbered(here) if not checkpoint_paths.is_within_step(path)]
    assert whole == [*stay, 7]
    assert (here / "step_000003_1").exists() and not (here / "step_000002_1").exists()


def test_what_killed_runs_left_is_cleared_at_the_next_save(runtime: Runtime, here: Path) -> None:
    for name in (".step_000003.part", ".step_000001.old"):
        shutil.copytree(here / "step_000001", here / name)
    with built(CASE, runtime) as model:
        checkpoint.save(here, Progress(4, 0, 0, 0.0), model, model.optimizer(SETTINGS, 20), keep=9)
    assert sorted(path.name for path in here.iterdir()) == ["step_000001", "step_000002", "step_000004"]


def test_generators_that_a_reward_may_draw_from_go_on(runtime: Runtime, tmp_path: Path) -> None:
    import random

    import numpy as np

    def drawn() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), float(torch.rand(1))]

    with built(CASE, runtime) as model:
        optimizer = model.optimizer(SETTINGS, 20)
        drawn()
        path = checkpoint.save(tmp_path, Progress(1, 0, 0, 0.0), model, optimizer, keep=1)
        wanted = drawn()
        assert drawn() != wanted
        checkpoint.load(path, model, optimizer)
        assert drawn() == wanted
