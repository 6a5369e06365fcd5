"""What a task is: problems to train on, problems held out, and a score for a response."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moe_rl.config_errors import show
from moe_rl.types import Problem
from parallel.errors import UsageError


@dataclass(frozen=True)
class Score:
    """How good a response is.

    value: in [0, 1], the reward. parts: named shares of it, for the metrics only. passed: whether pass@1 counts the
    response; none: a value of 1. failed: the reward broke on this response and counts as 0.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    passed: bool | None = None
    failed: bool = False

    @property
    def correct(self) -> bool:
        return self.value >= 1 if self.passed is None else self.passed


Scored = Score | float | tuple[float, Mapping[str, float]]  # what a score function may return
ScoreFunction = Callable[[str, Problem], Scored]


class Task(Protocol):
    """Prompts and their reward. No prompt is in both `train` and `heldout`, and every process must build equal ones."""

    @property
    def train(self) -> Sequence[Problem]: ...

    @property
    def heldout(self) -> Sequence[Problem]: ...

    def score(self, response_text: str, problem: Problem) -> Scored:
        """Rewards the text that the model wrote after `problem.prompt`, without the prompt and special tokens."""
        ...


@dataclass(frozen=True)
class ProblemSet:
    """A Task from its three parts: ProblemSet(train, heldout, score_function)."""

    train: Sequence[Problem]
    heldout: Sequence[Problem]
    score_function: ScoreFunction

    def score(self, response_text: str, problem: Problem) -> Scored:
        return self.score_function(response_text, problem)


def check_task(task: object, name: str, *, trains: bool = True) -> Task:
    """`task` itself, typed. Raises UsageError naming task.name=`name` unless it has everything a Task has, each split has
    problems (`train` only where it `trains`), and no prompt is in both splits (white space around a prompt does not count)."""
    where = f"task.name={name}"
    train, heldout = (_problems(task, split, where, needed=needed) for split, needed in (("train", trains), ("heldout", True)))
    if not callable(getattr(task, "score", None)):
        raise UsageError(f"{where}: the task ({type(task).__name__}) must have a method score(response_text, problem)")
    seen = {prompt_key(problem.prompt): problem for problem in train}
    for problem in heldout:
        if twin := seen.get(prompt_key(problem.prompt)):
            raise UsageError(
                f"{where}: prompt {show(repr(problem.prompt))} is in train ({twin.id}) and in heldout ({problem.id}); "
                "remove it from one, or deduplicate the two where they are generated"
            )
    return task  # pyright: ignore[reportReturnType]  (just checked)


def prompt_key(prompt: str) -> str:
    """What makes two prompts the same: the text without the white space around it."""
    return prompt.strip()


def fingerprint(task: Task) -> str:
    """Hexadecimal digest of every problem of both splits in order: equal in two processes only if their tasks are."""
    digest = hashlib.sha256()
    for problem in (*task.train, *task.heldout):
        parts = (problem.id, problem.prompt, problem.answer, problem.messages, problem.reply)
        digest.update(repr(parts).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _problems(task: object, split: str, where: str, *, needed: bool) -> Sequence[Problem]:
    problems = getattr(task, split, None)
    if not isinstance(problems, Sequence) or isinstance(problems, str):
        raise UsageError(
            f"{where}: the task ({type(task).__name__}) must have {split}, a sequence of Problem, not {type(problems).__name__}"
        )
    if needed and not problems:
        raise UsageError(f"{where}: {split} has no problems; it needs at least one")
    for number, problem in enumerate(problems):
        for name in ("id", "prompt", "answer"):
            if not isinstance(getattr(problem, name, None), str):
                raise UsageError(f"{where}: {split}[{number}] must be a Problem with a text {name}, not {show(problem)}")
    return problems
