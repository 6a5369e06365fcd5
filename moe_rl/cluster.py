"""`moe-rl doctor --cluster`: the preflight alone, inside torchrun or srun or in processes that it starts here."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from parallel.config import ParallelConfig
from parallel.errors import UsageError
from parallel.failures import report_errors
from parallel.launch import launch, launched_world

if TYPE_CHECKING:
    from parallel.preflight import RankReport

_THREADS = 1


def cluster(path: str | None, overrides: Sequence[str], processes: int | None) -> int:
    """Looks at every rank and every group of the layout in the file at `path`, or of data-parallel ranks without one.

    processes: how many to start here; None: the fewest the layout allows, but two. Returns the exit code.
    """
    world = launched_world(os.environ)
    with report_errors():
        if path is None and overrides:
            raise UsageError(f"{overrides[0]}: needs a CONFIG before it")
        parallel = ParallelConfig()
        if path is not None:
            from moe_rl import config

            parallel = config.load(path, overrides).parallel
        size = world.size if world else processes or max(2, parallel.fewest_processes)
        parallel.check_world(size)
        if world:
            _look(parallel)
            return 0
    given = [] if path is None else [path, *overrides]
    return launch([sys.executable, "-P", "-m", "moe_rl.cli", "doctor", "--cluster", *given], size, _THREADS)


def _look(parallel: ParallelConfig) -> None:
    """On every rank; the main one prints."""
    from parallel.groups import process_groups
    from parallel.preflight import preflight
    from parallel.runtime import started

    with started(0, _THREADS, parallel.timeout_seconds) as here, process_groups(parallel) as groups:
        reports, warnings = preflight(groups, here)
        if here.is_main:
            print(as_text(reports, warnings))
            print(f"{here.world_size} ranks: every one answers, and every group works")


def as_text(reports: Sequence["RankReport"], warnings: Sequence[str]) -> str:
    """What a preflight found: a line a rank, then what is the same on all, the slowest of each operation, and what is odd."""
    lines = [
        f"{'rank':<6}{'host':<20}{'process':<9}{'device':<24}{'free of GiB':<16}{'clock s':<9}{'compute ms':<12}link ms",
        *map(_line, reports),
        "versions: " + ", ".join(f"{name} {version}" for name, version in reports[0].versions.items()),
        "slowest rank, ms:",
    ]
    for name in reports[0].times:
        slowest = max(reports, key=lambda one: one.times.get(name, 0.0))
        lines.append(f"  {name:<32}{1e3 * slowest.times[name]:>9.2f}  rank {slowest.rank} on {slowest.host}")
    return "\n".join([*lines, *(f"- {warning}" for warning in warnings)])


def _line(one: "RankReport") -> str:
    memory, link = f"{one.free:.1f} of {one.total:.1f}", f"{1e3 * one.link:.2f}" if one.link else "-"
    return (
        f"{one.rank:<6}{one.host:<20}{one.pid:<9}{one.device:<24}{memory:<16}{one.clock:<+9.2f}{1e3 * one.compute:<12.2f}{link}"
    )
