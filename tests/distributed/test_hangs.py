"""A run that stops moving ends, and says who is where."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from parallel.failures import recorded, report_errors
from parallel.runtime import started
from parallel.watchdog import Watchdog
from tests.distributed.ranks import place
from tests.distributed.runs import Runs

pytestmark = [pytest.mark.distributed, pytest.mark.alone]

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_a_reward_that_never_answers_on_one_of_two_ranks(tmp_path: Path) -> None:
    runs, since = Runs(tmp_path), tmp_path / "since"
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"prompt": f"{i}:", "answer": str(since)}) + "\n" for i in range(64)))
    settings = ["run.hang_seconds=3", "run.processes=2", "run.name=stuck", "model.layers=2", "rollout.max_response_tokens=2"]
    command = [sys.executable, "-m", "moe_rl.cli", "train", str(runs.yaml), *runs.shared, *settings]
    scorer = "task.scorer=tests.distributed.rewards:stuck_on_rank_1"
    done = subprocess.run([*command, scorer], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120)
    took = time.time() - since.stat().st_mtime
    assert done.returncode == 70
    assert 3 < took < 3 + 9
    last = done.stderr.splitlines()[-1]
    stacks = tmp_path / "stuck" / "stacks"
    assert last.startswith("rank 1 failed first: hang: no rank got anywhere for 3 s (run.hang_seconds); rank 1 reward: in ")
    assert "rank 1 reward: in wait_for_ever (rewards.py:" in last
    assert "; rank 0 reward: waits for others in gather_over_data (collectives.py:" in last
    assert last.endswith(f"all stacks: {stacks}")
    assert "wait_for_ever" in (stacks / "rank_00001.txt").read_text()
    assert "gather_over_data" in (stacks / "rank_00000.txt").read_text()
    assert "rank 1 reward: in wait_for_ever" in (tmp_path / "stuck" / "log.txt").read_text().splitlines()[-1]


def as_rank(rank: int, folder: Path, body: Callable[[int, Watchdog], None]) -> None:
    place(rank, 2)
    os.environ["MOE_RL_ERROR_DIR"] = str(folder)
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    with report_errors(), started(0, 1, 60.0, rendezvous=folder / "meet") as here:
        watchdog = Watchdog(2.0, folder, here)
        with watchdog.watching():
            body(rank, watchdog)


@contextlib.contextmanager
def two_ranks(folder: Path, body: Callable[[int, Watchdog], None]) -> Iterator[list[Any]]:
    """Processes in which `body` runs under a watchdog that gives it 2 seconds. Waits until they have ended."""
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=as_rank, args=(rank, folder, body), daemon=True) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    try:
        yield ranks
        for rank in ranks:
            rank.join(60)
    finally:
        for rank in ranks:
            rank.kill()


def works_slowly_on_rank_1(rank: int, watchdog: Watchdog) -> None:
    for _ in range(40 * rank):
        time.sleep(0.1)
        watchdog.progress("slowly")
    dist.barrier()


def test_waiting_for_a_rank_that_works_is_no_hang(tmp_path: Path) -> None:
    """Rank 0 waits for twice the time within which something must move, and rank 1 moves all the while."""
    with two_ranks(tmp_path, works_slowly_on_rank_1) as ranks:
        pass
    assert [rank.exitcode for rank in ranks] == [0, 0]


def holds_the_interpreter_on_rank_1(rank: int, watchdog: Watchdog) -> None:
    if rank == 1:
        ctypes.PyDLL(None).sleep(40)
    dist.barrier()


def test_a_rank_whose_interpreter_is_held_is_named_by_the_others(tmp_path: Path) -> None:
    """C code that never gives the interpreter back: on that rank no thread can write or say anything."""
    with two_ranks(tmp_path, holds_the_interpreter_on_rank_1) as ranks:
        ranks[0].join(60)
        ranks[1].kill()
    assert ranks[0].exitcode == 70
    (word,) = recorded(tmp_path)
    assert "; rank 1 did not answer; rank 0 start: waits for others in holds_the_interpreter_on_rank_1 (" in word.message
    assert "in barrier" in (tmp_path / "stacks" / "rank_00000.txt").read_text()


def wait_until_resumed(rank: int, watchdog: Watchdog) -> None:
    folder = Path(os.environ["MOE_RL_ERROR_DIR"])
    (folder / f"{rank}.waiting").touch()
    while not (folder / "resumed").exists():
        time.sleep(0.05)
    dist.barrier()


def test_a_job_that_was_suspended_goes_on(tmp_path: Path) -> None:
    """Both processes are stopped for longer than the time within which something must move."""
    with two_ranks(tmp_path, wait_until_resumed) as ranks:
        while not all((tmp_path / f"{rank}.waiting").exists() for rank in (0, 1)):
            time.sleep(0.02)
        for number, pause in ((signal.SIGSTOP, 3.0), (signal.SIGCONT, 0.5)):
            for rank in ranks:
                os.kill(rank.pid, number)
            time.sleep(pause)
        (tmp_path / "resumed").touch()
    assert [rank.exitcode for rank in ranks] == [0, 0]
