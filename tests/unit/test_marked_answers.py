"""Answers that GSM8K marks with ####: the last number of a text is not always its answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe_rl.task_config import TaskSection
from moe_rl.tasks import Task, build_task, score_response


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def build(path: Path, scorer: str) -> Task:
    return build_task(TaskSection.model_validate({"name": "file", "train_path": path, "scorer": scorer}))


def test_marked_answers_of_gsm8k_are_scored_as_marked(tmp_path: Path) -> None:
    answer = "Half of 48 is <<48/2=24>>24.\n48 + 24 = 72.\n#### 72"
    path = write(tmp_path / "t.jsonl", {"question": "q", "answer": answer}, {"question": "p", "answer": "x\n#### -1,200"})
    task = build(path, "numeric")
    by_prompt = {p.prompt: p for p in (*task.train, *task.heldout)}
    scores = {
        "It is 72.": 1,
        "#### 72\n\nQuestion: Tom has 3 apples": 1,  # what runs on after the mark does not count
        "#### 24\nno, #### 72": 1,
        "#### 2. Add\nso 72": 1,  # a heading
        "#### 72.\n": 1,
        "72\n#### 24": 0,
        "48/2 = 24": 0,
        "": 0,
    }
    assert {text: score_response(task, text, by_prompt["q"]).value for text in scores} == scores
    negative = {"so -1200": 1, "#### \N{MINUS SIGN}1,200\n5": 1, "#### 1200": 0}
    assert {text: score_response(task, text, by_prompt["p"]).value for text in negative} == negative


def test_math_verify_reads_what_is_marked(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    path = write(tmp_path / "t.jsonl", {"question": "q", "answer": "48 + 24 = 72\n#### 72"}, {"question": "p", "answer": "1"})
    task = build(path, "math_verify")
    problem = next(p for p in (*task.train, *task.heldout) if p.prompt == "q")
    assert [score_response(task, text, problem).value for text in ("$72$", "it is 72", "24")] == [1, 1, 0]
