"""Which rank failed first, and how: each leaves a record in a folder that whoever started them reads. Imports no torch."""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from parallel.errors import UsageError

ERROR_DIR = "MOE_RL_ERROR_DIR"
SAVED = 75  # a run's exit code after a save that a signal asked for (EX_TEMPFAIL of sysexits.h): the same command goes on
CLOSING_SECONDS = 120.0  # from the first rank that has ended so to the last: files are closed, and trackers upload
HANG = "hang"  # a kind of failure
_TAIL_LINES = 20


@dataclass(frozen=True)
class Failure:
    """How a rank ended. `time`: seconds since the epoch; `traceback` is empty where the rank left no word."""

    time: float
    rank: int
    kind: str
    message: str
    traceback: str
    exit_code: int


class report_errors:
    """Around a worker's work: an exception is recorded for the starter, which prints it, and the worker exits without a word.

    It belongs inside whatever closes connections to the peers on the way out: they fail then too, and the earliest record
    counts as the cause. Nested, the inner one records. Where neither `launch` nor parallel/torchrun.py nor
    parallel/one_rank.py started this process (torchrun itself, srun, a single process) the exception goes its way. Exit codes:
    2 for UsageError, 130 for KeyboardInterrupt, else 1.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        code = 2 if isinstance(error, UsageError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        name = "UsageError" if isinstance(error, UsageError) else type(error).__name__
        text = "".join(traceback.format_exception(error))
        if leave_word(Failure(time.time(), int(os.environ.get("RANK", "0")), name, str(error), text, code)):
            raise SystemExit(code) from None


def leave_word(failure: Failure) -> bool:
    """Records how this rank ends for whoever started it; False where that was none who looks for it, or it cannot be written.

    Torchrun shows in its summary what it finds in a file that it names.
    """
    if (summary := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        extra = {"py_callstack": failure.traceback, "timestamp": str(int(failure.time))}
        message = {"message": f"{failure.kind}: {failure.message}", "extraInfo": extra}
        with contextlib.suppress(OSError):
            Path(summary).write_text(json.dumps({"message": message}), encoding="utf-8")
    folder = os.environ.get(ERROR_DIR)
    if folder is None:
        return False
    try:
        write(Path(folder), failure)
    except OSError:  # a full disk, maybe
        return False
    return True


def wordless(rank: int, code: int, looked: float) -> Failure:
    """A rank that left no word. It died at some time after the last look, so what its peers recorded since then followed
    from its death; but an abort may itself follow from a peer's error: for that, the latest possible time."""
    if code > 0:
        return Failure(looked, rank, "exited", f"with code {code}", "", code)
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return Failure(time.time() if name == "SIGABRT" else looked, rank, "killed", f"by signal {name}{hint}", "", 128 - code)


def write(folder: Path, failure: Failure) -> None:
    part = folder / f"rank_{failure.rank}.part"
    part.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    part.replace(folder / f"rank_{failure.rank}.json")


def recorded(folder: Path) -> list[Failure]:
    """What failed ranks have written so far."""
    return [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank_*.json")]


def log_file(folder: Path, rank: int) -> Path:
    """Where a rank's output goes that is not shown as it comes."""
    return folder / f"rank_{rank}.log"


def report(failure: Failure, folder: Path) -> None:
    """Prints the last lines of the rank's file, its traceback, and in one line what it was."""
    if failure.kind == "UsageError":
        print(headline(failure), file=sys.stderr)
        return
    path = log_file(folder, failure.rank)
    tail = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:] if path.exists() else []
    if tail:
        print(f"last lines of rank {failure.rank}:", *tail, sep="\n  ", file=sys.stderr)
    if failure.traceback:
        print(failure.traceback.rstrip(), file=sys.stderr)
    print(headline(failure), file=sys.stderr)


def headline(failure: Failure) -> str:
    """What it was, in one line."""
    message = " ".join(failure.message.split())
    if failure.kind == "UsageError":
        return f"moe-rl: error: {message}"
    colon = ":" if failure.traceback or failure.kind == HANG else ""
    return f"rank {failure.rank} failed first: {failure.kind}{colon} {message}"
