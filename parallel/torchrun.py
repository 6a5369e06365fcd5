"""torchrun for jobs that are to save when they are told to: `python -m parallel.torchrun LOGS [arguments of torchrun]`.

Torchrun alone dies of SIGUSR1, kills its ranks 30 seconds after SIGTERM, and turns whatever happens into exit code 1. Here
both signals are left to the ranks (Slurm sends them to every process of a step), the exit code is that of the rank which
failed first, and that rank's error is shown, by its node alone. LOGS: a folder that all nodes see; ranks leave their errors in
it, and what they print is expected there as rank_N.log.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel.failures import ERROR_DIR, SAVED, Failure, recorded, report, wordless, write

_SETTLE_SECONDS = 2.0
_LEFT_TO_RANKS = ("--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT")


def main(arguments: Sequence[str]) -> int:
    """Runs this node's ranks to their end; the exit code."""
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[ERROR_DIR] = str(folder)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited: a rank that does not listen yet must not die of it
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # not inherited: torchrun ends ranks by it when one fails
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main([*_LEFT_TO_RANKS, *arguments[1:]])
    except ChildFailedError as error:
        return conclude({rank: (one.exitcode, one.timestamp) for rank, one in error.failures.items()}, folder)
    return 0


def conclude(ended: Mapping[int, tuple[int, float]], folder: Path) -> int:
    """Says what went wrong, if it began on this node, and returns the exit code of the first failure of this node.

    ended: of this node's failed ranks the exit code (negative: the signal) and when that was seen, in whole seconds.
    """
    # torchrun ends what still runs by SIGTERM: that is never how it began
    ended = {rank: how for rank, how in ended.items() if how[0] != -signal.SIGTERM} or ended
    if all(code == SAVED for code, _ in ended.values()):
        return SAVED
    spoken = {failure.rank for failure in recorded(folder)}
    for rank, (code, seen) in ended.items():
        if rank not in spoken:
            write(folder, wordless(rank, code, seen))
    time.sleep(_SETTLE_SECONDS)  # until the other nodes' ranks have left their word
    failures = sorted(recorded(folder), key=_order)
    if failures[0].rank in ended:
        report(failures[0], folder)
    else:
        print(f"ranks {', '.join(map(str, sorted(ended)))} ended after rank {failures[0].rank} had failed", file=sys.stderr)
    return next(failure.exit_code for failure in failures if failure.rank in ended)


def _order(failure: Failure) -> tuple[float, int]:
    return failure.time, failure.rank


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
