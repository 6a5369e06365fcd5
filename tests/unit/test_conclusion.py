"""How a job ends that several agents watch over: the first failure is told once, with its exit code, wherever it began."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from parallel import conclusion
from parallel.conclusion import conclude
from parallel.failures import Failure, recorded, report_errors, write

NOW = int(time.time())


def failed(rank: int, kind: str, message: str, after: float = 0.0) -> Failure:
    return Failure(NOW + after, rank, kind, message, "a traceback", 2 if kind == "UsageError" else 1)


def together(folder: Path, *agents: Mapping[int, tuple[int, float]], apart: float = 0.0) -> list[int]:
    """What each returns; each comes `apart` seconds after the one before."""
    codes = [-1] * len(agents)

    def run(number: int) -> None:
        codes[number] = conclude(agents[number], folder, len(agents))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(agents))]
    for thread in threads:
        thread.start()
        time.sleep(apart)
    for thread in threads:
        thread.join()
    return codes


def how(folder: Path) -> str:
    return (folder / "ended").read_text()


def test_what_was_ended_because_of_a_failure_is_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, failed(0, "UsageError", "run.steps=x: bad"))
    assert conclude({0: (2, NOW), 1: (-signal.SIGTERM, NOW)}, tmp_path, 1) == 2
    assert capsys.readouterr().err == "moe-rl: error: run.steps=x: bad\n"
    assert how(tmp_path) == "2 moe-rl: error: run.steps=x: bad\n"


@pytest.mark.parametrize("apart", [0.0, 0.5])
@pytest.mark.parametrize("first", [0, 1])
def test_of_two_nodes_one_tells_what_began_on_the_other_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: int, apart: float
) -> None:
    """Rank 1 was killed; rank 0, on another node, then lost its connection and left word of that. Whoever comes first."""
    write(tmp_path, failed(0, "RuntimeError", "connection closed"))
    agents = {0: {0: (1, NOW)}, 1: {1: (-9, NOW - 1)}}
    order = [first, 1 - first]
    codes = dict(zip(order, together(tmp_path, *(agents[number] for number in order), apart=apart), strict=True))
    assert codes == {0: 1, 1: 137}
    text = capsys.readouterr().err
    assert text.count("rank 1 failed first: killed by signal SIGKILL (out of memory?)") == 1 and "connection" not in text
    assert how(tmp_path) == "137 rank 1 failed first: killed by signal SIGKILL (out of memory?)\n"
    assert len(recorded(tmp_path)) == 2


def test_nodes_that_hear_nothing_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ranks hang in a collective until this agent has gone."""
    monkeypatch.setattr(conclusion, "_SETTLE_SECONDS", 0.3)
    began = time.monotonic()
    assert conclude({3: (-11, NOW)}, tmp_path, 1000) == 139
    assert 0.3 <= time.monotonic() - began < 5
    assert how(tmp_path).startswith("139 rank 3 failed first: killed by signal SIGSEGV")


@pytest.mark.parametrize("others", [{1: (75, NOW)}, {1: (1, NOW)}, {1: (-signal.SIGTERM, NOW)}])
def test_a_job_that_has_saved_did_not_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], others: dict[int, tuple[int, float]]
) -> None:
    """Ranks that were not ready to hear the signal may break off when the others end."""
    assert together(tmp_path, {0: (75, NOW)}, others, apart=0.2) == [75, 75]
    assert how(tmp_path) == "75 saved\n" and capsys.readouterr().err == ""


def test_ranks_that_were_ended_because_one_failed_did_not_save(tmp_path: Path) -> None:
    """While they start, SIGTERM ends them with the code of a run that has nothing to save."""
    write(tmp_path, failed(1, "ImportError", "no such library"))
    assert conclude({0: (75, NOW), 1: (1, NOW + 1)}, tmp_path, 1) == 1  # torchrun ended the other
    assert how(tmp_path) == "1 rank 1 failed first: ImportError: no such library\n"


def test_what_is_known_is_not_unsaid(tmp_path: Path) -> None:
    """The agent that has told it is gone, and srun ends what still starts elsewhere."""
    write(tmp_path, failed(1, "ImportError", "no such library"))
    (tmp_path / "ended").write_text("1 rank 1 failed first: ImportError: no such library\n")
    conclude({0: (75, NOW)}, tmp_path, 2, {signal.SIGTERM})
    assert how(tmp_path) == "1 rank 1 failed first: ImportError: no such library\n"


