"""How a response is compared with an answer: task.scorer."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from moe_rl.config_errors import near
from moe_rl.tasks.importing import import_function
from moe_rl.tasks.numeric import after_mark, answered_number, equal
from moe_rl.tasks.task import Scored
from moe_rl.tasks.untrusted import time_limit
from parallel.errors import UsageError


def _accept(answer: str) -> None:
    """Every answer is fine."""


@dataclass(frozen=True)
class Scorer:
    """score: (response, answer) to a score. refuse: what is wrong with an answer of the data, None if nothing is."""

    score: Callable[[str, str], Scored]
    refuse: Callable[[str], str | None] = _accept


def build_scorer(name: str) -> Scorer:
    """exact, numeric, math_verify or MODULE:FUNCTION. Raises UsageError naming task.scorer where there is none such."""
    if name in SCORERS:
        return SCORERS[name]()
    if ":" in name:
        return Scorer(import_function("task.scorer", name))
    raise UsageError(f"task.scorer={name}: unknown; choose {', '.join(SCORERS)} or MODULE:FUNCTION{near(name, SCORERS)}")


def exact(response: str, answer: str) -> float:
    """1 if the texts are equal but for white space around them, else 0."""
    return float(response.strip() == answer.strip())


def numeric(response: str, answer: str) -> float:
    """1 if the number that the response ends in equals the one that the answer ends in (numeric.py says how), else 0.

    So an answer may be worked out before its number. On either side a line `#### 72`, as in GSM8K, is the answer whatever
    follows it.
    """
    ours, theirs = answered_number(response), answered_number(answer)
    return float(ours is not None and theirs is not None and equal(ours, theirs))


def _build_exact() -> Scorer:
    return Scorer(exact, lambda answer: None if answer.strip() else "must not be blank")


def _build_numeric() -> Scorer:
    return Scorer(numeric, lambda answer: None if answered_number(answer) else "must contain a number for task.scorer=numeric")


def _build_math_verify() -> Scorer:
    """1 if math-verify finds the response equal to the answer, one expression with or without $...$, alone or behind `####`.

    A comparison that takes over 5 seconds counts as unequal, where time_limit works.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise UsageError("task.scorer=math_verify: needs the package math-verify; pip install 'moe-rl[tasks]'") from error
    # it warns that its own time-outs are off. They must be: they raise in threads, and time_limit stands in for them
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    @lru_cache(maxsize=4096)
    def parse_answer(answer: str) -> list[Any]:
        answer = after_mark(answer)
        marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"  # unmarked, 2x+3 reads as its last number
        return parse(marked, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    def score(response: str, answer: str) -> float:
        try:
            with time_limit():
                found = parse(response, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
                return float(verify(parse_answer(answer), found, timeout_seconds=None))
        except TimeoutError:
            return 0.0

    return Scorer(score, lambda answer: None if parse_answer(answer) else "must be an expression for task.scorer=math_verify")


SCORERS: dict[str, Callable[[], Scorer]] = {
    "exact": _build_exact,
    "numeric": _build_numeric,
    "math_verify": _build_math_verify,
}
