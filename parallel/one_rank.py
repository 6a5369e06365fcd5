"""One rank that srun starts, and how it ended: `python -m parallel.one_rank LOGS COMMAND ...`. As parallel/torchrun.py, but for
a rank instead of a node. Imports no torch.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from parallel.conclusion import GRACE_SECONDS, Outside, conclude, succeed, wait_until
from parallel.deferred import LeftToRanks
from parallel.failures import ERROR_DIR
from parallel.launch import World, launched_world

_POLL_SECONDS = 0.1


def main(arguments: Sequence[str]) -> int:
    """Runs the command to its end; the exit code."""
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    world = launched_world(os.environ) or World(rank=0, size=1, local_rank=0)
    signals = LeftToRanks(folder)
    with signals.starting() as processes:
        process = subprocess.Popen(arguments[1:], env=os.environ | {ERROR_DIR: str(folder)})
        processes.append(process.pid)
    looked, outside = time.time(), Outside(folder)
    while (code := process.poll()) is None:
        looked = time.time()
        if outside.has_ended():
            process.terminate()
            wait_until(lambda: process.poll() is not None, GRACE_SECONDS)
            process.kill()
        time.sleep(_POLL_SECONDS)
    return conclude({world.rank: (code, looked)}, folder, world.size, signals.heard) if code else succeed(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
