"""GRPO, GRPO with r2 and GSPO over minibatches and learning rates: what becomes of the reward, and what of the routing.

Each cell of the grid is a run directory under runs/study. A run whose end is on record is not made again, and one that was
interrupted goes on from its checkpoint. What was found is written by `moe_rl.study`: tables here, runs/study/study.html.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from moe_rl import config, rundir, study

ROOT = Path(__file__).parents[1]
# Steps in which the learning rate rises from 0. At once, the highest of them ends a run within three steps, before there is
# anything to see.
WARMUP_STEPS = 8
METHODS = {
    "grpo": ["algorithm.name=grpo"],
    "grpo_r2": ["algorithm.name=grpo", "replay.mode=r2"],
    "gspo": ["algorithm.name=gspo"],
}


@dataclass(frozen=True)
class Cell:
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
            f"checkpoint.load={_base(self.seed)}",
            "sft.steps=0",
        ]


def main() -> None:
    arguments = _parse()
    cells = [
        Cell(method, minibatches, lr, seed)
        for seed, minibatches, lr, method in itertools.product(
            arguments.seeds, arguments.minibatches, arguments.lrs, arguments.methods
        )
    ]
    began = time.monotonic()
    # spawned, so that no worker inherits a process group. A worker keeps what it imported for its next runs, and ends after
    # a few: what Megatron keeps of a finished run adds up.
    with multiprocessing.get_context("spawn").Pool(arguments.processes, maxtasksperchild=8) as pool:
        for seed in pool.imap_unordered(_warm, arguments.seeds, chunksize=1):
            print(f"warm start of seed {seed} is there", flush=True)
        for number, (name, result) in enumerate(pool.imap_unordered(_run, cells), start=1):
            minutes = (time.monotonic() - began) / 60
            print(f"{number}/{len(cells)} {name}: {result} ({minutes:.1f} min)", flush=True)
    directories = [_settings(cell.overrides()).directory for cell in cells]
    study.write(_settings([]).run.dir, directories)


def _warm(seed: int) -> int:
    overrides = [f"run.name={_base(seed).name}", f"run.seed={seed}", "run.steps=0"]
    _train(overrides)
    return seed


def _run(cell: Cell) -> tuple[str, str]:
    settings = _settings(cell.overrides())
    if rundir.read_summary(settings.directory).get("step") != settings.run.steps:
        _train(cell.overrides())
    summary = rundir.read_summary(settings.directory)
    return cell.name, f"pass@1 {summary['eval/pass_at_1']:.3f}"


def _train(overrides: list[str]) -> None:
    from moe_rl.trainer import train

    settings = _settings(overrides)
    settings.directory.mkdir(parents=True, exist_ok=True)
    with (settings.directory / "output.txt").open("a", encoding="utf-8") as file:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            train(settings)


def _settings(overrides: list[str]) -> config.RunConfig:
    return config.load(ROOT / "configs" / "study.yaml", overrides)


def _base(seed: int) -> Path:
    return Path("runs/study") / f"base-s{seed}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=lambda t: t.split(","), default=list(METHODS), metavar="A,B")
    parser.add_argument("--minibatches", type=_integers, default=[1, 2, 4, 8], metavar="N,N")
    parser.add_argument("--lrs", type=lambda t: [float(v) for v in t.split(",")], default=[5e-5, 2e-4, 6e-4], metavar="X,X")
    parser.add_argument("--seeds", type=_integers, default=[0, 1, 2], metavar="N,N")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="runs at a time; default: a core each")
    arguments = parser.parse_args()
    if unknown := [method for method in arguments.methods if method not in METHODS]:
        sys.exit(f"--methods {unknown[0]}: must be among {', '.join(METHODS)}")
    return arguments


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
