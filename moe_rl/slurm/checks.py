"""What can be known to go wrong before a job waits hours for its nodes: errors end here, the rest are notes."""

import importlib.util
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from moe_rl.config import RunConfig
from moe_rl.slurm.config import SlurmSection
from moe_rl.slurm.times import seconds
from moe_rl.tracking import FILES, read_steps
from parallel.errors import UsageError

_RECENT_STEPS = 10
_NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm")
_GIB = 2**30
_OF_SLURM = {  # options that other lines of the script, or what is said of the job, depend on
    "--array": "slurm.array",
    "-a": "slurm.array",
    "--chdir": "the current folder",
    "-D": "the current folder",
    "--no-requeue": "slurm.requeue",
    "--nodes": "slurm.nodes",
    "-N": "slurm.nodes",
    "--ntasks-per-node": "slurm.processes_per_node",
    "--output": "slurm.dir",
    "-o": "slurm.dir",
    "--requeue": "slurm.requeue",
    "--signal": "slurm.signal_seconds",
    "--time": "slurm.time",
    "-t": "slurm.time",
}


def check(settings: RunConfig, processes: int, python: str) -> None:
    """Raises UsageError for what cannot run: layout, time, paths. processes: on each node; python: the job's interpreter."""
    section = settings.slurm
    settings.model.check_layout(settings.parallel)
    _check_world(settings, processes)
    engine = importlib.util.find_spec("transformer_engine") is not None
    settings.parallel.check_backend("nccl" if section.gpus_per_node else "gloo", engine)
    _check_time(section)
    _check_paths(section, python)
    for key, directory in (("run.dir", settings.directory / "checkpoints"), ("slurm.dir", section.dir)):
        check_writable(key, directory)


def notes(settings: RunConfig, processes: int) -> Iterator[str]:
    """What works but may not be meant, one line each."""
    section, parallel = settings.slurm, settings.parallel
    world = section.nodes * processes
    if settings.run.processes not in (None, world):
        yield (
            f"run.processes={settings.run.processes} counts where moe-rl starts the processes itself; here they are "
            f"slurm.nodes={section.nodes} x {processes} = {world}"
        )
    if section.gpus_per_node > processes:
        yield f"slurm.processes_per_node={processes}: leaves {section.gpus_per_node - processes} GPUs of every node idle"
    if processes % parallel.tensor and section.nodes > 1:
        yield (
            f"parallel.tensor={parallel.tensor} with {processes} processes a node: tensor-parallel groups lie across nodes, "
            f"and every layer waits for the network; choose a divisor of {processes}"
        )
    yield from _notes_on_lines(section)
    yield from _notes_on_saving(settings)
    yield from _notes_on_paths(settings)
    if section.gpus_per_node:
        yield from _notes_on_memory(settings, processes)


def check_writable(key: str, directory: Path) -> None:
    """Raises UsageError unless `directory` is there, or can be made, and takes files."""
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"{key}: {directory} cannot be made, {there} is a file; choose another {key}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{key}: {directory} cannot be written, {there} refuses it; choose another {key}")


def _check_world(settings: RunConfig, processes: int) -> None:
    nodes, parallel = settings.slurm.nodes, settings.parallel
    fewest = parallel.fewest_processes
    if nodes * processes % fewest == 0:
        return
    step = fewest // math.gcd(fewest, processes)
    raise UsageError(
        f"slurm.nodes={nodes} x {processes} processes a node = {nodes * processes}: must be a multiple of {fewest}, what "
        f"tensor={parallel.tensor} x pipeline={parallel.pipeline} x context={parallel.context} with expert={parallel.expert} x "
        f"expert_tensor={parallel.expert_tensor} needs; set slurm.nodes={math.ceil(nodes / step) * step}"
    )


def _check_time(section: SlurmSection) -> None:
    limit = seconds(section.time) if section.time is not None else None
    if limit is not None and limit <= section.signal_seconds:
        raise UsageError(
            f"slurm.time={section.time}: is over before slurm.signal_seconds={section.signal_seconds} before its end; "
            "raise slurm.time or lower slurm.signal_seconds"
        )


