"""Tasks made of a countable space of problems: what addition and reversal share."""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from moe_rl.task_config import TaskSection
from moe_rl.tasks.scorers import exact
from moe_rl.tasks.task import ProblemSet, Scored, ScoreFunction
from moe_rl.types import Problem
from parallel.errors import UsageError

_HELDOUT_SHARE = 10  # one problem in so many, at most task.eval_size


@dataclass(frozen=True)
class Space:
    """`size` problems with different prompts; `problem` gives (prompt, answer) of a number in [0, size)."""

    size: int
    problem: Callable[[int], tuple[str, str]]


def draw_problems(space: Space, section: TaskSection, score: ScoreFunction) -> ProblemSet:
    """Problems drawn evenly from `space` without repetition; only section.seed and the sizes decide which.

    A tenth of the space, at most section.eval_size and at least one, is held out; it stays the same when
    section.train_size changes. At most section.train_size of the rest are for training. Raises UsageError where the
    space has fewer than two problems.
    """
    if space.size < 2:
        raise UsageError(f"task.options: {section.name} has {space.size} problem with them; needs 2, one of them to hold out")
    held = min(section.eval_size, max(1, space.size // _HELDOUT_SHARE))
    heldout = _draw(random.Random(f"heldout {section.seed}"), space.size, held, taken=())
    train = _draw(random.Random(f"train {section.seed}"), space.size, section.train_size, taken=set(heldout))
    return ProblemSet(_make(space, train, "train"), _make(space, heldout, "heldout"), score)


def score_characters(partial_credit: bool) -> ScoreFunction:
    """1 for the exact answer (white space around it does not count), else 0.

    With partial credit a wrong response earns half the share of places, counted from the left, with the right character.
    """

    def score(response: str, problem: Problem) -> Scored:
        right = exact(response, problem.answer)
        if not partial_credit:
            return right
        text = response.strip()
        hits = sum(ours == theirs for ours, theirs in zip(text, problem.answer, strict=False))
        characters = hits / max(len(text), len(problem.answer))
        return (right or characters / 2), {"exact": right, "characters": characters}

    return score


def _draw(rng: random.Random, size: int, count: int, taken: Collection[int]) -> list[int]:
    """Up to `count` different numbers below `size` that are not in `taken`, in random order."""
    if size <= 2 * (count + len(taken)):  # so dense that drawing again and again would be slow
        rest = [number for number in range(size) if number not in taken]
        rng.shuffle(rest)
        return rest[:count]
    drawn: dict[int, None] = {}
    while len(drawn) < count:
        number = rng.randrange(size)
        if number not in taken:
            drawn[number] = None
    return list(drawn)


def _make(space: Space, numbers: list[int], split: str) -> list[Problem]:
    return [Problem(f"{split}/{i}", *space.problem(number)) for i, number in enumerate(numbers)]
