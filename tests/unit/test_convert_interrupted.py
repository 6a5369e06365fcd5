"""`moe-rl import` and `moe-rl export` that end in the middle: nothing is at the target, and the next one works."""

import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from models.convert.checkpoint_writer import CheckpointWriter
from models.convert.safetensors_writer import Writer
from moe_rl import cli
from moe_rl.tasks import ByteTokenizer
from tests.distributed import ranks  # noqa: F401  (what it has the forked processes import beforehand)
from tests.hf_checkpoints import make
from tests.unit.test_convert_commands import same, tensors


class Ended(NamedTuple):
    """line: the last on stderr (those before it, on a slow machine, tell of progress)."""

    code: int | None
    line: str


def ended(said: Path, then: Callable[[], Any], *arguments: object) -> Ended:
    """A process of its own in which the 20th part that is written is also the moment of what `then` does. said: a file for
    its stderr."""
    command = [str(argument) for argument in arguments]
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(said, then, command))
    process.start()
    process.join(120)
    return Ended(process.exitcode, (said.read_text().splitlines() or [""])[-1])


def _run(said: Path, then: Callable[[], Any], command: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    with said.open("w") as stream:
        os.dup2(stream.fileno(), 2)
    count = 0

    def on_the_20th(add: Callable[..., None]) -> Callable[..., None]:
        def added(self: Any, *arguments: Any) -> None:
            nonlocal count
            add(self, *arguments)
            count += 1
            if count == 20:
                then()

        return added

    for writer in (CheckpointWriter, Writer):
        writer.add_rows = on_the_20th(writer.add_rows)
    code = cli.main(command)
    assert count >= 20
    sys.exit(code)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def fill(disk: Path) -> None:
    free = os.statvfs(disk)
    (disk / "other").write_bytes(bytes(free.f_bavail * free.f_bsize))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A directory of 1.4 MB, and a checkpoint of it."""
    folder = tmp_path_factory.mktemp("places")
    make("qwen3_moe", folder / "hf", vocab_size=259)
    ByteTokenizer().save(folder / "hf")
    assert cli.main(["import", str(folder / "hf"), str(folder / "ckpt")]) == 0
    return folder / "hf", folder / "ckpt"


def works(command: str, source: Path, target: Path, places: tuple[Path, Path]) -> None:
    """Nothing was left that stands in the way."""
    assert not target.exists()
    assert cli.main([command, str(source), str(target)]) == 0
    back = target
    if command == "import":
        back = target.with_name("back")
        assert cli.main(["export", str(target), str(back)]) == 0
    assert same(tensors(back), tensors(places[0]))
    assert not list(target.parent.glob(".*"))


@pytest.mark.parametrize("command", ["import", "export"])
def test_killed(command: str, places: tuple[Path, Path], tmp_path: Path) -> None:
    source, folder = places[command == "export"], tmp_path / "in"
    assert ended(tmp_path / "said", partial(send, signal.SIGKILL), command, source, folder / "out").code == -signal.SIGKILL
    assert [path.name for path in folder.iterdir()] == [".out.part"]
    works(command, source, folder / "out", places)


@pytest.mark.parametrize("command", ["import", "export"])
def test_interrupted(command: str, places: tuple[Path, Path], tmp_path: Path) -> None:
    source, folder = places[command == "export"], tmp_path / "in"
    done = ended(tmp_path / "said", partial(send, signal.SIGINT), command, source, folder / "out")
    assert done == (130, "moe-rl: stopped by SIGINT")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_file_cannot_grow(command: str, places: tuple[Path, Path], tmp_path: Path) -> None:
    source, folder = places[command == "export"], tmp_path / "in"
    done = ended(tmp_path / "said", limit_files, command, source, folder / "out")
    assert done.code == 2 and done.line.startswith(f"moe-rl: error: {folder}/.out.part/")
    assert "File too large: " in done.line and "nothing was kept, make room or name another disk" in done.line
    assert not list(folder.iterdir())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(mounted)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a disk is not allowed here")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.parametrize("command", ["import", "export"])
def test_the_disk_fills(
    command: str, places: tuple[Path, Path], small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By something else, when a part is written; then there is room again."""
    source = places[command == "export"]
    done = ended(tmp_path / "said", partial(fill, small_disk), command, source, small_disk / "out")
    assert done.code == 2 and "No space left on device: " in done.line and "make room or name another disk" in done.line
    assert [path.name for path in small_disk.iterdir()] == ["other"]
    assert cli.main([command, str(source), str(small_disk / "out")]) == 2  # full from the beginning
    said = capsys.readouterr().err
    assert re.search(r"1,\d{3},\d{3} bytes are to be written and its disk has \d{3},\d{3} free; name another disk\n", said)
    (small_disk / "other").unlink()
    works("export", places[1], small_disk / "out", places)
