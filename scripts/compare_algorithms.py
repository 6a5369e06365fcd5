"""Every algorithm on one small task, with three seeds: held-out pass@1 before and after, and what a step costs.

Each run has a directory under runs/algorithms. A run whose end is on record under the same settings is not made again, so the
same command goes on where it was interrupted. The table goes to the terminal and to runs/algorithms/table.md. See
docs/algorithms.md for what it says and what it does not.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from moe_rl import config
from moe_rl.algorithms.table import ALGORITHMS
from moe_rl.study import algorithms, grid
from parallel.errors import UsageError

ROOT = Path(__file__).parents[1]
METHODS = {
    **{name: [f"algorithm.name={name}"] for name in ALGORITHMS},
    "grpo + r2": ["algorithm.name=grpo", "replay.mode=r2"],
    "gmpo + router shift (rspo)": ["algorithm.name=gmpo", "algorithm.router_shift=true"],
}


@dataclass(frozen=True)
class Point:
    """One run."""

    method: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        method = "".join(letter if letter.isalnum() or letter == "_" else "-" for letter in self.method)
        return f"{method}-lr{self.lr:g}-s{self.seed}"

    def settings(self) -> config.RunConfig:
        return _settings(
            [
                *METHODS[self.method],
                f"run.name={self.name}",
                f"run.seed={self.seed}",
                f"optimizer.lr={self.lr}",
                f"checkpoint.load={_base(self.seed).directory}",
                "sft.steps=0",
            ]
        )


def main() -> int:
    arguments = _parse()
    points = [Point(m, lr, seed) for seed in arguments.seeds for m in arguments.methods for lr in arguments.lrs]
    try:
        warm = [grid.Job(_warm_start(seed), _base(seed)) for seed in arguments.seeds]
        jobs = [grid.Job(point.name, point.settings(), _warm_start(point.seed)) for point in points]
        # a fresh process a run, so that no run pays for what Megatron keeps of another
        failed = grid.train_all(warm, jobs, arguments.processes, runs_a_worker=1)
        directories = [job.settings.directory for job in jobs]
        text = algorithms.table({(p.method, p.lr, p.seed): d for p, d in zip(points, directories, strict=True)})
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on with what is missing", file=sys.stderr)
        return 130
    print(text)
    (_settings([]).run.dir / "table.md").write_text(text, encoding="utf-8")
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    return 1 if failed else 0


def _settings(overrides: list[str]) -> config.RunConfig:
    return config.load(ROOT / "configs" / "algorithms.yaml", overrides)


def _base(seed: int) -> config.RunConfig:
    """The warm start that all runs of a seed begin with."""
    return _settings([f"run.name=base-s{seed}", f"run.seed={seed}", "run.steps=0"])


def _warm_start(seed: int) -> str:
    return f"warm start of seed {seed}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods, known = grid.names(list(METHODS)), ", ".join(METHODS)
    parser.add_argument("--methods", type=methods, default=list(METHODS), metavar="A,B", help=f"of {known}")
    parser.add_argument("--lrs", type=grid.numbers, default=[5e-5], metavar="X,X", help="learning rates (5e-5)")
    parser.add_argument("--seeds", type=grid.integers, default=[0, 1, 2], metavar="N,N", help="of weights and samples (0,1,2)")
    parser.add_argument(
        "--processes", type=grid.count, default=os.cpu_count() or 1, metavar="N", help="runs at a time (a core each)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
