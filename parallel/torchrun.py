"""torchrun for jobs that are to save when they are told to: `python -m parallel.torchrun LOGS [arguments of torchrun]`.

Torchrun alone dies of SIGUSR1, waits half a minute for ranks that hang when one has failed, and turns whatever happens into
exit code 1. Here both signals are left to the ranks (parallel/deferred.py), the exit code is that of the rank which failed
first, and that rank's error is shown, once in the job. LOGS: a folder that all nodes see; ranks leave their errors in it, and
what they print is expected there as rank_N.log.
"""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from parallel.conclusion import GRACE_SECONDS, Outside, alone, arrive, conclude, say_how, succeed, wait_until
from parallel.deferred import LeftToRanks
from parallel.failures import CLOSING_SECONDS, ERROR_DIR, SAVED
from parallel.launch import node_name

_CPP_LEVEL = "TORCH_CPP_LOG_LEVEL"  # read when torch is imported
_LEFT_TO_RANKS = ("--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT")


def main(arguments: Sequence[str]) -> int:
    """Runs this node's ranks to their end; the exit code."""
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[ERROR_DIR] = str(folder)
    signals = LeftToRanks(folder)
    arrive(folder)
    # When another node's torchrun has gone, this one's C++ side prints a page about it; ranks have their own level again.
    level = os.environ.get(_CPP_LEVEL)
    os.environ[_CPP_LEVEL] = level or "ERROR"
    try:
        from torch.distributed import run
        from torch.distributed.elastic import multiprocessing as started
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
    except (ImportError, OSError) as error:  # a library that this node lacks
        say_how(folder, f"1 {node_name()}: {type(error).__name__}: {error}")
        raise

    if level is None:
        del os.environ[_CPP_LEVEL]
    logging.disable(logging.ERROR)  # what torchrun says of ranks that ended is said here, once in the job

    # torch 2.14 has --shutdown-timeout, but not for the ranks that are left when one has failed
    outside = Outside(folder)

    class Context(started.SubprocessContext):
        def _start(self) -> None:
            with signals.starting() as processes:
                super()._start()
                processes.extend(self.pids().values())

        def _poll(self) -> started.RunProcsResult | None:
            if outside.has_ended():
                self.close()
            return super()._poll()

        def _close(self, death_sig: signal.Signals, timeout: int = 0) -> None:
            ranks = [handler.proc for handler in self.subprocess_handlers.values()]
            if SAVED in [rank.poll() for rank in ranks]:  # the others end too, as soon as their files are closed
                wait_until(lambda: None not in [rank.poll() for rank in ranks], CLOSING_SECONDS)
            super()._close(death_sig, int(GRACE_SECONDS))

    started.SubprocessContext = Context
    with tempfile.TemporaryDirectory(prefix="moe-rl-") as scratch:  # torchrun's own files, which it would leave
        words = ["--log-dir", scratch, *_LEFT_TO_RANKS, *arguments[1:]]
        nodes = int(run.parse_args(words).nnodes.split(":")[-1])
        try:
            run.main(words)
        except RendezvousError as error:
            return alone(str(error), folder, nodes)
        except ChildFailedError as error:
            ended = {rank: (one.exitcode, one.timestamp) for rank, one in error.failures.items()}
            return conclude(ended, folder, nodes, signals.heard)
    return succeed(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
