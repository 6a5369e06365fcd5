"""Peak memory of reading and writing: near one tensor, of a model whose files are 600 MB."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

START = """
import resource, sys, torch
from pathlib import Path
from models.convert.memory import free_tensors_at_once
from models.convert.safetensors_reader import Reader
from models.convert.safetensors_writer import Writer

free_tensors_at_once()
folder = Path(sys.argv[1])
LIMIT = 60_000_000  # bytes, more than what libraries take
NAMES = {f"layer {i}": (torch.float32, (1000, 5000)) for i in range(30)}  # 20 MB each

def memory():  # bytes of address space
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

def limit(more):
    resource.setrlimit(resource.RLIMIT_AS, (memory() + more, memory() + more))

def peak():  # KB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
"""


def in_a_process(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", START + textwrap.dedent(code), str(folder)]
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
        before = peak()
        limit(LIMIT)
        with Writer(folder / "model", NAMES, shard_bytes=200_000_000) as writer:
            for i, name in enumerate(NAMES):
                writer.add(name, torch.full((1000, 5000), float(i)))
        print(peak() - before)
    """
    assert int(in_a_process(code, folder)) < 45_000
    assert len(list((folder / "model").glob("*.safetensors"))) == 3
    return folder


def test_reading_tensor_by_tensor_needs_the_memory_of_few(large: Path) -> None:
    code = """
        reader = Reader(folder / "model")
        torch.ones(1000, 5000).sum()
        before = peak()
        limit(LIMIT)
        for i, name in enumerate(NAMES):
            assert reader.read(name).sum() == i * 5_000_000
            assert (reader.read(name, (slice(None), slice(0, 5000, 2))) == i).all()
        assert reader.bytes_read == 30 * (20_000_000 + 1000 * 4999 * 4)
        print(peak() - before)
    """
    assert int(in_a_process(code, large)) < 45_000


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