def _check_paths(section: SlurmSection, python: str) -> None:
    image = section.container
    if image is None and not os.access(python, os.X_OK):
        raise UsageError(f"slurm.venv={section.venv}: there is no {python}; name the directory of a virtual environment")
    if image is not None and (image.startswith(("/", ".")) or image.endswith(".sqsh")) and not Path(image).is_file():
        raise UsageError(f"slurm.container={image}: no such file; make it with enroot import, or name registry#image:tag")
    for mount in section.mounts:
        source, colon, target = mount.partition(":")
        if not (colon and target.startswith("/") and source.startswith("/")):
            raise UsageError(f"slurm.mounts: {mount} must be SOURCE:TARGET, both absolute")
        if not Path(source).exists():
            raise UsageError(f"slurm.mounts: {mount}: there is no {source}")


def _notes_on_lines(section: SlurmSection) -> Iterator[str]:
    for line in section.sbatch:
        option = re.split(r"[=\s]", line.removeprefix("#SBATCH").strip(), maxsplit=1)[0]
        if (key := _OF_SLURM.get(option if option.startswith("--") else option[:2])) is not None:
            yield f"slurm.sbatch: {line} is known to sbatch alone; the checks and the rest of the script go by {key}: set that"


def _notes_on_saving(settings: RunConfig) -> Iterator[str]:
    section, every = settings.slurm, settings.checkpoint.every
    steps = settings.run.steps if section.command == "train" else settings.sft.steps
    signalled = f", or {section.signal_seconds} seconds before the time limit" if section.signal_seconds else ""
    if steps and not every:
        yield (
            f"checkpoint.every=0: the run saves at its end{signalled}; a crash or a lost node costs all its steps, "
            f"{steps} at most; set checkpoint.every"
        )
    if section.time is None:
        yield "slurm.time: not set, so the limit is the partition's own; a shorter one often starts sooner"
        return
    limit, step = seconds(section.time), _seconds_a_step(settings)
    if limit is not None and every and step is not None and every * step > limit - section.signal_seconds:
        yield (
            f"checkpoint.every={every}: at {step:.0f} seconds a step, as {settings.directory} took, the first checkpoint comes "
            f"after {every * step:.0f} of the {limit} seconds of slurm.time={section.time}; lower checkpoint.every"
        )
    if limit is not None and not section.signal_seconds:
        lost = f"up to checkpoint.every={every} steps are" if every else "every step is"
        yield f"slurm.signal_seconds=0: {lost} lost when slurm.time={section.time} is over"


def _seconds_a_step(settings: RunConfig) -> float | None:
    """What the run's last steps took, where there are some."""
    path = settings.directory / FILES[settings.slurm.command]
    lines = read_steps(path)[-_RECENT_STEPS:] if path.exists() else []
    times = [line["time/step_seconds"] for line in lines if line.get("time/step_seconds")]
    return sum(times) / len(times) if times else None


def _notes_on_paths(settings: RunConfig) -> Iterator[str]:
    section = settings.slurm
    paths = {
        "run.dir": settings.run.dir,
        "slurm.dir": section.dir,
        "slurm.venv": section.venv,
        "task.train_path": settings.task.train_path,
        "task.eval_path": settings.task.eval_path,
        "model.path": settings.model.path,
        "checkpoint.load": settings.checkpoint.load,
        "critic.load": settings.critic.load,
    }
    mounted = [Path.cwd(), section.dir.absolute(), *(Path(mount.partition(":")[0]) for mount in section.mounts)]
    for key, path in paths.items():
        if path is None:
            continue
        if section.nodes > 1 and path.absolute().as_posix().startswith(tuple(f"{place}/" for place in _NODE_LOCAL)):
            yield f"{key}={path}: lies on a disk that other nodes do not share, as a rule; every node must see it"
        inside = any(path.absolute().is_relative_to(place) for place in mounted)
        if section.container is not None and key != "slurm.venv" and not inside:
            yield f"{key}={path}: is not mounted in the container; add it to slurm.mounts"


def _notes_on_memory(settings: RunConfig, processes: int) -> Iterator[str]:
    from moe_rl.plan.cluster import Cluster
    from moe_rl.plan.planner import Planner

    section = settings.slurm
    cluster = Cluster(section.nodes, processes)
    plan = Planner(settings, cluster).yours()
    if isinstance(plan, str):
        yield f"memory of a GPU: no estimate, {plan}"
        return
    need, have = plan.memory.total / _GIB, cluster.memory / _GIB
    verdict = "" if plan.fits else ": it does not fit; moe-rl plan shows layouts that do"
    yield f"memory of a GPU: about {need:.0f} of {have:.0f} GiB by the planner's estimate{verdict}"
