"""A signal that asks a run to save: noted while somebody listens, and never lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.interruption import Interruption

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("where", ["import optional", "exec(open('optional.py').read())"])
def test_before_anything_can_be_saved_a_signal_ends_the_process(tmp_path: Path, where: str) -> None:
    """Also within an import whose failure somebody takes for a missing module."""
    (tmp_path / "optional.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nprint('goes on')\n")
    body = f"from parallel.launch import saving_signals_end\nwith saving_signals_end():\n    {where}"
    swallowed = body.replace("import optional", "\n    try: import optional\n    except BaseException: print('not there')")
    done = subprocess.run(
        [sys.executable, "-c", swallowed],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (75, b"", b"")
