"""Scores that are checked, rewards that break, prompts that fit."""

import math
import re

import pytest

from moe_rl.task_config import TaskSection
from moe_rl.tasks import ByteTokenizer, Encoder, ProblemSet, RewardError, Score, check_prompts, score_response
from moe_rl.types import Problem
from parallel.errors import UsageError

BYTES = Encoder(ByteTokenizer(), TaskSection())
ONE, TWO = Problem("t/0", "1+1=", "2"), Problem("h/0", "2+2=", "4")


def task_returning(result: object) -> ProblemSet:
    return ProblemSet([ONE], [TWO], lambda text, problem: result)  # pyright: ignore[reportReturnType, reportArgumentType]


class Scalar:
    """As a numpy or torch scalar: no subclass of float, but float() reads it."""

    def __float__(self) -> float:
        return 0.25


@pytest.mark.parametrize(
    ("result", "score"),
    [
        (1, Score(1.0)),
        (True, Score(1.0)),
        (0.25, Score(0.25)),
        (Scalar(), Score(0.25)),
        ((0.5, {"format": True, "length": -3}), Score(0.5, {"format": 1.0, "length": -3.0})),
        (Score(0.9, passed=True), Score(0.9, passed=True)),
        (1 + 2e-16, Score(1.0)),
        (-1e-12, Score(0.0)),
    ],
)
def test_what_a_score_function_may_return(result: object, score: Score) -> None:
    assert score_response(task_returning(result), "x", ONE) == score


def test_correct_needs_the_full_value_unless_the_task_says_otherwise() -> None:
    assert [Score(1.0).correct, Score(0.999).correct, Score(0.01).correct] == [True, False, False]
    assert [Score(0.9, passed=True).correct, Score(1.0, passed=False).correct] == [True, False]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (math.nan, "returned nan: must be within [0, 1]"),
        (math.inf, "returned inf"),
        (-0.1, "returned -0.1: must be within [0, 1]"),
        (1.5, "returned 1.5"),
        (Score(2.0), "returned 2.0"),
        (None, "returned None: must be a number"),
        ("1.0", "returned '1.0': must be a number"),
        ((1.0,), "must be a number or (number, parts)"),
        ((1.0, 2.0), "returned parts 2.0: must be a dictionary"),
        ((1.0, {"a": math.nan}), "returned nan for part a: must be finite"),
        ((1.0, {"a": "b"}), "returned 'b' for part a: must be a number"),
    ],
)
def test_what_is_no_reward_stops_or_counts_as_zero(result: object, text: str) -> None:
    task = task_returning(result)
    with pytest.raises(RewardError, match=re.escape(text)):
        score_response(task, "x", ONE)
    zero = score_response(task, "x", ONE, "zero")
    assert (zero.value, zero.failed, zero.correct) == (0.0, True, False)


def test_a_reward_that_raises_names_the_problem_the_response_and_the_exception() -> None:
    def score(text: str, problem: Problem) -> float:
        raise ZeroDivisionError("two\nlines")

    task = ProblemSet([ONE], [TWO], score)
    with pytest.raises(RewardError) as caught:
        score_response(task, "line\n" + 1000 * "long ", ONE)
    shown = str(caught.value)
    assert "the reward of problem t/0 (prompt '1+1=') for the response 'line\\nlong long" in shown
    assert "raised ZeroDivisionError: two lines; mend the score function, or set task.on_reward_error=zero" in shown
    assert "\n" not in shown and len(shown) < 500
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert score_response(task, "x", ONE, "zero") == Score(0.0, passed=False, failed=True)


def test_a_stop_from_the_keyboard_is_no_broken_reward() -> None:
    def score(text: str, problem: Problem) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_response(ProblemSet([ONE], [TWO], score), "x", ONE, "zero")


# Prompts


def test_the_longest_prompt_may_just_fit() -> None:
    task = ProblemSet([ONE, Problem("t/1", "ä" * 5, "")], [TWO], lambda text, problem: 1.0)
    assert check_prompts(task, BYTES, max_positions=16, max_response_tokens=6) == 10  # two bytes an ä
    with pytest.raises(UsageError) as caught:
        check_prompts(task, BYTES, max_positions=15, max_response_tokens=6)
    assert str(caught.value) == (
        "problem t/1: its prompt of 10 tokens and rollout.max_response_tokens=6 exceed model.max_positions=15; "
        "raise model.max_positions to 16, lower rollout.max_response_tokens, or leave long prompts out"
    )


def test_a_held_out_prompt_that_does_not_fit_is_found_too() -> None:
    task = ProblemSet([ONE], [Problem("h/7", "x" * 20, "")], lambda text, problem: 1.0)
    with pytest.raises(UsageError, match="problem h/7"):
        check_prompts(task, BYTES, max_positions=20, max_response_tokens=1)


def test_no_prompts_and_a_prompt_without_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match="no heldout prompts"):
        check_prompts(ProblemSet([ONE], [], lambda text, problem: 1.0), BYTES, 64, 8)
    with pytest.raises(UsageError, match="problem t/9: its prompt '' has no tokens"):
        check_prompts(ProblemSet([Problem("t/9", "", "1")], [TWO], lambda text, problem: 1.0), BYTES, 64, 8)