def test_a_job_that_has_lost_an_agent_has_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It did not come up, for example: queued again, the job would do the same for ever."""
    monkeypatch.setattr(conclusion, "CLOSING_SECONDS", 0.3)
    assert conclude({0: (75, NOW)}, tmp_path, 2, {signal.SIGTERM}) == 143
    assert not (tmp_path / "ended").exists()


def test_nobody_waits_for_an_agent_that_was_done(tmp_path: Path) -> None:
    """The signal found one rank in the evaluation that closes a run, and the other one gone."""
    assert one_rank(tmp_path, "pass").returncode == 0
    began = time.monotonic()
    assert conclude({0: (75, NOW)}, tmp_path, 2, {signal.SIGUSR1}) == 75
    assert time.monotonic() - began < 5 and how(tmp_path) == "75 saved\n"


def test_no_agent_leaves_before_all_have_saved(tmp_path: Path) -> None:
    """The first one that has gone is the sign to end the others."""
    ends: list[float] = []

    def late() -> None:
        time.sleep(1)
        conclude({1: (75, NOW)}, tmp_path, 2)

    thread = threading.Thread(target=late)
    began = time.monotonic()
    thread.start()
    assert conclude({0: (75, NOW)}, tmp_path, 2) == 75
    ends.append(time.monotonic() - began)
    thread.join()
    assert 1 <= ends[0] < 10


def test_where_nothing_can_be_written_it_is_told_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conclusion, "_SETTLE_SECONDS", 0.3)
    gone = tmp_path / "gone"
    assert conclude({1: (-9, NOW)}, gone, 2) == 137
    told = f"{gone}: No such file or directory\nrank 1 failed first: killed by signal SIGKILL (out of memory?)\n"
    assert capsys.readouterr().err == told
    monkeypatch.setenv("MOE_RL_ERROR_DIR", str(gone))
    with pytest.raises(ValueError, match="the cause"), report_errors():
        raise ValueError("the cause")


def one_rank(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "parallel.one_rank", str(folder), sys.executable, "-c", f"import os, signal\n{body}"]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)


def test_a_rank_that_srun_started(tmp_path: Path) -> None:
    done = one_rank(tmp_path / "a", "print('fine')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")
    done = one_rank(tmp_path / "b", "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == 137
    assert done.stderr == "rank 0 failed first: killed by signal SIGKILL (out of memory?)\n"
    raises = "from parallel.failures import report_errors\nwith report_errors(): raise ValueError('bad')"
    done = one_rank(tmp_path / "c", raises)
    assert done.returncode == 1 and done.stderr.endswith("\nrank 0 failed first: ValueError: bad\n")
    assert how(tmp_path / "c") == "1 rank 0 failed first: ValueError: bad\n"


def test_signals_are_left_to_the_rank(tmp_path: Path) -> None:
    """One that does not listen yet dies of what all were told, and has nothing to save."""
    both = "[os.kill(pid, n) for n in (signal.SIGUSR1, signal.SIGTERM) for pid in [os.getppid()]]"
    done = one_rank(tmp_path, f"{both}\nexit(75)")
    assert done.returncode == 75 and how(tmp_path) == "75 saved\n"
    assert one_rank(tmp_path / "b", f"{both}\nexit(0)").returncode == 0
    for name in ("SIGUSR1", "SIGTERM"):
        done = one_rank(tmp_path / name, f"{both}\nos.kill(os.getpid(), signal.{name})")
        assert (done.returncode, done.stderr) == (75, "") and how(tmp_path / name) == "75 saved\n"
    done = one_rank(tmp_path / "c", "os.kill(os.getpid(), signal.SIGUSR1)")
    assert (done.returncode, done.stderr) == (138, "rank 0 failed first: killed by signal SIGUSR1\n")


def test_a_signal_before_there_are_ranks(tmp_path: Path) -> None:
    """SIGUSR1 ends the agent. SIGTERM, which srun sends too when another agent has not come up, waits for the ranks."""
    body = f"""if True:
        import os, signal, subprocess
        from pathlib import Path
        from parallel.deferred import LeftToRanks
        signals = LeftToRanks(Path("{tmp_path}"))
        os.kill(os.getpid(), signal.SIGTERM)
        with signals.starting() as processes:
            rank = subprocess.Popen(["sleep", "60"])
            processes.append(rank.pid)
        print(rank.wait(10), flush=True)
        os.kill(os.getpid(), signal.SIGUSR1)
        print(len(signals.heard), flush=True)
        LeftToRanks(Path("{tmp_path}"))
        os.kill(os.getpid(), signal.SIGUSR1)
        print("goes on")
    """
    done = subprocess.run([sys.executable, "-c", body], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (75, "-15\n2\n") and how(tmp_path) == "75 saved\n"


def test_a_signal_while_ranks_are_started_reaches_all_of_them(tmp_path: Path) -> None:
    body = f"""if True:
        import os, signal, subprocess
        from pathlib import Path
        from parallel.deferred import LeftToRanks
        signals = LeftToRanks(Path("{tmp_path}"))
        with signals.starting() as processes:
            os.kill(os.getpid(), signal.SIGUSR1)
            rank = subprocess.Popen(["sleep", "60"])
            processes.append(rank.pid)
        print(rank.wait(10), signals.heard == {{signal.SIGUSR1}})
    """
    done = subprocess.run([sys.executable, "-c", body], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout == f"{-signal.SIGUSR1} True\n", done.stderr
