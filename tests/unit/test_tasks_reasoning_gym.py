"""reasoning_gym:NAME: splits, verifiers and what they must not do."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moe_rl.task_config import TaskSection
from moe_rl.tasks import Task, build_task, fingerprint, reasoning_gym, score_response
from moe_rl.tasks.untrusted import time_limit
from parallel.errors import UsageError


def section(**keys: Any) -> TaskSection:
    return TaskSection.model_validate(keys)


def build(name: str, sizes: tuple[int, int] = (20, 5), seed: int = 0, **options: Any) -> Task:
    pytest.importorskip("reasoning_gym")
    return build_task(
        section(name=f"reasoning_gym:{name}", options=options, train_size=sizes[0], eval_size=sizes[1], seed=seed)
    )


def test_spell_backward_follows_its_config_and_knows_its_answers() -> None:
    task = build("spell_backward", min_word_len=3, max_word_len=5)
    assert (len(task.train), len(task.heldout)) == (20, 5)
    for problem in (*task.train, *task.heldout):
        assert problem.prompt == f"Spell this word backward (example: sun -> nus): {problem.answer[::-1]}\n"
        assert 3 <= len(problem.answer) <= 5
        assert score_response(task, f" {problem.answer}\n", problem).correct
    problem = task.train[0]
    partial = score_response(task, problem.answer[0], problem)
    assert partial.value == pytest.approx(1 / len(problem.answer)) and not partial.correct


def test_a_wrong_countdown_keeps_its_hundredth_and_is_not_correct() -> None:
    task = build("countdown", sizes=(3, 1), min_numbers=3, max_numbers=3)
    problem = task.train[0]
    right, wrong = score_response(task, problem.answer, problem), score_response(task, "1 + 1", problem)
    assert (right.value, right.correct) == (1.0, True)
    assert (wrong.value, wrong.correct, wrong.failed) == (0.05, False, False)  # a sum, but another one
    for noise in ("no idea", "", "exit()"):
        assert score_response(task, noise, problem).value == 0.01


def test_a_response_that_takes_too_long_to_check_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    task = build("countdown", sizes=(1, 1))
    monkeypatch.setattr(reasoning_gym, "time_limit", lambda: time_limit(0.3))
    started = time.monotonic()
    assert not score_response(task, "9**9**9**9", task.train[0]).correct
    assert time.monotonic() - started < 5


def test_neighbouring_seeds_share_no_problems() -> None:
    one, two = ({p.prompt for p in build("chain_sum", sizes=(50, 5), seed=seed).train} for seed in (0, 1))
    assert not one & two
    assert fingerprint(build("chain_sum")) == fingerprint(build("chain_sum"))


def test_the_suffix_ends_the_prompt() -> None:
    assert build("gcd", prompt_suffix=" Answer:").train[0].prompt.endswith(" Answer:")
    assert build("gcd", prompt_suffix="").train[0].prompt == build("gcd").train[0].prompt.removesuffix("\n")
    with pytest.raises(UsageError, match=re.escape("task.options.prompt_suffix=1: must be a text")):
        build("gcd", prompt_suffix=1)


def test_where_training_saw_everything_a_tenth_moves_over() -> None:
    task = build("products", sizes=(5000, 256), min_digits=1, max_digits=1, min_terms=2, max_terms=2)
    prompts = [p.prompt for p in (*task.train, *task.heldout)]
    assert len(prompts) == len(set(prompts))
    assert len(task.heldout) == len(prompts) // 10 > 0
    for problem in task.heldout:
        assert score_response(task, problem.answer, problem).correct


@pytest.mark.parametrize(("name", "response"), [("prime_factorization", "no idea"), ("game_of_life", "{}")])
def test_a_response_that_a_verifier_cannot_read_is_wrong_not_an_error(name: str, response: str) -> None:
    task = build(name, sizes=(2, 1))
    assert score_response(task, response, task.train[0]).value == 0.0
    assert score_response(task, task.train[0].answer, task.train[0]).correct


def test_a_sum_of_shares_that_rounds_above_one_is_not_correct() -> None:
    task = build("spell_backward", sizes=(200, 1), min_word_len=9, max_word_len=9)  # 9 / 9 in ninths is 1.0000000000000002
    scores = [score_response(task, problem.answer + "x", problem) for problem in task.train]
    assert all(score.value == 1.0 and not score.correct for score in scores)


@pytest.mark.parametrize(
    "name", ["binary_matrix", "countdown", "n_queens", "puzzle24", "simple_integration", "spiral_matrix", "string_insertion"]
)
def test_no_verifier_executes_a_response(name: str, tmp_path: Path) -> None:
    task = build(name, sizes=(2, 1))
    mark = tmp_path / "written"
    for response in ("exit()", "[exit()]", f"open('{mark}','w')", f"[open('{mark}','w')]", "(input)()", "[0]*9**9"):
        assert not score_response(task, response, task.train[0]).correct
    assert not mark.exists()
    for problem in task.train:
        assert score_response(task, problem.answer, problem).correct


def test_a_task_without_reference_answers_has_blank_ones() -> None:
    task = build("graph_color", sizes=(2, 1))
    assert {p.answer for p in task.train} == {""}
    assert score_response(task, "{}", task.train[0]).value == 0.01


def test_a_composite_takes_its_parts_as_mappings() -> None:
    parts = [{"name": name, "weight": 1, "config": {}} for name in ("gcd", "lcm")]
    task = build("composite", datasets=parts)
    assert all(score_response(task, problem.answer, problem).correct for problem in task.train)
    assert len({p.prompt.split()[2] for p in task.train}) > 1


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("countdwn", {}, "task.name=reasoning_gym:countdwn: reasoning-gym has no task countdwn; did you mean countdown"),
        ("", {}, "reasoning-gym has no task ''; it has ab, acre,"),
        ("spell_backward", {"min_word": 3}, "unknown key task.options.min_word; the options are min_word_len, max_word_len"),
        ("spell_backward", {"min_word_len": "x"}, "task.options.min_word_len=x: must be a valid integer"),
        ("spell_backward", {"min_word_len": 2.5}, "task.options.min_word_len=2.5: must be a valid integer"),
        ("spell_backward", {"min_word_len": 0}, "AssertionError: min_word_len must be positive"),
        (
            "spell_backward",
            {"data_file": "no.txt"},
            "task.options={'data_file': 'no.txt'}: reasoning_gym:spell_backward refuses",
        ),
        ("spell_backward", {"size": 3}, "task.options.size=3: is not set here; set task.train_size and task.eval_size"),
        ("spell_backward", {"seed": 3}, "task.options.seed=3: is not set here; set task.seed"),
        (
            "composite",
            {"datasets": [{"name": "no", "weight": 1, "config": {}}]},
            "refuses them: ValueError: Dataset 'no' not registered",
        ),
        ("composite", {"datasets": [{"name": "gcd"}]}, "task.options.datasets[0].weight: missing"),
        ("composite", {}, "Must specify at least one dataset"),
    ],
)
def test_bad_names_and_options(name: str, options: dict[str, Any], text: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UsageError) as caught:
        build_task(section(name=f"reasoning_gym:{name}", options=options, train_size=20, eval_size=5))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    text = "task.name=reasoning_gym:gcd: needs the package reasoning-gym; pip install 'moe-rl[tasks]'"
    with pytest.raises(UsageError, match=re.escape(text)):
        build_task(section(name="reasoning_gym:gcd"))


HASHED = """
from moe_rl.task_config import TaskSection
from moe_rl.tasks import build_task, fingerprint
print(fingerprint(build_task(TaskSection(name="reasoning_gym:word_ladder", train_size=3, eval_size=1))))
"""


def test_a_task_that_differs_between_processes_needs_a_fixed_hash() -> None:
    pytest.importorskip("reasoning_gym")

    def run(seed: str) -> subprocess.CompletedProcess[str]:
        root, env = Path(__file__).parents[2], {"PYTHONHASHSEED": seed}
        return subprocess.run([sys.executable, "-c", HASHED], cwd=root, env=env, capture_output=True, text=True, check=False)

    refused = run("random")
    assert "the problems of word_ladder differ from process to process" in refused.stderr.splitlines()[-1]
    assert "PYTHONHASHSEED=0" in refused.stderr.splitlines()[-1]
    first, second = run("0"), run("0")
    assert first.returncode == 0 and first.stdout == second.stdout != ""
