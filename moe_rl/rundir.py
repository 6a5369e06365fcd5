"""Whose directory a run may take: its own, to go on in; another run's is moved aside first, never written over."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moe_rl import checkpoint_paths, weights, yaml_text
from moe_rl.config import RunConfig, dump
from moe_rl.drift import traces
from moe_rl.tracking import FILES, SUMMARY, Phase, read_steps
from moe_rl.types import Rollout
from parallel.errors import UsageError

_ROLLOUTS = "rollouts"
_KEPT = {"every", "keep", "keep_every", "asynchronous"}
# What may differ between the parts of one run: where and how it is computed, how long, how often it is looked at.
# None: the whole section.
_FREE: dict[str, set[str] | None] = {
    "run": {"dir", "steps", "processes", "threads"},
    "parallel": None,
    "checkpoint": _KEPT,
    "eval": None,
    "tracking": None,
    "slurm": None,
    "rollout": {"max_batch"},
    "algorithm": {"microbatch_tokens", "reference_on_cpu"},
    "model": {"recompute", "logprob_chunk"},
    "drift": {"watch"},  # so that a run which an alarm has stopped can go on under milder rules
}
_FREE_IN_SFT: dict[str, set[str] | None] = {"sft": {"steps"}}
# Of those, what even a finished run may be called with again, only to show what it found
_IRRELEVANT: dict[str, set[str] | None] = {"run": {"dir"}, "checkpoint": _KEPT, "tracking": None, "slurm": None}


def make_room(config: RunConfig, phase: Phase | None) -> str | None:
    """Call on the main rank before anything is written. Moves an earlier run of that name aside unless this one goes on in it.

    phase: what this run does; none: it cannot go on. A run goes on where it did the same under the same settings, but for those
    that change no result (and the number of steps). Returns a line to show, if something was moved. Raises UsageError where the
    directory cannot be read, and before it moves it where this run could not begin, or would begin from what is in it.
    """
    directory = config.directory
    if not checkpoint_paths.numbered(directory / "checkpoints") and not _in_warm_start(directory):
        return None
    if goes_on(config, phase):
        return None
    _check_start(config)
    aside = next(p for n in range(1, 10**6) if not (p := directory.with_name(f"{directory.name}.{n}")).exists())
    directory.rename(aside)
    return f"note: {directory} held another run; it is now {aside}"


def goes_on(config: RunConfig, phase: Phase | None) -> bool:
    """Whether a run with these settings goes on with what is in its directory, where checkpoints of some run are."""
    directory = config.directory
    found = checkpoint_paths.numbered(directory / "checkpoints")
    was, now = _settings(directory), yaml_text.parse(dump(config), "config")
    finished = bool(found) and found[-1][0] >= (config.sft.steps if phase == "sft" else config.run.steps)
    free = _IRRELEVANT if finished else _FREE | (_FREE_IN_SFT if phase == "sft" else {})
    return phase == _phase(directory, found[-1][0] if found else 0) and _without(was, free) == _without(now, free)


def _check_start(config: RunConfig) -> None:
    """What the run that is there has hidden: it would have gone on without."""
    named = {
        "checkpoint.load": config.checkpoint.load,
        "critic.load": config.critic.load,
        "model.path": config.model.path,
        "model.tokenizer": Path(config.model.tokenizer) if config.model.tokenizer else None,
        "task.train_path": config.task.train_path,
        "task.eval_path": config.task.eval_path,
    }
    for key, path in named.items():
        if path is not None and path.resolve().is_relative_to(config.directory.resolve()):
            raise UsageError(
                f"{key}={path}: lies in {config.directory}, which holds a run with other settings and would be moved aside; "
                "choose another run.name"
            )
    if config.critic.load is not None and config.algorithm.trains_critic:
        checkpoint_paths.find_critic(config.critic.load, "critic.load")
    weights.check(weights.initial(config), config.model, reads=False)


def _settings(directory: Path) -> Any:
    path = directory / "config.yaml"
    try:
        found = yaml_text.parse(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: cannot be read: {error}; {directory} holds checkpoints: choose another run.name") from error
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}; {directory} holds checkpoints but no settings: choose another run.name"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(section, dict) for section in found.values()):
        raise UsageError(f"{path}: holds no settings of a run; {directory} holds checkpoints: choose another run.name")
    try:  # with the keys that have come since, as they default
        return yaml_text.parse(dump(RunConfig.model_validate(found)), str(path))
    except ValidationError:  # it has keys that are no more
        return found


def _phase(directory: Path, step: int) -> Phase:
    """What the run did that left its checkpoints here, the newest after `step`: before its first, RL writes the evaluation of
    step 0; those of a warm start lie apart."""
    found = [phase for phase, name in FILES.items() if (directory / name).exists()]
    if step and not found:
        raise UsageError(
            f"{directory}: holds checkpoints, and neither {' nor '.join(FILES.values())}: put back what was there, or choose "
            "another run.name"
        )
    return "train" if "train" in found or _in_warm_start(directory) else "sft"


def _in_warm_start(directory: Path) -> bool:
    """Whether a run of RL has left checkpoints of its warm start here."""
    return bool(checkpoint_paths.numbered(directory / "checkpoints" / checkpoint_paths.WARM_START))


def _without(settings: dict[str, Any], free: dict[str, set[str] | None]) -> dict[str, Any]:
    """`settings` without what may differ."""
    return {
        section: {key: value for key, value in keys.items() if key not in (free.get(section) or ())}
        for section, keys in settings.items()
        if not (section in free and free[section] is None)
    }


def sort_out(directory: Path, after: int | None) -> None:
    """On the main rank, before the first step: leaves only traces, rollouts and a summary of this run, as metrics.jsonl has
    only its lines.

    after: the step that the run goes on after; later ones are made again, and removed until then. None: a run that begins.
    What an earlier one has left whose checkpoints are not there goes to traces.previous and so on.
    """
    for name in (traces.FOLDER, _ROLLOUTS):
        folder = directory / name
        if after is None and folder.exists():
            shutil.rmtree(previous := directory / f"{name}.previous", ignore_errors=True)
            folder.rename(previous)
        for path in folder.glob("step_*"):
            step = path.stem.removeprefix("step_")
            if after is not None and step.isdecimal() and int(step) > after:
                path.unlink()
    if after is None and (found := directory / SUMMARY).exists():
        found.replace(found.with_name(f"{found.stem}.previous{found.suffix}"))


def write_summary(directory: Path, after: dict[str, float]) -> None:
    """The evaluation after the last step. Not in metrics.jsonl, where a run continued later would differ by it."""
    part = directory / f".{SUMMARY}.part"
    part.write_text(json.dumps(after, indent=2) + "\n", encoding="utf-8")
    part.replace(directory / SUMMARY)


def write_rollouts(directory: Path, step: int, rollouts: Sequence[Rollout]) -> None:
    """rollouts/step_NNNNNN.jsonl: what was asked, answered and rewarded, one response a line."""
    path = directory / _ROLLOUTS / f"step_{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = [
        {
            "index": r.index,
            "problem": r.problem.id,
            "prompt": r.problem.prompt,
            "answer": r.problem.answer,
            "response": r.text,
            "reward": r.reward,
            "parts": r.parts,
            "finish_reason": r.response.finish_reason,
            "tokens": len(r.response.token_ids),
        }
        for r in rollouts
    ]
    part = path.with_name(f".{path.name}.part")
    part.write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8", errors="backslashreplace"
    )
    part.replace(path)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The steps of a run."""
    return read_steps(directory / FILES["train"])
