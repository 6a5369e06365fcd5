"""JSONL files: what is read, what is held out, and the line of each error."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_rl.task_config import TaskSection
from moe_rl.tasks import Task, build_task, score_response
from parallel.errors import UsageError


def section(**keys: Any) -> TaskSection:
    return TaskSection.model_validate(keys)


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def numbered(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"q{i}", "answer": f"a{i}"} for i in range(count)]


def build(train: Path, **keys: Any) -> Task:
    return build_task(section(name="jsonl", train_path=train, **keys))


def test_two_files_are_taken_whole_and_in_order(tmp_path: Path) -> None:
    train = write(tmp_path / "t.jsonl", {"question": "one", "answer": 1}, {"prompt": "two ", "answer": "2", "source": "x"})
    heldout = write(tmp_path / "e.jsonl", {"prompt": "three", "answer": 3.5})
    task = build(train, eval_path=heldout, eval_size=1, train_size=1)
    assert [(p.id, p.prompt, p.answer) for p in task.train] == [(f"{train}:1", "one", "1"), (f"{train}:2", "two ", "2")]
    assert [(p.id, p.prompt, p.answer) for p in task.heldout] == [(f"{heldout}:1", "three", "3.5")]
    assert [score_response(task, text, task.train[0]).value for text in (" 1\n", "1.0", "")] == [1.0, 0.0, 0.0]


def test_an_evaluation_needs_no_file_to_train_on(tmp_path: Path) -> None:
    heldout = write(tmp_path / "e.jsonl", *numbered(3))
    task = build_task(section(name="jsonl", eval_path=heldout), trains=False)
    assert ([p.prompt for p in task.heldout], list(task.train)) == (["q0", "q1", "q2"], [])
    same = build_task(section(name="jsonl", train_path=heldout, eval_path=heldout), trains=False)  # pass@1 of what was trained
    assert [p.prompt for p in same.heldout] == ["q0", "q1", "q2"]


def test_a_tenth_of_the_prompts_is_held_out_whatever_the_order_of_lines(tmp_path: Path) -> None:
    forward = build(write(tmp_path / "a.jsonl", *numbered(40)))
    backward = build(write(tmp_path / "b.jsonl", *reversed(numbered(40))))
    held = [p.prompt for p in forward.heldout]
    assert (len(held), len(forward.train)) == (4, 36)
    assert {p.prompt for p in backward.heldout} == set(held)
    assert {p.prompt for p in (*forward.train, *forward.heldout)} == {f"q{i}" for i in range(40)}
    other = build(tmp_path / "a.jsonl", seed=1)
    assert {p.prompt for p in other.heldout} != set(held)


@pytest.mark.parametrize(("count", "eval_size", "held"), [(2, 256, 1), (9, 256, 1), (100, 256, 10), (100, 3, 3)])
def test_how_many_are_held_out(tmp_path: Path, count: int, eval_size: int, held: int) -> None:
    task = build(write(tmp_path / "t.jsonl", *numbered(count)), eval_size=eval_size)
    assert (len(task.heldout), len(task.train)) == (held, count - held)


def test_all_lines_of_a_prompt_go_together(tmp_path: Path) -> None:
    records = [{"prompt": f"q{i % 3}" + " " * (i // 3), "answer": str(i)} for i in range(9)]
    task = build(write(tmp_path / "t.jsonl", *records))
    assert (len(task.heldout), len(task.train)) == (3, 6)
    assert len({p.prompt.strip() for p in task.heldout}) == 1


def test_blank_lines_are_skipped_but_counted_and_only_newlines_end_a_line(tmp_path: Path) -> None:
    text = '\ufeff{"prompt": "a\u2028b", "answer": "1"}\r\n\n   \n{"prompt": "c\\u0085d", "answer": "2"}'
    (tmp_path / "t.jsonl").write_bytes(text.encode())
    task = build(tmp_path / "t.jsonl")
    lines = sorted((p.id, p.prompt) for p in (*task.train, *task.heldout))
    assert lines == [(f"{tmp_path / 't.jsonl'}:1", "a\u2028b"), (f"{tmp_path / 't.jsonl'}:4", "c\x85d")]


GOOD = b'{"prompt": "p", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"prompt": "p", "answer"}', "is not JSON: Expecting ':' delimiter at column 25"),
        (b"prompt,answer", "is not JSON: Expecting value at column 1"),
        (b'["p", "a"]', "must be an object {\"prompt\": ..., \"answer\": ...}, not ['p', 'a']"),
        (b'{"promt": "p", "answer": "1"}', "has no field prompt; did you mean promt?"),
        (b'{"prompt": "p"}', "has no field answer"),
        (b'{"prompt": "p", "question": "p", "answer": "1"}', "has both prompt and question"),
        (b'{"prompt": 5, "answer": "1"}', "prompt=5: must be a text"),
        (b'{"prompt": "p", "answer": null}', "answer=null: must be a text or a number"),
        (b'{"prompt": "p", "answer": true}', "answer=true: must be a text or a number"),
        (b'{"prompt": "p", "answer": ["1"]}', "answer=['1']: must be a text or a number"),
        (b'{"prompt": "p", "answer": NaN}', "answer=nan: must be a text or a number"),
        (b'{"prompt": "p", "answer": " "}', "answer=' ': must not be blank"),
        (b'{"prompt": " ", "answer": "1"}', "the prompt is blank"),
        (b'{"prompt": "\\ud800", "answer": "1"}', "has half a surrogate pair"),
        (b'{"prompt": "\xff", "answer": "1"}', "is not UTF-8 at byte 13 of the line"),
        (b'{"prompt": "p", "answer": ' + b"9" * 5000 + b"}", "is not JSON that can be read"),
        (b"[" * 100_000, "is not JSON that can be read"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: bytes, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n")
    with pytest.raises(UsageError) as caught:
        build(path)
    shown = str(caught.value)
    assert shown.startswith(f"{path}:3: ") and text in shown
    assert "\n" not in shown and len(shown) < 300 + len(str(path))


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="task.train_path: missing; task.name=jsonl reads its problems from it"):
        build_task(section(name="jsonl"))
    with pytest.raises(UsageError, match="task.eval_path: missing; task.name=jsonl reads its problems from it, or a share of"):
        build_task(section(name="jsonl"), trains=False)
    with pytest.raises(UsageError, match=r"task.train_path=.*no\.jsonl: cannot be read: No such file"):
        build(tmp_path / "no.jsonl")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        build(tmp_path)
    good = write(tmp_path / "good.jsonl", *numbered(3))
    for empty in (b"", b"\n  \n"):
        (tmp_path / "e.jsonl").write_bytes(empty)
        with pytest.raises(UsageError, match=r"task.eval_path=.*e\.jsonl: the file has no problems"):
            build(good, eval_path=tmp_path / "e.jsonl")


def test_one_prompt_cannot_be_split(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"prompt": "p", "answer": "1"}, {"prompt": " p", "answer": "1"})
    with pytest.raises(UsageError, match="has 1 distinct prompt; give 2 or more, or held-out ones in task.eval_path"):
        build(path)


def test_a_prompt_in_both_files_is_named_with_both_lines(tmp_path: Path) -> None:
    train, heldout = write(tmp_path / "t.jsonl", *numbered(5)), tmp_path / "e.jsonl"
    write(heldout, {"prompt": "new", "answer": "1"}, {"prompt": "q3 ", "answer": "1"})
    with pytest.raises(UsageError, match=re.escape(f"{heldout}:2: prompt 'q3 ' is also at {train}:4")):
        build(train, eval_path=heldout)


def test_jsonl_has_no_options(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown key task.options.digits; this task has no options"):
        build(write(tmp_path / "t.jsonl", *numbered(3)), options={"digits": 2})


def test_numeric_answers_are_checked_at_the_start_and_scored(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *[{"question": f"q{i}", "answer": f"so\n#### {i},000"} for i in range(5)])
    task = build(path, scorer="numeric")
    problem = next(p for p in (*task.train, *task.heldout) if p.prompt == "q3")
    assert [score_response(task, text, problem).value for text in ("It is 3000.", "3,000", "3", "")] == [1.0, 1.0, 0.0, 0.0]
    write(path, {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "two"})
    with pytest.raises(UsageError, match=re.escape(f"{path}:2: answer='two': must contain a number for task.scorer=numeric")):
        build(path, scorer="numeric")


def test_math_verify_scores_a_file(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    path = write(tmp_path / "t.jsonl", {"prompt": "a", "answer": "1/2"}, {"prompt": "b", "answer": "$x+1$"})
    task = build(path, scorer="math_verify")
    by_prompt = {p.prompt: p for p in (*task.train, *task.heldout)}
    assert score_response(task, "it is $\\frac{2}{4}$", by_prompt["a"]).correct
    assert score_response(task, "\\boxed{1+x}", by_prompt["b"]).correct
    assert not score_response(task, "\\boxed{1-x}", by_prompt["b"]).correct


def test_a_users_scorer_may_take_blank_answers_and_return_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_jsonl_scorer.py").write_text("def f(response, answer):\n    return 0.5, {'length': len(response)}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    task = build(
        write(tmp_path / "t.jsonl", {"prompt": "a", "answer": ""}, {"prompt": "b", "answer": ""}), scorer="own_jsonl_scorer:f"
    )
    score = score_response(task, "abc", task.train[0])
    assert (score.value, score.parts, score.correct) == (0.5, {"length": 3.0}, False)
