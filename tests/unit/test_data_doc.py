"""docs/data.md: its rows are read as it says, and its settings are ones that there are."""

import json
import re
from pathlib import Path
from typing import Any

from moe_rl.config import RunConfig
from moe_rl.task_config import TaskSection
from moe_rl.tasks import build_task, score_response

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def test_every_row_that_is_shown_is_read(tmp_path: Path) -> None:
    (rows,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    path = tmp_path / "t.jsonl"
    path.write_text(rows)
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "other", "answer": "1"}))
    section: dict[str, Any] = {"name": "file", "train_path": path, "eval_path": tmp_path / "held.jsonl", "scorer": "numeric"}
    task = build_task(TaskSection.model_validate(section))
    assert [bool(problem.messages) for problem in task.train] == [False, True, True, True]
    assert [score_response(task, "so 72", problem).value for problem in task.train] == [1, 1, 1, 0]


def test_every_setting_that_is_named_exists() -> None:
    sections = "|".join(RunConfig.model_fields)
    named = set(re.findall(rf"\b(?:{sections})\.[a-z_]+", TEXT)) - {"run.yaml"}
    known = {f"{name}.{key}" for name, field in RunConfig.model_fields.items() for key in field.annotation.model_fields}  # pyright: ignore
    assert len(named) > 12 and named <= known, named - known
