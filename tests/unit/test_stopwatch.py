"""Seconds of a step that goes on in another process."""

import pickle
import time

import pytest

from moe_rl.stopwatch import Stopwatch


def test_neither_the_time_in_between_counts_nor_another_machines_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    watch = Stopwatch(print)
    with watch("rollout"):
        now = 1002.0
    now = 1003.0
    saved = pickle.dumps(watch)
    now = 5.0  # of a node that was started a moment ago
    again = pickle.loads(saved)
    with again("rollout"):
        now = 6.0
    assert again.metrics() == {"time/rollout_seconds": 3.0, "time/step_seconds": 4.0}
