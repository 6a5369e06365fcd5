"""Prompts and rewards: what a run trains on."""

from collections.abc import Callable
from typing import Any

from moe_rl.config_errors import near, show
from moe_rl.task_config import TaskSection
from moe_rl.tasks import addition, files, reasoning_gym, reversal, user
from moe_rl.tasks.encoding import Encoder, build_encoder, check_stops
from moe_rl.tasks.prompts import check_prompts, example_that_fits, fitting
from moe_rl.tasks.rewards import RewardError, score_response
from moe_rl.tasks.task import ProblemSet, Score, Task, check_task, fingerprint
from moe_rl.tasks.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer, build_tokenizer, check_vocab
from parallel.errors import UsageError

__all__ = [
    "TASKS",
    "ByteTokenizer",
    "Encoder",
    "HFTokenizer",
    "ProblemSet",
    "RewardError",
    "Score",
    "Task",
    "Tokenizer",
    "build_encoder",
    "build_task",
    "build_tokenizer",
    "check_prompts",
    "check_stops",
    "check_task",
    "check_vocab",
    "example_that_fits",
    "fingerprint",
    "fitting",
    "score_response",
]

TASKS: dict[str, Callable[[TaskSection], Any]] = {
    "addition": addition.build,
    "reversal": reversal.build,
    "file": files.build,
}
_FILE = ("file", "jsonl")  # the second is its name from when it read nothing else, which runs still have


def build_task(section: TaskSection, *, trains: bool = True) -> Task:
    """The task that section.name names, checked by check_task. trains: it must have training problems.

    Raises UsageError naming the key for an unknown name, a bad option or file, a package that is missing, or a task of the
    user's that is none.
    """
    _check_file_keys(section)
    if not trains and section.eval_path is not None:  # then what one would train on is of no account
        section = section.model_copy(update={"train_path": None})
    if trains and section.name in _FILE and section.train_path is None:
        raise UsageError(f"task.train_path: missing; task.name={section.name} reads its problems from it")
    if section.name in TASKS:
        build = TASKS[section.name]
    elif section.name in _FILE:
        build = files.build
    elif section.name.startswith(reasoning_gym.PREFIX):
        build = reasoning_gym.build
    elif ":" in section.name:
        build = user.build
    else:
        names = [*TASKS, f"{reasoning_gym.PREFIX}NAME", "MODULE:FUNCTION"]
        raise UsageError(f"task.name={section.name}: unknown; choose {', '.join(names)}{near(section.name, names)}")
    return check_task(build(section), section.name, trains=trains)


def _check_file_keys(section: TaskSection) -> None:
    for key in ("train_path", "eval_path", "scorer", "prompt_column", "answer_column"):
        value = getattr(section, key)
        if section.name not in _FILE and value != type(section).model_fields[key].default:
            raise UsageError(f"task.{key}={show(str(value))}: only task.name=file reads it; remove it")
