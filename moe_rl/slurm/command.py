"""`moe-rl slurm CONFIG`: checks a run, writes its job script and the settings that it will have, and submits it if asked."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_rl import before_start, config
from moe_rl.config import RunConfig
from moe_rl.slurm import checks
from moe_rl.slurm.config import SlurmSection
from moe_rl.slurm.script import Job, script
from parallel.errors import UsageError

_NUMBER = re.compile(r"job_(\d{3,})(_\d+)?\.(sh|yaml)")
_GPU_CPUS = 8


def slurm(arguments: argparse.Namespace) -> int:
    """Raises UsageError for what the job, too, would find wrong; exit code 0."""
    settings = config.load(arguments.config, arguments.overrides)
    runs = array_runs(settings, arguments.config, arguments.overrides)
    job = make_job(settings, len(runs) if settings.slurm.array.size else 0, [arguments.config, *arguments.overrides])
    if settings.slurm.array.size:
        _check_names(runs)
    for run in runs:
        checks.check(run, job.processes, job.python)
    for run in {run.model_copy(update={"run": settings.run}).model_dump_json(): run for run in runs}.values():
        before_start.check(run, run.slurm.command, run.slurm.nodes * job.processes, launched=False)  # once for all seeds
    if arguments.submit and shutil.which("sbatch") is None:
        raise UsageError("sbatch: is not on the PATH; call moe-rl slurm --submit where jobs are submitted, on a login node")
    for note in dict.fromkeys(note for run in runs for note in checks.notes(run, job.processes)):
        print(f"note: {note}", file=sys.stderr)
    text = script(job)
    if arguments.dry_run:
        print(text, end="")
        return 0
    path = _write(job, text, runs)
    if not arguments.submit:
        print(f"written: {_shown(path)}\nsubmit it: sbatch {_shown(path)}")
        return 0
    print(_next_steps(_submit(path), job, path, runs))
    return 0


def array_runs(settings: RunConfig, path: str, overrides: Sequence[str]) -> list[RunConfig]:
    """What the tasks of the array run, each loaded from the file anew so that presets count; without an array, `settings`."""
    array, name = settings.slurm.array, settings.run.name
    if not array.size:
        return [settings]
    runs = []
    for number, variant in enumerate(array.overrides or [[]]):
        if fixed := next((one for one in variant if one.strip().startswith("slurm.")), None):
            raise UsageError(f"slurm.array.overrides[{number}]: {fixed} cannot differ: the tasks of an array share a script")
        named = f"{name}-v{number}" if array.overrides else name
        for seed in array.seeds or [None]:
            try:
                run = config.load(path, [*overrides, f"run.name={named}", *variant])
                seeded = [f"run.name={run.run.name}-s{seed}", f"run.seed={seed}"] if seed is not None else []
                runs.append(config.load(path, [*overrides, f"run.name={named}", *variant, *seeded]))
            except UsageError as error:
                raise UsageError(f"slurm.array.overrides[{number}]: {error}") from error
    return runs


def make_job(settings: RunConfig, tasks: int, words: Sequence[str]) -> Job:
    """The script's ingredients. tasks: of the array; 0: none."""
    section = settings.slurm
    folder = (section.dir / settings.run.name).absolute()
    numbers = [int(match[1]) for path in folder.glob("job_*") if (match := _NUMBER.fullmatch(path.name))]
    stem = f"job_{max(numbers, default=0) + 1:03d}"
    names = [f"{stem}_{task}.yaml" for task in range(tasks)] or [f"{stem}.yaml"]
    return Job(
        name=settings.run.name,
        words=("moe-rl", "slurm", *words),
        section=section,
        processes=section.per_node(settings.parallel, settings.run.processes),
        cpus=section.cpus_per_process or (_GPU_CPUS if section.gpus_per_node else settings.run.threads),
        threads=settings.run.threads,
        cwd=Path.cwd(),
        path=folder / f"{stem}.sh",
        settings=tuple(folder / name for name in names),
        python=_python(section),
    )


def _python(section: SlurmSection) -> str:
    if section.venv is not None:
        return str(section.venv.absolute() / "bin" / "python")
    return "python" if section.container is not None else sys.executable


def _check_names(runs: Sequence[RunConfig]) -> None:
    seen: set[Path] = set()
    for run in runs:
        if run.directory in seen:
            raise UsageError(f"slurm.array: two of its runs are {run.directory}; give each another run.name, or none")
        seen.add(run.directory)


def _write(job: Job, text: str, runs: Sequence[RunConfig]) -> Path:
    """The settings, then the script, which is the sign that all is there."""
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        for target, run in zip(job.settings, runs, strict=True):
            with target.open("x", encoding="utf-8") as file:
                file.write(config.dump(run))
        job.path.write_text(text, encoding="utf-8")
        job.path.chmod(0o755)
    except FileExistsError as error:
        raise UsageError(
            f"{error.filename}: was made just now, by another moe-rl slurm of this run; call this one again"
        ) from error
    except OSError as error:
        raise UsageError(f"slurm.dir={job.section.dir}: {job.folder} cannot be written: {error.strerror}") from error
    return job.path


def _submit(path: Path) -> str:
    """The job's id. Raises UsageError with what Slurm says."""
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines() if line.strip()]
        raise UsageError(f"sbatch refused {_shown(path)}: {'; '.join(lines) or f'exit code {done.returncode}'}")
    return done.stdout.strip().split(";")[0]


def _next_steps(number: str, job: Job, path: Path, runs: Sequence[RunConfig]) -> str:
    log = f"{number}_0.log" if job.is_array else f"{number}.log"
    # scancel of Slurm 22.05 signals tasks of an array again and again, for a minute
    signal = f"{'timeout 2 ' if job.is_array else ''}scancel --signal=USR1 --batch {number}"
    saves = "it saves, ends, and is queued again" if job.section.requeue else "it saves and ends"
    rows = [
        ("state", f"squeue --job {number}"),
        ("log", f"tail -F {_shown(job.folder / log)}"),
        ("ranks", f"{_shown(job.folder / log.removesuffix('.log'))}/rank_N.log, the main rank's is the log"),
        ("save now", f"{signal}   ({saves})"),
        ("stop", f"scancel {number}"),
        ("look at", f"moe-rl report {' '.join(str(run.directory) for run in runs)}"),
    ]
    head = f"submitted: job {number}, {_shown(path)}"
    return "\n".join([head, *(f"  {name:<9} {how}" for name, how in rows)])


def _shown(path: Path) -> str:
    """Relative to where one is, if it lies below."""
    here = Path(os.getcwd())
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
