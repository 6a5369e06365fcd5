"""exact, numeric, math_verify and the user's scorers."""

import re
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest

from moe_rl.tasks.numeric import last_number
from moe_rl.tasks.scorers import build_scorer, exact, numeric
from moe_rl.tasks.untrusted import is_plain_formula, is_plain_literal, time_limit
from parallel.errors import UsageError


def test_exact_ignores_white_space_around_the_text_only() -> None:
    assert exact(" a b\n", "a b") == 1.0
    assert exact("a  b", "a b") == exact("A b", "a b") == exact("", "a b") == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("The answer is 42.", 42),
        ("first 7, then 8", 8),
        ("so x=-5", -5),
        ("\N{MINUS SIGN}5", -5),
        ("+5", 5),
        ("7-3", 3),  # a difference, not a sign
        ("(1+2)-3", 3),
        ("10-12", 12),
        ("1,234,567.5", Fraction("1234567.5")),
        ("1,2", 2),
        ("1,2345", 2345),
        (".5", Fraction(1, 2)),
        ("0.50", Fraction(1, 2)),
        ("3.14.15", Fraction("3.14")),
        ("...42", 42),
        ("3/4", Fraction(3, 4)),
        ("It is 3/4.", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("1 3/4", Fraction(7, 4)),
        ("-1 3/4", Fraction(-7, 4)),
        ("1,000/8", 125),
        ("12/05/2024", 2024),
        ("1.5e3", 1500),
        ("2E-2", Fraction(1, 50)),
        ("1e99999", 1),
        ("$1,200", 1200),
        ("-$3", -3),
        ("85kg", 85),
        ("答案是85。", 85),
        ("#### 72", 72),
        ("007", 7),
    ],
)
def test_the_last_number_of_a_text(text: str, value: Fraction | int) -> None:
    found = last_number(text)
    assert found is not None
    assert (found.value, found.percent) == (value, False)


@pytest.mark.parametrize("text", ["", "none", "x2", "H2O", "٤٢", "3/0", "1 2/0", "9" * 500, "-", "."])
def test_texts_without_a_number(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(
    "text", ["9" * 100_000, "1 " * 50_000, "1,111" * 20_000, "1/" * 50_000, "1" + " " * 100_000, "-" * 100_000]
)
def test_long_noise_is_read_in_linear_time(text: str) -> None:
    started = time.monotonic()
    last_number(text)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("... so 72", "48/2=24 and 48+24=72\n#### 72", True),
        ("72.0", "72", True),
        ("1,000", "1000", True),
        ("72 or 73", "72", False),
        ("no idea", "72", False),
        ("123456789", "123456788", False),  # whole numbers exactly
        ("0.333333", "1/3", True),  # 1e-6 of a third away, which just counts
        ("0.33333", "1/3", False),
        ("0.75", "3/4", True),
        ("0.1", "0.1000002", False),
        ("0.1", "0.10000001", True),
        ("50%", "50%", True),
        ("50%", "50", True),
        ("50", "50%", True),
        ("0.5", "50%", True),
        ("1/2", "50 %", True),
        ("50\\%", "0.5", True),
        ("0.5%", "50%", False),
        ("0.5", "50", False),
        ("0", "0", True),
        ("0.0000001", "0", False),  # nothing but 0 is close to 0
        ("-72", "72", False),
    ],
)
def test_numeric_compares_values(response: str, answer: str, right: bool) -> None:
    assert numeric(response, answer) == float(right)


def test_an_unknown_scorer_is_refused_with_the_near_one() -> None:
    text = "task.scorer=numerical: unknown; choose exact, numeric, math_verify or MODULE:FUNCTION; did you mean numeric?"
    with pytest.raises(UsageError, match=re.escape(text)):
        build_scorer("numerical")
    with pytest.raises(UsageError, match=re.escape("task.scorer=no_such:f: cannot import no_such")):
        build_scorer("no_such:f")


