"""parallel.torchrun: the exit code and the word of whichever rank failed first, and signals that are the ranks' own."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from parallel.failures import recorded
from parallel.launch import _free_port

ROOT = Path(__file__).parents[2]
RANK = """import os, signal, sys, time
from parallel.errors import UsageError
from parallel.failures import report_errors
rank = int(os.environ['RANK'])
"""
SLEEPS = "until = time.monotonic() + 60\nwhile time.monotonic() < until:\n    time.sleep(1)\n"


def start(folder: Path, body: str) -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(RANK + textwrap.dedent(body))
    torchrun = [sys.executable, "-P", "-m", "parallel.torchrun", folder / "logs", "--standalone", "--nproc-per-node=2"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*torchrun, "--max-restarts=0", folder / "rank.py"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("sys.exit(75)", 75, None),
        ("print('fine')", 0, None),
        (
            """
            with report_errors():
                if rank == 1:
                    raise ValueError("the cause")
                time.sleep(30)
            """,
            1,
            "rank 1 failed first: ValueError: the cause",
        ),
        ("with report_errors():\n    raise UsageError('run.steps=x: bad')", 2, "moe-rl: error: run.steps=x: bad"),
    ],
)
def test_the_exit_code_is_that_of_the_rank(tmp_path: Path, body: str, code: int, says: str | None) -> None:
    out, err = (process := start(tmp_path, body)).communicate(timeout=120)
    assert process.returncode == code, err
    if says:
        assert err.splitlines().count(says) == 1
    assert "exitcode" not in err  # torchrun's own words
    assert ("failed first" in err) == bool(says and "first" in says)
    assert out.count("fine") == 2 * ("fine" in body)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signals_are_the_ranks_own(tmp_path: Path, number: signal.Signals) -> None:
    """Slurm sends them to every process of a step; torchrun alone would end, or end its ranks."""
    body = """
    asked = []
    for one in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(one, lambda number, frame: asked.append(number))
    open(f"{rank}.pid.part", "w").write(str(os.getpid()))
    os.rename(f"{rank}.pid.part", f"{rank}.pid")
    while not asked:
        time.sleep(0.05)
    sys.exit(75)
    """
    process = start(tmp_path, f"os.chdir({str(tmp_path)!r})\n" + textwrap.dedent(body))
    pids = [tmp_path / f"{rank}.pid" for rank in (0, 1)]
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    time.sleep(1)
    assert process.poll() is None
    for path in pids:
        os.kill(int(path.read_text()), number)
    process.communicate(timeout=60)
    assert process.returncode == 75


def test_ranks_that_hang_are_ended_when_one_has_failed(tmp_path: Path) -> None:
    """They hear SIGTERM as a wish to save, and are stuck."""
    body = """
    with report_errors():
        if rank == 1:
            raise ValueError("the cause")
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            time.sleep(1)
    """
    process = start(tmp_path, body)
    while not recorded(tmp_path / "logs"):
        assert process.poll() is None
        time.sleep(0.05)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "rank 1 failed first: ValueError: the cause" in err
    assert time.monotonic() - began < 20
    assert (tmp_path / "logs" / "ended").read_text() == "1 rank 1 failed first: ValueError: the cause\n"


@pytest.mark.parametrize("module", ["torchrun", "one_rank"])
def test_ranks_that_hang_are_ended_when_another_agent_has_told(tmp_path: Path, module: str) -> None:
    """srun gives them the cluster's KillWait."""
    (tmp_path / "rank.py").write_text(
        f"{RANK}signal.signal(signal.SIGTERM, lambda number, frame: None)\nopen('up', 'w')\n{SLEEPS}"
    )
    words = ["--standalone", "--nproc-per-node=2", "rank.py"] if module == "torchrun" else [sys.executable, "rank.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "2"}
    command = [sys.executable, "-P", "-m", f"parallel.{module}", "logs", *words]
    process = subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "up").exists():
        assert process.poll() is None
        time.sleep(0.05)
    (tmp_path / "logs" / "telling").touch()
    (tmp_path / "logs" / "ended").write_text("1 the cause\n")
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (137, "") and time.monotonic() - began < 20
    assert (tmp_path / "logs" / "ended").read_text() == "1 the cause\n"


def test_a_node_that_does_not_come_is_told_in_one_line(tmp_path: Path) -> None:
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{_free_port()}", "--rdzv-id=1"]
    command = [sys.executable, "-P", "-m", "parallel.torchrun", tmp_path, *meeting, "--rdzv-conf=join_timeout=2", "none.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "SLURMD_NODENAME": "n7"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("moe-rl: error: n7 does not reach the other nodes, or one did not start or is gone: ")
    assert done.stderr.endswith("; of 2 nodes these had started: n7\n")
    assert (tmp_path / "ended").read_text() == f"1 {done.stderr}"


def test_a_node_without_a_library_is_told(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open\\nshared object file')")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "SLURMD_NODENAME": "n7"}
    command = [sys.executable, "-P", "-m", "parallel.torchrun", tmp_path / "logs", "--standalone", "none.py"]
    assert subprocess.run(command, env=env, capture_output=True, timeout=60).returncode == 1
    assert (tmp_path / "logs" / "ended").read_text() == "1 n7: ImportError: libcudart.so.13: cannot open shared object file\n"
