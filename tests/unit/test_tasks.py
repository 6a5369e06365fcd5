"""The interface: build_task, and the user's own tasks."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_rl.task_config import TaskSection
from moe_rl.tasks import (
    ProblemSet,
    Score,
    build_task,
    check_task,
    fingerprint,
    score_response,
)
from moe_rl.types import Problem
from parallel.errors import UsageError


def section(**keys: Any) -> TaskSection:
    return TaskSection.model_validate(keys)


ONE, TWO = Problem("t/0", "1+1=", "2"), Problem("h/0", "2+2=", "4")


def test_building_a_task_imports_neither_torch_nor_the_optional_packages() -> None:
    code = (
        "import sys; from moe_rl.config import TaskSection; from moe_rl.tasks import build_task; build_task(TaskSection());"
        "print(sorted({'torch', 'transformers', 'megatron', 'reasoning_gym', 'math_verify'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    shown = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "adition",
            "choose addition, reversal, file, reasoning_gym:NAME, MODULE:FUNCTION; did you mean addition?",
        ),
        ("reasoning_gym", "did you mean reasoning_gym:NAME?"),
        ("zzz", "task.name=zzz: unknown; choose addition"),
        ("a:b:c", "task.name=a:b:c: must be MODULE:FUNCTION"),
        (":f", "must be MODULE:FUNCTION"),
    ],
)
def test_an_unknown_name_is_refused_with_the_near_one(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        build_task(section(name=name))


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"scorer": "numeric"}, "task.scorer=numeric: only task.name=file reads it"),
        ({"train_path": Path("a.jsonl")}, "task.train_path"),
        ({"eval_path": Path("a.jsonl")}, "task.eval_path"),
        ({"prompt_column": "q"}, "task.prompt_column=q: only task.name=file reads it"),
        ({"answer_column": "a"}, "task.answer_column"),
    ],
)
def test_a_key_that_the_task_would_ignore_is_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        build_task(section(name="addition", **keys))


# The user's own task

OWN = """
from moe_rl.tasks import ProblemSet
from moe_rl.types import Problem

def build(count=2):
    train = [Problem(str(i), f"say {i}", str(i)) for i in range(count)]
    return ProblemSet(train, [Problem("h", "say h", "h")], lambda text, problem: (float(text == problem.answer), {"n": 1}))

def overlapping():
    return ProblemSet([Problem("a", "same ", "1")], [Problem("b", "same", "1")], lambda text, problem: 1.0)

class Half:
    train = [Problem("a", "p", "1")]
    heldout = []
    def score(self, text, problem):
        return 0

class Scoreless:
    train, heldout = [Problem("a", "p", "1")], [Problem("b", "q", "1")]

class Strings:
    train, heldout = ["p"], ["q"]

def nothing(): ...

def broken():
    raise KeyError("mine")

value = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_task.py").write_text(OWN)
    (tmp_path / "own_syntax.py").write_text("def f(:\n")
    (tmp_path / "own_needs.py").write_text("\nimport no_such_package\n")
    (tmp_path / "own_raises.py").write_text("x = 1\ny = x / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("own_")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("own")
def test_a_users_function_in_the_current_directory_gets_the_options() -> None:
    task = build_task(section(name="own_task:build", options={"count": 3}))
    assert [problem.prompt for problem in task.train] == ["say 0", "say 1", "say 2"]
    assert score_response(task, "1", task.train[1]) == Score(1.0, {"n": 1.0})
    assert score_response(task, "2", task.train[1]) == Score(0.0, {"n": 1.0})


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("no_such:f", {}, "task.name=no_such:f: cannot import no_such: there is no module no_such in the current directory"),
        ("own_task.deeper:f", {}, "cannot import own_task.deeper"),
        ("own_needs:f", {}, "cannot import own_needs: ModuleNotFoundError: No module named 'no_such_package'"),
        ("own_syntax:f", {}, "cannot import own_syntax: SyntaxError"),
        ("own_raises:f", {}, "own_raises.py, line 2)"),
        ("own_task:biuld", {}, "own_task has no biuld; did you mean build?"),
        ("own_task:value", {}, "value is not a function but int"),
        ("own_task:build", {"cuont": 3}, "got an unexpected keyword argument 'cuont'; did you mean count?"),
        ("own_task:overlapping", {}, "prompt 'same' is in train (a) and in heldout (b)"),
        ("own_task:Half", {}, "task.name=own_task:Half: heldout has no problems"),
        ("own_task:Scoreless", {}, "must have a method score"),
        ("own_task:Strings", {}, "train[0] must be a Problem with a text id, not p"),
        ("own_task:nothing", {}, "the task (NoneType) must have train, a sequence of Problem, not NoneType"),
    ],
)
def test_what_is_wrong_with_a_users_task_is_one_line(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_task(section(name=name, options=options))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("own")
def test_what_a_users_function_raises_keeps_its_own_traceback() -> None:
    with pytest.raises(KeyError, match="mine"):
        build_task(section(name="own_task:broken"))


def test_white_space_around_a_prompt_does_not_hide_an_overlap() -> None:
    with pytest.raises(UsageError, match="remove it from one, or deduplicate"):
        check_task(ProblemSet([ONE], [Problem("x", f"\n{ONE.prompt} ", "2")], lambda text, problem: 1.0), "mine")


def test_fingerprints_tell_tasks_apart_and_do_not_depend_on_the_object() -> None:
    sizes = section(train_size=20, eval_size=5)
    assert fingerprint(build_task(sizes)) == fingerprint(build_task(sizes))
    assert fingerprint(build_task(sizes)) != fingerprint(build_task(sizes.model_copy(update={"seed": 1})))
    one, swapped = (ProblemSet([a], [b], lambda text, problem: 1.0) for a, b in ((ONE, TWO), (TWO, ONE)))
    assert fingerprint(one) != fingerprint(swapped)
