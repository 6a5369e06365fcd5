"""Seconds spent in the phases of a step."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any


class Stopwatch:
    """`with watch("rollout"): ...` adds to that phase's seconds."""

    def __init__(self, progress: Callable[[str], None] | None = None) -> None:
        """progress: told of every phase that begins or ends."""
        self._start, self.seconds, self.progress = time.perf_counter(), dict[str, float](), progress

    def __getstate__(self) -> dict[str, Any]:
        """Saved within a step: the clock and whom it tells belong to the process. Who takes the step up says anew whom."""
        return {"spent": time.perf_counter() - self._start, "seconds": self.seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Runs on from what was spent: neither the time in between counts, nor another machine's clock."""
        self._start = time.perf_counter() - state["spent"]
        self.seconds, self.progress = state["seconds"], None

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        self._tell(phase)
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        self._tell(f"after {phase}")

    def _tell(self, phase: str) -> None:
        if self.progress is not None:
            self.progress(phase)

    def metrics(self) -> dict[str, float]:
        """`time/PHASE_seconds`, and `time/step_seconds` since this watch was made, while it ran."""
        phases = {f"time/{phase}_seconds": seconds for phase, seconds in sorted(self.seconds.items())}
        return phases | {"time/step_seconds": time.perf_counter() - self._start}
