"""Stands in for a run that hears signals: counts steps in progress.txt, saves on SIGUSR1 or SIGTERM and ends with code 75."""

import os
import signal
import sys
import time
from pathlib import Path

STEPS, SECONDS = 40, 0.1

progress = Path(f"progress_{os.environ['RANK']}.txt")
asked: list[int] = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: asked.append(number))
begun = int(progress.read_text()) if progress.exists() else 0
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {sys.argv[-1]}, after step {begun}", flush=True)
for step in range(begun + 1, STEPS + 1):
    time.sleep(SECONDS)
    if asked:
        progress.write_text(str(step))
        print(f"saved after step {step}: {signal.Signals(asked[0]).name}", flush=True)
        sys.exit(75)
progress.write_text(str(STEPS))
print("done", flush=True)
