"""A signal that asks a run to save: noted while somebody listens, and never lost."""

import signal

import pytest

from parallel.interruption import Interruption


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_what_comes_too_late_goes_to_who_handled_it_before(number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda number, frame: heard.append(number))
    try:
        interruption = Interruption()
        with interruption.listening():
            signal.raise_signal(number)
            assert (interruption.received, heard) == (number, [])
        assert heard == [number]
        with pytest.raises(SystemExit), Interruption().listening():  # it was answered: the process is about to end
            signal.raise_signal(number)
            raise SystemExit
        assert heard == [number]
        with Interruption().listening():
            pass
        assert heard == [number]
    finally:
        signal.signal(number, before)
