"""Many small runs, each in a process of its own: what is finished is not made again, and what fails hides nothing."""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from moe_rl import config, tracking, yaml_text

COSTS = "costs.json"  # in a run's directory: what its process needed


def as_done[Item, Made](
    make: Callable[[Item], Made], items: Sequence[Item], processes: int, runs_a_worker: int
) -> Iterator[tuple[Item, "Future[Made]"]]:
    """Each item as its process is done with it. runs_a_worker: then a fresh process, since what Megatron keeps of a finished
    run adds up."""
    for chunk in itertools.batched(items, processes * runs_a_worker):
        # spawned, so that no worker inherits a process group
        with ProcessPoolExecutor(min(processes, len(chunk)), multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(make, item): item for item in chunk}
            try:
                for future in as_completed(futures):
                    yield futures[future], future
            finally:
                pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Job:
    """One run. base: the name of the warm start that it begins with; none: it is one."""

    name: str
    settings: config.RunConfig
    base: str | None = None


def train_all(warm: Sequence[Job], jobs: Sequence[Job], processes: int, runs_a_worker: int) -> dict[str, str]:
    """The warm starts, then the jobs of those that are there, with a line as each is done. Returns what failed, by name, and
    why: nothing that fails keeps the others from being trained."""
    began, failed = time.monotonic(), dict[str, str]()
    for job, done in as_done(_trained, warm, processes, runs_a_worker):
        if why := failure(done, job.settings.directory):
            failed[job.name] = why
        print(f"{job.name}: {why or 'is there'}", flush=True)
    startable = [job for job in jobs if job.base not in failed]
    for number, (job, done) in enumerate(as_done(_trained, startable, processes, runs_a_worker), start=1):
        if why := failure(done, job.settings.directory):
            failed[job.name] = why
        result = f"failed: {why}" if why else f"pass@1 {done.result():.3f}"
        print(f"{number}/{len(startable)} {job.name}: {result} ({(time.monotonic() - began) / 60:.1f} min)", flush=True)
    return failed


def _trained(job: Job) -> float:
    return trained(job.settings)


def failure(done: "Future[float]", directory: Path) -> str:
    """Why it failed, in one line; nothing where it did not. The whole goes to output.txt."""
    error = done.exception()
    if error is None:
        return ""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "output.txt").open("a", encoding="utf-8") as file:
        file.writelines(traceback.format_exception(error))
    return f"{type(error).__name__}: {[*str(error).splitlines(), ''][0]}"


def trained(settings: config.RunConfig) -> float:
    """The held-out pass@1 at the end. A run that is not finished begins anew: only its end is saved.

    costs.json gets the CPU seconds of the run.
    """
    if not finished(settings):
        from moe_rl.trainer import train

        settings.directory.mkdir(parents=True, exist_ok=True)
        began = time.process_time()
        with (settings.directory / "output.txt").open("a", encoding="utf-8") as file:
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                train(settings)
        costs = {"cpu_seconds": time.process_time() - began}
        (settings.directory / COSTS).write_text(json.dumps(costs) + "\n", encoding="utf-8")
    return tracking.read_summary(settings.directory)["eval/pass_at_1"]


def finished(settings: config.RunConfig) -> bool:
    """Its end is on record, under the same settings as far as both know them: another version may know more."""
    path = settings.directory / "config.yaml"
    if not path.exists() or tracking.read_summary(settings.directory).get("step") != settings.run.steps:
        return False
    was, now = yaml_text.parse(path.read_text(encoding="utf-8"), str(path)), yaml_text.parse(config.dump(settings), "config")
    return all(
        was[section].get(key, value) == value for section in now if section in was for key, value in now[section].items()
    )


def integers(text: str) -> list[int]:
    """Of a command line: integers with commas between them."""
    return _listed(text, int, "integers")


def numbers(text: str) -> list[float]:
    """The same for numbers."""
    return _listed(text, float, "numbers")


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The same for names among `known`."""

    def read(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}: must be among {', '.join(known)}")
        return list(dict.fromkeys(text.split(",")))

    return read


def count(text: str) -> int:
    """One integer from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be an integer from 1 on")
    return int(text)


def _listed[Number](text: str, read: Callable[[str], Number], wanted: str) -> list[Number]:
    """Each once, in their order."""
    try:
        return list(dict.fromkeys(read(part) for part in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: must be {wanted} with commas between them") from error
