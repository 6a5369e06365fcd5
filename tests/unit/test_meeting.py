"""Ranks that do not come to the meeting are named."""

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
