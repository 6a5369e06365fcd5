"""Where checkpoints lie in a run. No torch: settings that name one are looked at before anything starts."""

import json
import os
import re
from pathlib import Path

from models.convert import manifest
from parallel.config import ParallelConfig
from parallel.errors import UsageError

CRITIC = "critic"  # the directory of a critic's checkpoint in that of its policy
WARM_START = "warm_start"  # the directory of a warm start's own checkpoints in a run's checkpoints/, until its step 0 is saved
_NAME = re.compile(r"step_(\d{6,})(?:_(\d+))?")


def name(step: int, updates: int | None = None) -> str:
    """Of the checkpoint after `step`, or, where the next had begun, after so many of its updates."""
    return f"step_{step:06d}" + (f"_{updates}" if updates is not None else "")


def numbered(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of what has a checkpoint's name in a run's checkpoints/ directory, complete or not, in the order in which
    they were made. Raises UsageError where it is there and cannot be read: a run must not begin anew in their midst."""
    try:
        names = os.listdir(directory)
        paths = [(m, directory / name) for name in names if (m := _NAME.fullmatch(name))]
        found = [(m, p) for m, p in paths if p.is_dir() or p.is_symlink()]  # a link to what is not there is an incomplete one
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not directory.is_symlink():
            return []
        raise UsageError(f"{directory}: cannot be read: {error.strerror}; mend it, or choose another run.name") from error
    return [(int(m[1]), p) for m, p in sorted(found, key=lambda pair: (int(pair[0][1]), int(pair[0][2] or -1)))]


def is_within_step(path: Path) -> bool:
    """Whether a checkpoint's name says that it was saved after some of a step's updates: it serves to go on from there."""
    return (match := _NAME.fullmatch(path.name)) is not None and match[2] is not None


def begun_layout(path: Path) -> Path:
    """Of a checkpoint that was saved within a step: the layout in which that goes on. What each rank needs lies beside it."""
    return path / "begun" / "layout.json"


def check_layout(path: Path, parallel: ParallelConfig, processes: int) -> None:
    """Raises UsageError where the checkpoint was saved within a step, and in another layout or number of processes."""
    if not is_within_step(path):
        return
    try:
        found = json.loads(begun_layout(path).read_text(encoding="utf-8"))
        was, ranks = dict(found["parallel"]), found["processes"]
    except (OSError, ValueError, TypeError, KeyError):
        return  # damaged, as the one who reads it all will find
    now, keys = parallel.model_dump(), was.keys() - {"dispatcher", "timeout_seconds"}
    changed = [f"parallel.{key}={was[key]}" for key in sorted(keys) if was[key] != now.get(key)]
    if ranks != processes:
        changed.append(f"run.processes={ranks}")
    if changed:
        raise UsageError(
            f"{path}: was saved within a step, which goes on only in the layout that began it: {' '.join(changed)}; use that "
            "until the next checkpoint, or remove this directory to go on from the one before"
        )


def is_complete(path: Path) -> bool:
    """Whether every file that a checkpoint consists of is there and has its size; what is in them is not looked at."""
    try:
        return is_checkpoint(path) and not manifest.wrong_size(path, manifest.read(path))
    except UsageError:
        return False


def newest(directory: Path) -> Path | None:
    """The newest complete checkpoint in a run's checkpoints/ directory."""
    return next((path for _, path in reversed(numbered(directory)) if is_complete(path)), None)


def is_checkpoint(path: Path) -> bool:
    """Whether this directory is a checkpoint itself. Raises UsageError where it may not be looked into."""
    try:
        return (path / "metadata.json").exists()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; mend it, or name another") from error


def find(path: Path, key: str = "checkpoint.load") -> Path:
    """What the setting `key` names: a checkpoint, a run's checkpoints/, or a run. Raises UsageError where there is none."""
    if is_checkpoint(path):
        if path.name == CRITIC and is_checkpoint(path.parent):
            raise UsageError(f"{key}={path}: is the critic in a checkpoint, no checkpoint; name {path.parent}")
        return path
    for directory in (path, path / "checkpoints"):
        if directory.is_dir() and (found := newest(directory)):
            return found
    if (path / "config.json").exists():
        raise UsageError(f"{key}={path}: is a Hugging Face directory; name it as model.path, or moe-rl import it first")
    raise UsageError(f"{key}={path}: holds no complete checkpoint; name a run, its checkpoints/, or a step_NNNNNN in it")


def find_critic(path: Path, key: str) -> Path:
    """The same for the policy's checkpoint with a critic in it."""
    found = find(path, key)
    if not (found / CRITIC).is_dir():
        raise UsageError(f"{key}={path}: holds no critic; name a checkpoint of a run that trains one")
    return found