def test_a_users_scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_scorer_module.py").write_text("def f(response, answer):\n    return 0.5, {'length': len(response)}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    scorer = build_scorer("own_scorer_module:f")
    assert scorer.score("abc", "x") == (0.5, {"length": 3})
    assert scorer.refuse("") is None


# math-verify


MATH = [
    ("The answer is $\\frac{1}{2}$.", "0.5", 1.0),
    ("\\boxed{2x+3}", "3+2x", 1.0),
    ("so 3", "2x+3", 0.0),  # unmarked, the answer would read as its last number
    ("$\\sqrt{8}$", "2\\sqrt{2}", 1.0),
    ("$x^2$", "$x^3$", 0.0),
    ("nothing", "5", 0.0),
    ("", "5", 0.0),
]


@pytest.mark.parametrize(("response", "answer", "value"), MATH)
def test_math_verify_finds_equal_expressions(response: str, answer: str, value: float) -> None:
    pytest.importorskip("math_verify")
    assert build_scorer("math_verify").score(response, answer) == value


def test_math_verify_works_in_a_thread() -> None:
    pytest.importorskip("math_verify")
    scorer, scores = build_scorer("math_verify"), []
    thread = threading.Thread(target=lambda: scores.extend(scorer.score(response, answer) for response, answer, _ in MATH))
    thread.start()
    thread.join()
    assert scores == [value for *_, value in MATH]


def test_math_verify_refuses_an_answer_that_is_no_expression() -> None:
    pytest.importorskip("math_verify")
    scorer = build_scorer("math_verify")
    assert scorer.refuse("\\frac{1}{2}") is None
    assert scorer.refuse(" ") == "must be an expression for task.scorer=math_verify"


@pytest.mark.parametrize(("name", "package"), [("math_verify", "math_verify")])
def test_a_missing_package_says_what_to_install(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=re.escape("needs the package math-verify; pip install 'moe-rl[tasks]'")):
        build_scorer(name)


# What a model's text may not do


def test_a_time_limit_ends_python_and_big_integers_alike() -> None:
    for expression in ("while True: pass", "9 ** 9 ** 9"):
        started = time.monotonic()
        with pytest.raises(TimeoutError), time_limit(0.2):
            exec(expression)
        assert time.monotonic() - started < 5


def test_a_time_limit_comes_again_where_it_is_swallowed() -> None:
    swallowed = 0
    with pytest.raises(TimeoutError), time_limit(0.1):
        while True:
            try:
                time.sleep(5)
            except TimeoutError:
                swallowed += 1
                if swallowed == 2:
                    raise
    assert swallowed == 2


def test_a_time_limit_leaves_an_outer_one_running() -> None:
    with pytest.raises(TimeoutError, match="0.3"), time_limit(0.3):
        with time_limit(0.1):
            pass
        time.sleep(5)


def test_in_a_thread_there_is_no_limit() -> None:
    done = []

    def body() -> None:
        with time_limit(0.01):
            time.sleep(0.05)
            done.append(True)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert done == [True]


def test_plain_literals_and_formulas() -> None:
    plain = ["[[0, 1], [1, 0]]", "Q _ _\n_ Q _", "1 2 3", "['a', \"b\"]", "", "-1.5"]
    assert all(is_plain_literal(text) for text in plain)
    harmful = ["exit()", "[0]*9**9", "'%999999999d' % 1", "f'{1:99999999}'", "lambda: 0", "a=1", "a; b", "@x"]
    assert not any(is_plain_literal(text) for text in harmful)
    plain = ["(1 + 2) * 3 / 4 - 5", "x**2 + 2*x + C", "exp(-x)*sin(3*x)/2 + C", "2x^2", "", "sqrt(2)*pi"]
    assert all(is_plain_formula(text) for text in plain)
    harmful = ["open(1)", "(input)()", "exit()", "x.__class__", "().mro", "open('a')", "[0]*9", "eval(x)", "print(7)", "lambda"]
    assert not any(is_plain_formula(text) for text in harmful)
