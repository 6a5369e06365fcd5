"""Problems from JSONL files: one {"prompt": ..., "answer": ...} a line, scored by task.scorer."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from moe_rl.config import TaskSection
from moe_rl.config_errors import near, show
from moe_rl.tasks.options import check_names
from moe_rl.tasks.scorers import Scorer, build_scorer
from moe_rl.tasks.task import ProblemSet, Task, prompt_key
from moe_rl.types import Problem
from parallel.errors import UsageError

_HELDOUT_SHARE = 10  # one prompt in so many, at most task.eval_size


def build(section: TaskSection) -> Task:
    """train_path's problems, and eval_path's or a share of the former held out. Without train_path there are none to train on.

    A line is an object with `prompt` (or `question`) and `answer`, a text or a number; other fields are ignored. Blank lines
    are skipped and counted. Without eval_path a tenth of the prompts, at most eval_size and at least one, is held out: which
    ones follows from the prompt and section.seed alone, not from the order of lines. All lines of one prompt go together.
    Raises UsageError with file and line where a file is not like this, or a prompt of eval_path is also in train_path.
    """
    check_names(section.options, ())
    if section.train_path is None and section.eval_path is None:
        raise UsageError("task.eval_path: missing; task.name=jsonl reads its problems from it, or a share of task.train_path")
    scorer = build_scorer(section.scorer)
    train = [] if section.train_path is None else _read(section.train_path, "task.train_path", scorer)
    if section.eval_path is None:
        train, heldout = _hold_out(train, section)
    else:
        heldout = _read(section.eval_path, "task.eval_path", scorer)
        seen = {prompt_key(problem.prompt): problem.id for problem in train}
        for problem in heldout:
            if twin := seen.get(prompt_key(problem.prompt)):
                raise UsageError(
                    f"{problem.id}: prompt {show(repr(problem.prompt))} is also at {twin}; remove it from one of the files"
                )
    return ProblemSet(train, heldout, lambda response, problem: scorer.score(response, problem.answer))


def _hold_out(problems: list[Problem], section: TaskSection) -> tuple[list[Problem], list[Problem]]:
    prompts = {prompt_key(problem.prompt) for problem in problems}
    if len(prompts) < 2:
        raise UsageError(
            f"task.train_path={section.train_path}: has 1 distinct prompt; give 2 or more, or held-out ones in task.eval_path"
        )

    def rank(prompt: str) -> bytes:
        return hashlib.sha256(f"{section.seed} {prompt}".encode()).digest()

    held = set(sorted(prompts, key=rank)[: min(section.eval_size, max(1, len(prompts) // _HELDOUT_SHARE))])
    return (
        [problem for problem in problems if prompt_key(problem.prompt) not in held],
        [problem for problem in problems if prompt_key(problem.prompt) in held],
    )


def _read(path: Path, key: str, scorer: Scorer) -> list[Problem]:
    """The problems of a file, each with the id FILE:LINE, its place for an error message."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UsageError(f"{key}={path}: cannot be read: {error.strerror}") from error
    problems = [_parse(line, f"{path}:{number}", scorer) for number, line in enumerate(lines, start=1) if line.strip()]
    if not problems:
        raise UsageError(f'{key}={path}: the file has no problems; write one {{"prompt": ..., "answer": ...}} a line')
    return problems


def _parse(line: bytes, where: str, scorer: Scorer) -> Problem:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: is not UTF-8 at byte {error.start + 1} of the line") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: is not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of brackets
        raise UsageError(f"{where}: is not JSON that can be read: {error}") from error
    if not isinstance(record, dict):
        raise UsageError(f'{where}: must be an object {{"prompt": ..., "answer": ...}}, not {show(record)}')
    if "prompt" in record and "question" in record:
        raise UsageError(f"{where}: has both prompt and question; keep one")
    prompt = _field(record, "question" if "question" in record else "prompt", where)
    answer = _field(record, "answer", where)
    if not prompt.strip():
        raise UsageError(f"{where}: the prompt is blank")
    if wrong := scorer.refuse(answer):
        raise UsageError(f"{where}: answer={show(repr(answer))}: {wrong}")
    return Problem(where, prompt, answer)


def _field(record: dict[str, Any], name: str, where: str) -> str:
    if name not in record:
        raise UsageError(f"{where}: has no field {name}{near(name, record)}")
    value = record[name]
    if name == "answer" and (type(value) is int or (type(value) is float and math.isfinite(value))):
        return str(value)
    if not isinstance(value, str):
        raise UsageError(f"{where}: {name}={show(value)}: must be a text{' or a number' if name == 'answer' else ''}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UsageError(f"{where}: {name}={show(value)}: has half a surrogate pair, which is no character")
    return value
