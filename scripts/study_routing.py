"""GRPO, GRPO with r2 and GSPO over minibatches and learning rates: what becomes of the reward, and what of the routing.

Each run of the grid has a directory under runs/study. A run whose end is on record under the same settings is not made again,
so the same command goes on where it was interrupted. What was found is written by `moe_rl.study`: tables here, CSV files and
runs/study/study.html. See docs/routing_study.md.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from moe_rl import config, study, tracking, yaml_text
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
    grid = itertools.product(arguments.seeds, arguments.minibatches, arguments.lrs, arguments.methods)
    points = [Point(method, minibatches, lr, seed) for seed, minibatches, lr, method in grid]
    try:
        root = _settings([]).run.dir
        directories = [_settings(point.overrides()).directory for point in points]  # before anything is trained
        failed = _train_all(arguments.seeds, points, arguments.processes)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on with what is missing", file=sys.stderr)
        return 130
    try:
        study.write(root, directories)
    except UsageError as error:
        failed["study"] = str(error)
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    if failed:
        print(f"the same command tries again what failed; errors in full: {root}/NAME/output.txt")
    return 1 if failed else 0


def _train_all(seeds: Sequence[int], points: Sequence[Point], processes: int) -> dict[str, str]:
    """What failed, by name, and why. Nothing that fails keeps the others from being trained."""
    began, failed = time.monotonic(), {}
    for seed, done in _as_done(_warm, seeds, processes):
        if why := _failure(done, _settings(_base(seed)).directory):
            failed[f"warm start of seed {seed}"] = why
        print(f"warm start of seed {seed}: {why or 'is there'}", flush=True)
    startable = [point for point in points if f"warm start of seed {point.seed}" not in failed]
    for number, (point, done) in enumerate(_as_done(_run, startable, processes), start=1):
        if why := _failure(done, _settings(point.overrides()).directory):
            failed[point.name] = why
        result = f"failed: {why}" if why else f"pass@1 {done.result():.3f}"
        minutes = (time.monotonic() - began) / 60
        print(f"{number}/{len(startable)} {point.name}: {result} ({minutes:.1f} min)", flush=True)
    return failed


def _as_done[Item, Made](
    make: Callable[[Item], Made], items: Sequence[Item], processes: int
) -> Iterator[tuple[Item, "Future[Made]"]]:
    """Each item as its process is done with it."""
    for chunk in itertools.batched(items, processes * RUNS_A_WORKER):
        # spawned, so that no worker inherits a process group
        with ProcessPoolExecutor(min(processes, len(chunk)), multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(make, item): item for item in chunk}
            try:
                for future in as_completed(futures):
                    yield futures[future], future
            finally:
                pool.shutdown(cancel_futures=True)


def _failure(done: "Future[float]", directory: Path) -> str:
    """Why it failed, in one line; nothing where it did not. The whole goes to output.txt."""
    error = done.exception()
    if error is None:
        return ""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "output.txt").open("a", encoding="utf-8") as file:
        file.writelines(traceback.format_exception(error))
    return f"{type(error).__name__}: {[*str(error).splitlines(), ''][0]}"


def _warm(seed: int) -> float:
    return _trained(_base(seed))


def _run(point: Point) -> float:
    return _trained(point.overrides())


def _trained(overrides: list[str]) -> float:
    """The held-out pass@1 at the end. A run that is not finished begins anew: only its end is saved."""
    settings = _settings(overrides)
    if not _finished(settings):
        from moe_rl.trainer import train

        settings.directory.mkdir(parents=True, exist_ok=True)
        with (settings.directory / "output.txt").open("a", encoding="utf-8") as file:
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                train(settings)
    return tracking.read_summary(settings.directory)["eval/pass_at_1"]


def _finished(settings: config.RunConfig) -> bool:
    """Its end is on record, under the same settings as far as both know them: another version may know more."""
    path = settings.directory / "config.yaml"
    try:
        ended = tracking.read_summary(settings.directory).get("step") == settings.run.steps
    except ValueError:  # cut short: it died while it wrote it
        return False
    if not ended or not path.exists():
        return False
    was, now = yaml_text.parse(path.read_text(encoding="utf-8"), str(path)), yaml_text.parse(config.dump(settings), "config")
    return all(
        was[section].get(key, value) == value for section in now if section in was for key, value in now[section].items()
    )


def _settings(overrides: list[str]) -> config.RunConfig:
    return config.load(ROOT / "configs" / "study.yaml", overrides)


def _base(seed: int) -> list[str]:
    """The warm start that all runs of a seed begin with."""
    return [f"run.name=base-s{seed}", f"run.seed={seed}", "run.steps=0"]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=_methods, default=list(METHODS), metavar="A,B", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--minibatches", type=_integers, default=[1, 2, 4, 8], metavar="N,N", help="updates a step (1,2,4,8)")
    parser.add_argument(
        "--lrs", type=_numbers, default=[5e-5, 2e-4, 6e-4], metavar="X,X", help="learning rates (5e-5,2e-4,6e-4)"
    )
    parser.add_argument("--seeds", type=_integers, default=[0, 1, 2], metavar="N,N", help="of weights and samples (0,1,2)")
    parser.add_argument(
        "--processes", type=_count, default=os.cpu_count() or 1, metavar="N", help="runs at a time (a core each)"
    )
    return parser.parse_args()


def _methods(text: str) -> list[str]:
    if unknown := [method for method in text.split(",") if method not in METHODS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: must be among {', '.join(METHODS)}")
    return list(dict.fromkeys(text.split(",")))


def _integers(text: str) -> list[int]:
    return _listed(text, int, "integers")


def _numbers(text: str) -> list[float]:
    return _listed(text, float, "numbers")


def _listed[Number](text: str, read: Callable[[str], Number], wanted: str) -> list[Number]:
    """Each once, in their order."""
    try:
        return list(dict.fromkeys(read(part) for part in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: must be {wanted} with commas between them") from error


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
