"""GRPO, GRPO with r2 and GSPO over minibatches and learning rates: what becomes of the reward, and what of the routing.

Each run of the grid has a directory under runs/study. A run whose end is on record under the same settings is not made again,
so the same command goes on where it was interrupted. What was found is written by `moe_rl.study`: tables here, CSV files and
runs/study/study.html. See docs/routing_study.md.
"""

import argparse
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from moe_rl import config, study
from moe_rl.study import grid
from parallel.errors import UsageError

ROOT = Path(__file__).parents[1]
# Steps in which the learning rate rises from 0. At once, the highest of them ends a run within three steps, before there is
# anything to see.
WARMUP_STEPS = 8
RUNS_A_WORKER = 8  # then a fresh process: what Megatron keeps of a finished run adds up
METHODS = {
    "grpo": ["algorithm.name=grpo"],
    "grpo_r2": ["algorithm.name=grpo", "replay.mode=r2"],
    "gspo": ["algorithm.name=gspo"],
}


@dataclass(frozen=True)
class Point:
    """One run of the grid."""

    method: str
    minibatches: int
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-m{self.minibatches}-lr{self.lr:g}-s{self.seed}"

    def overrides(self) -> list[str]:
        return [
            *METHODS[self.method],
            f"run.name={self.name}",
            f"run.seed={self.seed}",
            f"algorithm.minibatches={self.minibatches}",
            f"optimizer.lr={self.lr}",
            f"optimizer.warmup_updates={WARMUP_STEPS * self.minibatches}",
            f"checkpoint.load={_settings(_base(self.seed)).directory}",
            "sft.steps=0",
        ]


def main() -> int:
    arguments = _parse()
    axes = itertools.product(arguments.seeds, arguments.minibatches, arguments.lrs, arguments.methods)
    points = [Point(method, minibatches, lr, seed) for seed, minibatches, lr, method in axes]
    try:
        root = _settings([]).run.dir
        warm = [grid.Job(_warm_start(seed), _settings(_base(seed))) for seed in arguments.seeds]
        jobs = [grid.Job(point.name, _settings(point.overrides()), _warm_start(point.seed)) for point in points]
        failed = grid.train_all(warm, jobs, arguments.processes, RUNS_A_WORKER)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on with what is missing", file=sys.stderr)
        return 130
    try:
        study.write(root, [job.settings.directory for job in jobs])
    except UsageError as error:
        failed["study"] = str(error)
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    if failed:
        print(f"the same command tries again what failed; errors in full: {root}/NAME/output.txt")
    return 1 if failed else 0


def _settings(overrides: list[str]) -> config.RunConfig:
    return config.load(ROOT / "configs" / "study.yaml", overrides)


def _base(seed: int) -> list[str]:
    """The warm start that all runs of a seed begin with."""
    return [f"run.name=base-s{seed}", f"run.seed={seed}", "run.steps=0"]


def _warm_start(seed: int) -> str:
    return f"warm start of seed {seed}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods, known = grid.names(list(METHODS)), ", ".join(METHODS)
    parser.add_argument("--methods", type=methods, default=list(METHODS), metavar="A,B", help=f"of {known}")
    parser.add_argument(
        "--minibatches", type=grid.integers, default=[1, 2, 4, 8], metavar="N,N", help="updates a step (1,2,4,8)"
    )
    parser.add_argument(
        "--lrs", type=grid.numbers, default=[5e-5, 2e-4, 6e-4], metavar="X,X", help="learning rates (5e-5,2e-4,6e-4)"
    )
    parser.add_argument("--seeds", type=grid.integers, default=[0, 1, 2], metavar="N,N", help="of weights and samples (0,1,2)")
    parser.add_argument(
        "--processes", type=grid.count, default=os.cpu_count() or 1, metavar="N", help="runs at a time (a core each)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
