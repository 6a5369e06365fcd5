"""addition and reversal: exact splits of a countable space."""

import re
from typing import Any

import pytest

from moe_rl.task_config import TaskSection
from moe_rl.tasks import Score, Task, build_task, score_response
from moe_rl.tasks.generator import Space, draw_problems, score_characters
from moe_rl.types import Problem
from parallel.errors import UsageError


def section(**keys: Any) -> TaskSection:
    return TaskSection.model_validate(keys)


def build(name: str, sizes: tuple[int, int] = (4096, 256), seed: int = 0, **options: Any) -> Task:
    return build_task(section(name=name, options=options, train_size=sizes[0], eval_size=sizes[1], seed=seed))


def prompts(task: Task) -> tuple[list[str], list[str]]:
    return [p.prompt for p in task.train], [p.prompt for p in task.heldout]


def test_one_digit_sums_are_split_into_ninety_and_ten_without_loss() -> None:
    train, heldout = prompts(build("addition", digits=1))
    assert (len(train), len(heldout)) == (90, 10)
    assert {*train, *heldout} == {f"{a}+{b}=" for a in range(10) for b in range(10)}


def test_two_digit_sums_have_the_right_answers_and_the_sizes_asked_for() -> None:
    task = build("addition")
    assert (len(task.train), len(task.heldout)) == (4096, 256)
    assert len({p.prompt for p in (*task.train, *task.heldout)}) == 4096 + 256
    for problem in (*task.train, *task.heldout):
        left, right = problem.prompt.removesuffix("=").split("+")
        assert 0 <= int(left) < 100 and 0 <= int(right) < 100
        assert problem.answer == str(int(left) + int(right))


def test_all_operations_appear_and_are_right() -> None:
    task = build("addition", sizes=(600, 20), digits=1, operations="+-*")
    assert (len(task.train), len(task.heldout)) == (280, 20)  # of 300
    by_prompt = {p.prompt: p.answer for p in (*task.train, *task.heldout)}
    assert (by_prompt["7+8="], by_prompt["7-8="], by_prompt["7*8="]) == ("15", "-1", "56")


def test_the_split_follows_from_the_seed_and_held_out_does_not_move_with_the_training_size() -> None:
    assert prompts(build("addition", seed=3)) == prompts(build("addition", seed=3))
    assert set(prompts(build("addition", seed=3))[1]) != set(prompts(build("addition", seed=4))[1])
    for sizes in ((10, 256), (9000, 256), (100_000, 256)):
        assert prompts(build("addition", sizes=sizes, seed=3))[1] == prompts(build("addition", seed=3))[1]
    assert len(build("addition", sizes=(100_000, 256)).train) == 10_000 - 256


def test_a_space_too_large_to_list_is_drawn_from() -> None:
    task = build("addition", sizes=(50, 5), digits=18)
    assert (len(task.train), len(task.heldout)) == (50, 5)
    assert max(len(p.prompt) for p in task.train) == 38  # both operands full: a 1 - 0.81 chance each to miss


def test_a_sum_is_right_or_wrong() -> None:
    task, problem = build("addition"), Problem("t", "37+48=", "85")
    scores = {text: score_response(task, text, problem) for text in ("85", " 85\n", "085", "85.", "58", "", "8", "85 85")}
    assert {text for text, score in scores.items() if score == Score(1.0)} == {"85", " 85\n"}
    assert {score.value for score in scores.values()} == {0.0, 1.0}


def test_partial_credit_is_half_the_share_of_right_characters() -> None:
    score, problem = score_characters(partial_credit=True), Problem("t", "66+59=", "125")
    assert score("125", problem) == (1.0, {"exact": 1.0, "characters": 1.0})
    assert score("135", problem) == (pytest.approx(1 / 3), {"exact": 0.0, "characters": pytest.approx(2 / 3)})
    assert score("1255", problem) == (0.375, {"exact": 0.0, "characters": 0.75})  # a longer text earns no more
    assert score("", problem) == (0.0, {"exact": 0.0, "characters": 0.0})
    shaped = build("addition", partial_credit=True)
    assert score_response(shaped, "135", problem).value == pytest.approx(1 / 3)


def test_reversal_shares_the_split_and_has_the_right_answers() -> None:
    task = build("reversal", alphabet="abc", min_letters=1, max_letters=3)
    words = {p.prompt.removeprefix("reverse ").removesuffix("="): p.answer for p in (*task.train, *task.heldout)}
    letters = ["", "a", "b", "c"]
    assert set(words) == {x + y + z for x in letters[1:] for y in letters for z in (letters if y else [""])}  # 3 + 9 + 27
    assert (len(task.train), len(task.heldout)) == (36, 3)
    assert all(answer == word[::-1] for word, answer in words.items())
    assert words["abc"] == "cba"


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        (
            "addition",
            {"digit": 2},
            "unknown key task.options.digit; the options are digits, operations, partial_credit; did you mean digits?",
        ),
        ("addition", {"digits": 0}, "task.options.digits=0: must be greater than or equal to 1"),
        ("addition", {"digits": 19}, "task.options.digits=19: must be less than or equal to 18"),
        ("addition", {"digits": "2"}, "task.options.digits=2: must be a valid integer"),
        ("addition", {"digits": 2.0}, "task.options.digits=2.0: must be a valid integer"),
        ("addition", {"digits": True}, "task.options.digits=true: must be a valid integer"),
        ("addition", {"operations": "/"}, "task.options.operations=/: must be one or more of + - *"),
        ("addition", {"operations": "++"}, "task.options.operations=++"),
        ("addition", {"operations": ""}, "task.options.operations=''"),
        ("addition", {"partial_credit": 1}, "task.options.partial_credit=1: must be a valid boolean"),
        ("reversal", {"alphabet": "aa"}, "task.options.alphabet=aa: must be one or more different characters"),
        (
            "reversal",
            {"min_letters": 5, "max_letters": 3},
            "task.options.min_letters=5: must be at most task.options.max_letters=3",
        ),
        ("reversal", {"alphabet": "a", "min_letters": 3, "max_letters": 3}, "reversal has 1 problem with them; needs 2"),
    ],
)
def test_bad_options_are_named_with_value_and_constraint(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)) as caught:
        build(name, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("size", "train_size"), [(2, 1), (2, 5), (3, 2), (50, 8), (50, 45), (50, 49)])
def test_small_spaces_are_split_without_overlap(size: int, train_size: int) -> None:
    task = draw_problems(
        Space(size, lambda n: (str(n), str(n))), section(train_size=train_size, eval_size=4), lambda text, problem: 1.0
    )
    train, heldout = prompts(task)
    assert len(heldout) == max(1, min(4, size // 10))
    assert len(train) == min(train_size, size - len(heldout))
    assert len({*train, *heldout}) == len(train) + len(heldout)
