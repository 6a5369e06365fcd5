"""A score function's result, checked; and what follows when the function breaks."""

import math
from collections.abc import Mapping
from typing import Literal

from moe_rl.tasks.task import Score, Task
from moe_rl.types import Problem
from parallel.errors import UsageError

_ROUNDING = 1e-9  # a sum of shares may end this far outside of [0, 1]
_SHOWN = 120


class RewardError(UsageError):
    """A score function raised, or returned something that is no reward."""


class _NoReward(ValueError):
    """The result of a score function is not a reward; the text says why."""


def score_response(task: Task, text: str, problem: Problem, on_error: Literal["stop", "zero"] = "stop") -> Score:
    """Scores `text`, the response to `problem`.

    A score function that raises, or returns NaN, an infinity, a value outside of [0, 1] or no number, raises RewardError
    with on_error "stop"; with "zero" the response counts as 0 and has `failed` set.
    """
    try:
        return as_score(task.score(text, problem))
    except Exception as error:  # the score function is the user's code: it may raise anything, and the user chose what follows
        if on_error == "zero":
            return Score(0.0, passed=False, failed=True)
        what = str(error) if isinstance(error, _NoReward) else f"raised {type(error).__name__}: {_short(str(error))}"
        raise RewardError(
            f"the reward of problem {problem.id} (prompt {_short(repr(problem.prompt))}) for the response "
            f"{_short(repr(text))} {what}; mend the score function, or set task.on_reward_error=zero to count those as 0"
        ) from error


def as_score(result: object) -> Score:
    """A Score from what a score function returned: a Score, a number, or (number, parts).

    Booleans and 0-dimensional arrays count as numbers. Raises ValueError where the value is not within [0, 1] or a part
    is not finite, TypeError where float() cannot read one.
    """
    if isinstance(result, Score):
        return Score(_reward(result.value), _parts(result.parts), result.passed, result.failed)
    if isinstance(result, tuple):
        if len(result) != 2:
            raise _NoReward(f"returned {_short(repr(result))}: must be a number or (number, parts)")
        return Score(_reward(result[0]), _parts(result[1]))
    return Score(_reward(result))


def _reward(value: object) -> float:
    number = _number(value, "")
    if not -_ROUNDING <= number <= 1 + _ROUNDING:  # NaN too
        raise _NoReward(f"returned {number}: must be within [0, 1]")
    return min(max(number, 0.0), 1.0)


def _parts(parts: object) -> dict[str, float]:
    if not isinstance(parts, Mapping):
        raise _NoReward(f"returned parts {_short(repr(parts))}: must be a dictionary of names and numbers")
    checked = {str(name): _number(value, f" for part {name}") for name, value in parts.items()}
    for name, value in checked.items():
        if not math.isfinite(value):
            raise _NoReward(f"returned {value} for part {name}: must be finite")
    return checked


def _number(value: object, of: str) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise _NoReward(f"returned {_short(repr(value))}{of}: must be a number")
    return float(value)  # pyright: ignore[reportArgumentType]  (has __float__)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."
