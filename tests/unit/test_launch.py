"""Processes start together, end together, and the first failure is the one that is named. The workers are tiny scripts."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from parallel.launch import launched_world

ROOT = Path(__file__).parents[2]
LAUNCH = """import sys
from parallel import launch
launch.CLOSING_SECONDS = 1.0
sys.exit(launch.launch([sys.executable, sys.argv[1]], int(sys.argv[2]), 1, saving_seconds=float(sys.argv[3])))
"""
WORKER = """import os, signal, sys, time
from parallel.errors import UsageError
from parallel.failures import report_errors
rank = int(os.environ['RANK'])
"""


def start(folder: Path, body: str, processes: int = 2, saving_seconds: float = 0.0) -> subprocess.Popen[str]:
    script = folder / "worker.py"
    script.write_text(WORKER + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(script), str(processes), str(saving_seconds)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, body: str, processes: int = 2) -> tuple[int, str, str, float]:
    """Exit code, stdout, stderr, seconds."""
    began = time.monotonic()
    process = start(folder, body, processes)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err, time.monotonic() - began


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(path: Path) -> str:
    for _ in range(400):
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{path} never came")


def assert_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if alive(pid)]


def test_all_succeed_and_only_rank_0_prints(tmp_path: Path) -> None:
    code, out, err, _ = run(
        tmp_path,
        """
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
        print(*[os.environ[name] for name in names], int(os.environ["MASTER_PORT"]) > 1024, flush=True)
        """,
        processes=3,
    )
    assert (code, out, err) == (0, "0 0 3 3 127.0.0.1 1 True\n", "")


def test_one_raises_while_the_other_sleeps(tmp_path: Path) -> None:
    code, _, err, seconds = run(
        tmp_path,
        """
        with report_errors():
            if rank == 1:
                print("about to fail", flush=True)
                raise ValueError("no such expert")
            time.sleep(60)
        """,
    )
    assert code == 1
    assert seconds < 8
    assert err.splitlines()[-1] == "rank 1 failed first: ValueError: no such expert"
    assert err.splitlines()[:2] == ["last lines of rank 1:", "  about to fail"]
    assert 'raise ValueError("no such expert")' in err


def test_the_first_failure_is_named_whatever_its_rank(tmp_path: Path) -> None:
    code, _, err, _ = run(
        tmp_path,
        """
        with report_errors():
            while rank == 0 and not os.path.exists(os.environ["MOE_RL_ERROR_DIR"] + "/rank_1.json"):
                pass
            raise KeyError("the cause") if rank == 1 else RuntimeError("connection closed by peer")
        """,
    )
    assert code == 1
    assert err.splitlines()[-1] == "rank 1 failed first: KeyError: 'the cause'"


def test_an_error_is_recorded_before_the_connections_close(tmp_path: Path) -> None:
    code, _, err, _ = run(
        tmp_path,
        """
        closed = sys.argv[0] + ".closed"
        with report_errors():
            try:
                with report_errors():
                    while rank == 0 and not os.path.exists(closed):
                        pass
                    raise KeyError("the cause") if rank == 1 else RuntimeError("connection closed by peer")
            finally:
                open(closed, "w").close()
                time.sleep(1)
        """,
    )
    assert code == 1
    assert err.splitlines()[-1] == "rank 1 failed first: KeyError: 'the cause'"


def test_a_killed_rank_comes_before_what_its_peers_say(tmp_path: Path) -> None:
    code, _, err, seconds = run(
        tmp_path,
        """
        path = sys.argv[0] + ".pid"
        with report_errors():
            if rank == 1:
                open(path, "w").write(str(os.getpid()) + "\\n")
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            while not (os.path.exists(path) and open(path).read().endswith("\\n")):
                pass
            pid = int(open(path).read())
            while os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().split()[2] != "Z":
                pass
            raise RuntimeError("connection closed by peer")
        """,
    )
    assert code == 128 + signal.SIGKILL
    assert seconds < 8
    assert err.splitlines()[-1] == "rank 1 failed first: killed by signal SIGKILL (out of memory?)"


def test_an_exit_without_a_word(tmp_path: Path) -> None:
    code, _, err, _ = run(tmp_path, "if rank == 1:\n    print('bad import', flush=True)\n    os._exit(7)\ntime.sleep(60)")
    assert code == 7
    assert err.splitlines() == ["last lines of rank 1:", "  bad import", "rank 1 failed first: exited with code 7"]


def test_a_recorded_error_ends_the_run_though_its_process_hangs(tmp_path: Path) -> None:
    code, _, err, seconds = run(
        tmp_path,
        """
        import threading
        threading.Thread(target=time.sleep, args=(60,)).start()
        with report_errors():
            raise ValueError("stuck behind a thread")
        """,
    )
    assert code == 1
    assert seconds < 8
    assert err.splitlines()[-1].endswith("failed first: ValueError: stuck behind a thread")


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code, _, err, seconds = run(
        tmp_path,
        """
        with report_errors():
            if rank == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                open(sys.argv[0] + ".deaf", "w").close()
                time.sleep(60)
            while not os.path.exists(sys.argv[0] + ".deaf"):
                time.sleep(0.01)
            raise ValueError("boom")
        """,
    )
    assert code == 1
    assert 2.5 < seconds < 10
    assert err.splitlines()[-1] == "rank 1 failed first: ValueError: boom"


def test_a_usage_error_is_one_line(tmp_path: Path) -> None:
    code, out, err, _ = run(
        tmp_path,
        """
        with report_errors():
            raise UsageError("run.dir=/proc:\\ncannot be written")
        """,
    )
    assert (code, out, err) == (2, "", "moe-rl: error: run.dir=/proc: cannot be written\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all(tmp_path: Path, number: int, code: int) -> None:
    process = start(tmp_path, f"open(r'{tmp_path}/pid' + str(rank), 'w').write(str(os.getpid()))\ntime.sleep(60)")
    pids = [int(wait_for(tmp_path / f"pid{rank}")) for rank in range(2)]
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    assert process.returncode == code
    assert err == f"moe-rl: stopped by {signal.Signals(number).name}\n"
    assert_gone(pids, 0)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("other", ["sys.exit(75)", "raise RuntimeError('connection closed')", "time.sleep(60)"])
def test_a_rank_that_ends_as_one_that_has_saved_ends_the_run(tmp_path: Path, first: int, other: str) -> None:
    """The others end so too, or break off because it has gone, or wait for it in vain."""
    body = f"with report_errors():\n    if rank == {first}:\n        sys.exit(75)\n    time.sleep(0.2)\n    {other}"
    code, out, err, seconds = run(tmp_path, body)
    assert (code, out, err) == (75, "", "")
    assert ("sleep(60)" in other) == (seconds > 1) and seconds < 10


def test_a_run_that_was_done_when_it_was_asked_to_save_has_succeeded(tmp_path: Path) -> None:
    body = f"""
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    open(r'{tmp_path}/pid' + str(rank), 'w').write('x')
    time.sleep(1)
    """
    process = start(tmp_path, body, saving_seconds=60)
    for rank in range(2):
        wait_for(tmp_path / f"pid{rank}")
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=10) == ("", "") and process.returncode == 0


def test_no_orphans_when_the_launcher_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, f"open(r'{tmp_path}/pid' + str(rank), 'w').write(str(os.getpid()))\ntime.sleep(60)")
    pids = [int(wait_for(tmp_path / f"pid{rank}")) for rank in range(2)]
    process.kill()
    process.communicate(timeout=10)
    assert_gone(pids, 5)


def test_outside_the_launcher_an_error_goes_its_way(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("from parallel.failures import report_errors\nwith report_errors():\n    raise ValueError('plain')\n")
    env = {name: value for name, value in os.environ.items() if name != "MOE_RL_ERROR_DIR"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: plain"


def test_which_environments_are_a_launchers() -> None:
    assert launched_world({}) is None
    torchrun = launched_world({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert torchrun is not None and (torchrun.rank, torchrun.size, torchrun.local_rank) == (5, 8, 1)
    srun = launched_world({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"})
    assert srun is not None and (srun.rank, srun.size, srun.local_rank) == (3, 4, 1)
    # a batch script and an interactive shell inside an allocation of 4 tasks
    assert launched_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    assert launched_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert launched_world({"WORLD_SIZE": "8"}) is None


def test_torchruns_summary_has_the_error(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER + "with report_errors():\n    raise ValueError('no such expert') if rank else time.sleep(20)\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    env = {name: value for name, value in os.environ.items() if name != "MOE_RL_ERROR_DIR"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(torchrun, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    summary = done.stderr[done.stderr.index("Root Cause") :]
    assert "ValueError: no such expert" in summary and "rank      : 1" in summary
