"""How a job ends whose ranks were started by several agents: one on each node, or one for each rank.

Agents meet in a folder that all of them see. There ranks have left their errors (parallel/failures.py), and there stands in
the end, in one line, how the job ended: an exit code, and why. Whoever started the agents may end them as soon as one has gone:
none goes before this is known. Imports no torch.
"""

import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from signal import SIGTERM

from parallel.failures import CLOSING_SECONDS, SAVED, Failure, headline, recorded, report, wordless, write
from parallel.launch import node_name

_SAVED = "saved"  # in the folder, where a rank has ended as one that was asked to
ENDED = "ended"  # in the folder: "137 rank 1 failed first: killed by signal SIGKILL"
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL for the ranks of a node on which one has failed
_SETTLE_SECONDS = GRACE_SECONDS + 2.0  # until the node where it began has said so
_TELL_SECONDS = 5.0
_POLL_SECONDS = 0.05
_LOOK_SECONDS = 2.0


def conclude(ended: Mapping[int, tuple[int, float]], folder: Path, agents: int, heard: Collection[int] = ()) -> int:
    """Of one agent whose ranks have ended and did not all succeed: the exit code of the one that failed first.

    ended: of each failed rank the exit code (negative: the signal), and the last time when it may have lived. agents: how many
    the job has. heard: signals that this agent heard while its ranks ran. The first agent here that knows says what went wrong,
    wherever it began.
    """
    # a rank that died of what all were told did not listen yet: there was nothing to save
    ended = {rank: (SAVED if -code in heard else code, seen) for rank, (code, seen) in ended.items()}
    # The others of a node are ended by SIGTERM when one has failed, whether they listen or not: that is never how it began.
    ends_others = {-SIGTERM} if heard else {-SIGTERM, SAVED}
    ended = {rank: how for rank, how in ended.items() if how[0] not in ends_others} or ended
    spoken = {failure.rank for failure in recorded(folder)}
    silent = [wordless(rank, *how) for rank, how in ended.items() if rank not in spoken and how[0] != SAVED]
    with contextlib.suppress(OSError):  # a full disk, maybe: then each agent tells what it knows
        for failure in silent:
            write(folder, failure)
        (folder / f"agent_of_{min(ended)}").touch()
        # A rank that ends so was asked to, and what it knows is saved: where others broke off in that, nothing is lost.
        if any(code == SAVED for code, _ in ended.values()):
            (folder / _SAVED).touch()

    saves = (folder / _SAVED).exists()
    wait_until(lambda: _all_here(folder, agents) or _is_known(folder), CLOSING_SECONDS if saves else _SETTLE_SECONDS)
    # Where one has not come it may have died, and it was srun which then asked the others to end.
    if (folder / _SAVED).exists() and (_all_here(folder, agents) or _is_known(folder)):
        if not _is_known(folder):
            say_how(folder, f"{SAVED} saved")
        return SAVED
    known = {failure.rank: failure for failure in (*silent, *recorded(folder))}
    failures = sorted(known.values(), key=lambda one: (one.time, one.rank))
    if failures:
        _tell(failures[0], folder)
    return next((failure.exit_code for failure in failures if failure.rank in ended), 128 + SIGTERM)


def succeed(folder: Path) -> int:
    """Of an agent whose ranks have all succeeded: nobody waits for it. The exit code."""
    with contextlib.suppress(OSError):
        (folder / f"agent_of_{secrets.token_hex(8)}").touch()
    return 0


def arrive(folder: Path) -> None:
    """Of an agent that has started: by this its node is known to have come."""
    (folder / f"node_{node_name()}").touch()


def alone(error: str, folder: Path, agents: int) -> int:
    """Of an agent that did not meet the others, or has lost them: the exit code."""
    if not _is_known(folder):
        names = ", ".join(sorted(path.name.removeprefix("node_") for path in folder.glob("node_*")))
        text = (
            f"moe-rl: error: {node_name()} does not reach the other nodes, or one did not start or is gone: "
            f"{error.rstrip('.')}; of {agents} nodes these had started: {names}"
        )
        print(text, file=sys.stderr, flush=True)
        say_how(folder, f"1 {text}")
    return 1


class Outside:
    """Whether the others have told how the job ended, so that ranks which still run are to be ended. That is not left to
    srun, which waits as long as the cluster's KillWait says: half a minute by default."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._looked = folder, time.monotonic()

    def has_ended(self) -> bool:
        """Looks every few seconds: the folder is on a file system that thousands may share."""
        if time.monotonic() < self._looked + _LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        return _is_known(self._folder)


def _all_here(folder: Path, agents: int) -> bool:
    return len([*folder.glob("agent_of_*")]) >= agents


def _is_known(folder: Path) -> bool:
    return (folder / ENDED).exists()


def _tell(first: Failure, folder: Path) -> None:
    """Of several agents one reports, and the others wait for it."""
    try:
        (folder / "telling").touch(exist_ok=False)
    except FileExistsError:
        wait_until(lambda: _is_known(folder), _TELL_SECONDS)
        return
    except OSError as error:
        print(f"{folder}: {error.strerror}", file=sys.stderr)
    report(first, folder)
    sys.stderr.flush()
    say_how(folder, f"{first.exit_code} {headline(first)}")


def say_how(folder: Path, line: str) -> None:
    """What the job's last line says: an exit code, and why."""
    part = folder / f".{ENDED}.{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):
        part.write_text(f"{' '.join(line.split())}\n", encoding="utf-8")
        part.replace(folder / ENDED)


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    """So long at most."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
