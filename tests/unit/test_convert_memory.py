"""Peak memory of reading and writing: near one tensor, of a model whose files are 600 MB."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

LIMIT = 50_000_000  # bytes; a tensor has 20 million
ROOT = Path(__file__).parents[2]

START = """
import resource, sys, torch
from pathlib import Path
from models.convert.memory import free_tensors_at_once
from models.convert.safetensors_reader import Reader
from models.convert.safetensors_writer import Writer

free_tensors_at_once()
folder = Path(sys.argv[1])
NAMES = {f"layer {i}": (torch.float32, (1000, 5000)) for i in range(30)}  # 20 MB each

def memory():  # bytes of address space
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

def limit(more):
    resource.setrlimit(resource.RLIMIT_AS, (memory() + more, memory() + more))

def resident(line):  # bytes in memory: now (VmRSS), or at most since start() (VmHWM)
    return next(int(l.split()[1]) * 1024 for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(line))

def start():
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")
"""


def in_a_process(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", f"LIMIT = {LIMIT}" + START + textwrap.dedent(code), str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 MB in three files, written under the limits themselves."""
    folder = tmp_path_factory.mktemp("large")
    code = """
        torch.ones(1000, 5000).sum()
        before = start()
        limit(LIMIT)
        with Writer(folder / "model", NAMES, shard_bytes=200_000_000) as writer:
            for i, name in enumerate(NAMES):
                writer.add(name, torch.full((1000, 5000), float(i)))
        print(resident("VmHWM") - before)
    """
    assert int(in_a_process(code, folder)) < LIMIT
    assert len(list((folder / "model").glob("*.safetensors"))) == 3
    return folder


def test_reading_tensor_by_tensor_needs_the_memory_of_few(large: Path) -> None:
    code = """
        reader = Reader(folder / "model")
        torch.ones(1000, 5000).sum()
        before = start()
        limit(LIMIT)
        for i, name in enumerate(NAMES):
            assert reader.read(name).sum() == i * 5_000_000
            assert (reader.read(name, (slice(None), slice(0, 5000, 2))) == i).all()
        assert reader.bytes_read == 30 * (20_000_000 + 1000 * 4999 * 4)
        print(resident("VmHWM") - before)
    """
    assert int(in_a_process(code, large)) < LIMIT


def test_the_limit_is_one_that_the_whole_model_does_not_keep_to(large: Path) -> None:
    code = """
        from safetensors.torch import load_file
        limit(LIMIT)
        try:
            load_file(folder / "model" / "model-00001-of-00003.safetensors")
        except (OSError, RuntimeError, MemoryError):
            print("failed")
    """
    assert in_a_process(code, large) == "failed\n"


def test_the_memory_of_a_tensor_goes_when_it_does(tmp_path: Path) -> None:
    """Tensors of 20 MB, one at a time, with small things that stay made between them: glibc alone comes to 580 MB."""
    code = """
        torch.ones(1000, 5000).sum()
        before, most, kept = memory(), 0, []
        for i in range(30):
            tensor = torch.full((1000, 5000), float(i))
            most = max(most, memory() - before)
            del tensor
            kept += [bytearray(3000), torch.ones(100)]
        print(most)
    """
    assert int(in_a_process(code, tmp_path)) < 25_000_000
