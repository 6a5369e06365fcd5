"""The table of scripts/compare_algorithms.sh: what each algorithm learned, and what it cost beside GRPO."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from moe_rl import rundir, tracking
from moe_rl.study.grid import COSTS

BASELINE = "grpo"
Key = tuple[str, float, int]  # (method, learning rate, seed)


@dataclass(frozen=True)
class Outcome:
    """One run. before, after: held-out pass@1. best_reward: the largest mean over 5 steps of the training reward."""

    before: float
    after: float
    best_reward: float
    cpu_seconds: float


def table(directories: Mapping[Key, Path]) -> str:
    """Markdown. A row a method and learning rate, over its seeds; runs that did not end are left out and counted."""
    outcomes = {key: found for key, directory in directories.items() if (found := read(directory)) is not None}
    rows = list(dict.fromkeys((method, lr) for method, lr, _ in directories))
    lines = [
        "| algorithm | lr | runs | pass@1 before | after, mean | range | gain | best reward | CPU time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method, lr in rows:
        seeds = {seed: found for (m, x, seed), found in outcomes.items() if (m, x) == (method, lr)}
        wanted = sum((m, x) == (method, lr) for m, x, _ in directories)
        if not seeds:
            lines.append(f"| {method} | {lr:g} | 0 of {wanted} | - | - | - | - | - | - |")
            continue
        after = [found.after for found in seeds.values()]
        cells = [
            method,
            f"{lr:g}",
            str(len(seeds)) if len(seeds) == wanted else f"{len(seeds)} of {wanted}",
            f"{fmean(found.before for found in seeds.values()):.3f}",
            f"{fmean(after):.3f}",
            f"{min(after):.3f} - {max(after):.3f}",
            f"{fmean(found.after - found.before for found in seeds.values()):+.3f}",
            f"{fmean(found.best_reward for found in seeds.values()):.3f}",
            _relative(seeds, outcomes, lr),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def read(directory: Path) -> Outcome | None:
    """None where the run has not ended."""
    summary, costs = tracking.read_summary(directory), directory / COSTS
    if not summary or not costs.exists():
        return None
    steps, cost = rundir.read_metrics(directory), json.loads(costs.read_text(encoding="utf-8"))
    rewards = [line["reward/mean"] for line in steps if line.get("reward/mean") is not None]
    means = [fmean(rewards[i : i + 5]) for i in range(max(1, len(rewards) - 4))]
    return Outcome(steps[0]["eval/pass_at_1"], summary["eval/pass_at_1"], max(means), cost["cpu_seconds"])


def _relative(seeds: Mapping[int, Outcome], outcomes: Mapping[Key, Outcome], lr: float) -> str:
    """CPU time over that of GRPO's run of the same seed, mean over the seeds."""
    ratios = [
        found.cpu_seconds / base.cpu_seconds
        for seed, found in seeds.items()
        if (base := outcomes.get((BASELINE, lr, seed))) is not None
    ]
    return f"{fmean(ratios):.2f}" if ratios else "-"
