"""Ranks that do not come to the meeting are named."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel.errors import UsageError
from parallel.launch import World, _free_port
from parallel.meeting import met


def test_who_has_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(_free_port()))
    with pytest.raises(UsageError, match="^rank 1, 2 of 3 did not start within 1 s; look at what these ranks printed"):
        met(World(0, 3, 0), 1.0)


def test_rank_0_has_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    port = _free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(
        UsageError, match=rf"^MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: rank 1 on .* does not reach rank 0 there"
    ):
        met(World(1, 2, 1), 1.0)


def test_a_rank_that_waits_for_others_hears_a_signal() -> None:
    body = """if True:
        from parallel.launch import World, saving_signals_end
        from parallel.meeting import met
        with saving_signals_end():
            print("waits", flush=True)
            met(World(0, 2, 0), 60.0)
    """
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    command = [sys.executable, "-c", body]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "waits\n"
        time.sleep(3)
        process.send_signal(signal.SIGUSR1)
        assert process.communicate(timeout=15)[1] == "" and process.returncode == 75
