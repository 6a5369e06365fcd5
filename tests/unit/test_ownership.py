"""A run's directory has one owner: a second start beside a living one is refused, and one that was thought dead ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from moe_rl.ownership import FILE, check_free, owned
from parallel.errors import UsageError


def as_of(process: int, since: float, host: str | None = None) -> str:
    owner = {"host": host or os.uname().nodename, "process": process, "since": since, "job": "12", "token": "another"}
    return json.dumps(owner)


def test_a_living_process_of_this_machine_is_not_disturbed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        since = psutil.Process(other.pid).create_time()
        (tmp_path / FILE).write_text(as_of(other.pid, since))
        with pytest.raises(UsageError, match=rf"job 12, process {other.pid} on .* works in it; end that first"):
            check_free(tmp_path)
        (tmp_path / FILE).write_text(as_of(other.pid, since - 60))  # one that had its number before
        check_free(tmp_path)
        other.kill()
        other.wait()
    (tmp_path / FILE).write_text(as_of(other.pid, since))
    check_free(tmp_path)


@pytest.mark.parametrize("left", [None, "", "{", as_of(1, 0.0, "elsewhere")])
def test_what_killed_or_unseen_processes_left_is_taken_over(tmp_path: Path, left: str | None) -> None:
    directory = tmp_path / "run"
    if left is not None:
        directory.mkdir()
        (directory / FILE).write_text(left)
    check_free(directory)
    with owned(directory) as check:
        check()
        assert json.loads((directory / FILE).read_text())["process"] == os.getpid()
        check_free(directory)  # its own
    assert not [*directory.iterdir()]


def test_one_that_was_thought_dead_ends(tmp_path: Path) -> None:
    with owned(tmp_path) as check:
        with owned(tmp_path) as newer:
            newer()
            with pytest.raises(UsageError, match="has taken it over; this one ends"):
                check()
        with pytest.raises(UsageError, match="another start of this run had taken it over"):
            check()  # the newer one has ended well, and it would be written over what that one has made
        (tmp_path / FILE).write_text(as_of(77, 0.0, "node7"))
        with pytest.raises(UsageError, match="job 12, process 77 on node7 has taken it over"):
            check()
    assert (tmp_path / FILE).exists()  # not ours to remove


def test_a_directory_that_was_moved_aside_has_a_new_owner(tmp_path: Path) -> None:
    with owned(tmp_path / "run") as check:
        (tmp_path / "run").rename(tmp_path / "run.1")
        with owned(tmp_path / "run"), pytest.raises(UsageError):
            check()


def test_a_directory_that_cannot_be_given_back_does_not_hide_why_the_run_ended(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="^the disk is read-only$"), owned(tmp_path):
        (tmp_path / FILE).unlink()
        (tmp_path / FILE).mkdir()  # which nobody can read
        raise UsageError("the disk is read-only")
