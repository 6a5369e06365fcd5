"""Problems from files, JSON lines or Parquet: a row each, scored by task.scorer."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_rl.config_errors import show
from moe_rl.task_config import TaskSection
from moe_rl.tasks.options import check_names
from moe_rl.tasks.rows import Columns, parse_row
from moe_rl.tasks.scorers import Scorer, build_scorer
from moe_rl.tasks.task import ProblemSet, Task, prompt_key
from moe_rl.types import Problem
from parallel.errors import UsageError

_HELDOUT_SHARE = 10  # one prompt in so many, at most task.eval_size


def build(section: TaskSection) -> Task:
    """train_path's problems, and eval_path's or a share of the former held out. Without train_path there are none to train on.

    A file whose name ends in .parquet is Parquet, any other holds one JSON object a line (.gz: compressed). rows.py says which
    columns are read. Blank lines are skipped and counted. Without eval_path a tenth of the prompts, at most eval_size and at
    least one, is held out: which ones follows from the prompt and section.seed alone, not from the order of rows. All rows of
    one prompt go together. Raises UsageError with file and row where a file is not like this, or a prompt of eval_path is
    also in train_path.
    """
    check_names(section.options, ())
    if section.train_path is None and section.eval_path is None:
        raise UsageError(
            f"task.eval_path: missing; task.name={section.name} reads its problems from it, or a share of task.train_path"
        )
    scorer, columns = build_scorer(section.scorer), Columns(section.prompt_column, section.answer_column)
    train = [] if section.train_path is None else _read(section.train_path, "task.train_path", columns, scorer)
    if section.eval_path is None:
        train, heldout = _hold_out(train, section)
    else:
        heldout = _read(section.eval_path, "task.eval_path", columns, scorer)
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


def _read(path: Path, key: str, columns: Columns, scorer: Scorer) -> list[Problem]:
    """The problems of a file, each with the id FILE:ROW, its place for an error message."""
    try:
        if path.suffix == ".parquet":
            problems = list(_parquet(path, key, columns, scorer))
        else:
            problems = list(_lines(path, key, columns, scorer))
    except OSError as error:
        raise UsageError(f"{key}={path}: cannot be read: {error.strerror or _line(error)}") from error
    if not problems:
        raise UsageError(f'{key}={path}: the file has no problems; write one {{"prompt": ..., "answer": ...}} a line')
    return problems


def _parquet(path: Path, key: str, columns: Columns, scorer: Scorer) -> Iterator[Problem]:
    import pyarrow as pa  # a fifth of a second
    import pyarrow.parquet as pq

    number = 0
    with path.open("rb") as opened:
        try:
            file = pq.ParquetFile(opened)
            names = file.schema_arrow.names
            wanted = [name for name in names if name in columns.needed]
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield parse_row(row, f"{path}:{number}", columns, scorer, names)
        except (pa.ArrowException, OSError) as error:
            where = f" past row {number}" if number else ""
            raise UsageError(f"{key}={path}: is not Parquet that can be read{where}: {_line(error)[:200]}") from error


def _lines(path: Path, key: str, columns: Columns, scorer: Scorer) -> Iterator[Problem]:
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UsageError(f"{key}={path}: is not gzip that can be read: {_line(error)}") from error
    if data.startswith(b"PAR1"):
        raise UsageError(f"{key}={path}: is Parquet; give it a name that ends in .parquet")
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield parse_row(_object(line, where), where, columns, scorer)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: is not UTF-8 at byte {error.start + 1} of the line") from error
    except json.JSONDecodeError as error:
        array = "; the file must hold one object a line, not an array over many" if line.strip() == b"[" else ""
        raise UsageError(f"{where}: is not JSON: {error.msg} at column {error.colno}{array}") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of brackets
        raise UsageError(f"{where}: is not JSON that can be read: {error}") from error
    if not isinstance(record, dict):
        raise UsageError(f'{where}: must be an object {{"prompt": ..., "answer": ...}}, not {show(record)}')
    return record


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
