"""The sandbox of scripts/slurm_sandbox.sh as tests use it: real jobs on virtual nodes of this machine."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SANDBOX = ROOT / "scripts" / "slurm_sandbox.sh"
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}
# Virtual nodes have no name that resolves.
SETTINGS = f"""
slurm:
  time: 10
  signal_seconds: 60
  venv: {sys.prefix}
  exports: {{PYTHONPATH: "{ROOT}", GLOO_SOCKET_IFNAME: lo}}
  setup: [head=127.0.0.1]
  torchrun: [--local-addr=127.0.0.1]
"""


class Cluster:
    """Two nodes, n1 and n2. folder: where jobs are submitted and run."""

    def __init__(self, conf: Path) -> None:
        self.env = {key: value for key, value in os.environ.items() if key not in LAUNCHED}
        self.env |= {"SLURM_CONF": str(conf), "PYTHONPATH": str(ROOT)}

    def slurm(self, *command: str) -> str:
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=True, timeout=60).stdout

    def moe_rl(self, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "moe_rl.cli", *arguments]
        return subprocess.run(command, cwd=folder, env=self.env, capture_output=True, text=True, timeout=120)

    def submit(self, folder: Path, *overrides: str) -> "Job":
        done = self.moe_rl(folder, "slurm", "run.yaml", *overrides, "--submit")
        assert done.returncode == 0, done.stderr
        match = re.match(r"submitted: job (\d+), ", done.stdout)
        assert match, done.stdout
        (log,) = re.findall(r"tail -F (.*)\n", done.stdout)
        return Job(self, match[1], folder / log)

    def has_idle_nodes(self) -> bool:
        return self.slurm("sinfo", "--noheader", "--format=%T").split() == ["idle"]


class Job:
    def __init__(self, cluster: Cluster, number: str, log: Path) -> None:
        self.cluster, self.number, self.log = cluster, number, log

    def show(self) -> dict[str, str]:
        """What scontrol says of it, the last task of an array."""
        text = self.cluster.slurm("scontrol", "--oneliner", "show", "job", self.number).splitlines()[0]
        return dict(re.findall(r"(\w+)=(\S*)", text))

    @property
    def state(self) -> str:
        return self.show()["JobState"]

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for(self, what: str, holds: Callable[[], object], seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"{what} never came; {self.show()}\n{self.text()}"
            time.sleep(0.1)

    def wait(self, *ends: str, seconds: float = 150) -> dict[str, str]:
        """Until it is in a state of `ends` and its nodes are free."""
        self.wait_for(f"the end {ends}", lambda: self.state in ENDED, seconds)
        assert self.state in ends, f"{self.show()}\n{self.text()}"
        self.wait_for("free nodes", self.cluster.has_idle_nodes)
        return self.show()

    def processes(self) -> Iterator[psutil.Process]:
        """Those that run in its steps and not in its batch script."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                env = process.environ()
                if env.get("SLURM_JOB_ID") == self.number and env.get("SLURM_STEP_ID", "").isdecimal():
                    yield process

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        (found,) = [one for one in self.processes() if one.environ().get("RANK") == str(number)]
        return found


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row."""
    for first in range(15000 + os.getpid() % 4000, 32000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


def reason_without() -> str | None:
    """Why no sandbox can be had here; None: it can."""
    missing = [name for name in ("sbatch", "slurmctld", "slurmd", "munged") if shutil.which(name) is None]
    if missing:
        return f"no Slurm here ({', '.join(missing)} not found); as root: scripts/slurm_sandbox.sh install"
    return None if os.geteuid() == 0 else "Slurm's sandbox needs root"


def is_sandbox(conf: str) -> bool:
    """Whether it is a sandbox: these tests set nodes down, which no other cluster would like."""
    return Path(conf).is_file() and "ClusterName=sandbox\n" in Path(conf).read_text()


def sandbox(folder: Path) -> Iterator[Cluster]:
    """One of its own in `folder`, ended afterwards."""
    started = subprocess.run([SANDBOX, "up", folder, "2", str(free_ports(3))], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    try:
        yield Cluster(folder / "slurm.conf")
    finally:
        subprocess.run([SANDBOX, "down", folder], capture_output=True, check=True)


def skip_without() -> None:
    if reason := reason_without():
        pytest.skip(reason)
