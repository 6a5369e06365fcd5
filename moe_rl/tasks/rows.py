"""A row of a file to a problem: which columns are the prompt and the answer, and what a conversation in them must be like."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_rl.config_errors import near, show
from moe_rl.tasks.scorers import Scorer
from moe_rl.types import Message, Problem
from parallel.errors import UsageError

PROMPTS = ("prompt", "question", "problem", "messages")
ANSWERS = ("answer", "solution", "response", "completion", "reward_model.ground_truth")


@dataclass(frozen=True)
class Columns:
    """task.prompt_column and task.answer_column; None: whichever of PROMPTS and of ANSWERS a row has."""

    prompt: str | None = None
    answer: str | None = None

    @property
    def needed(self) -> set[str]:
        """The columns, not those nested in them, that may be read."""
        prompts = PROMPTS if self.prompt is None else (self.prompt, self.prompt.partition(".")[0])
        answers = ANSWERS if self.answer is None else (self.answer, self.answer.partition(".")[0])
        return {name.removesuffix(".ground_truth") for name in (*prompts, *answers)}


def parse_row(
    row: Mapping[str, Any], where: str, columns: Columns, scorer: Scorer, names: Iterable[str] | None = None
) -> Problem:
    """The problem of one row, with the id `where`, its place for an error message.

    The prompt is a text or a conversation, a list of {role, content}. A conversation that ends with the assistant's turn has
    its answer in it, unless columns.answer names another column. A column that is null is absent. names: of all columns,
    where `row` holds only some. Raises UsageError naming `where` for what is missing, ambiguous or of another type.
    """
    names = list(row if names is None else names)
    column = columns.prompt or _choose(row, PROMPTS, "prompt", where, names)
    prompt = _at(row, column)
    if prompt is None and columns.prompt is not None:
        raise UsageError(_missing(column, "prompt", where, names, row))
    if isinstance(prompt, list | tuple):
        return _conversation(row, where, columns, scorer, names, column, prompt)
    text = _text(prompt, column, where, "a text or a list of {role, content}" if column in ("prompt", "messages") else "a text")
    if not text.strip():
        raise UsageError(f"{where}: the prompt is blank")
    column = columns.answer or _choose(row, ANSWERS, "answer", where, names)
    answer, reply = _answer(row, column, where, names)
    return Problem(where, text, _accepted(answer, where, scorer), reply=reply)


def _conversation(
    row: Mapping[str, Any],
    where: str,
    columns: Columns,
    scorer: Scorer,
    names: Sequence[str],
    column: str,
    turns: Sequence[Any],
) -> Problem:
    messages = _messages(turns, column, where)
    reply = messages.pop() if messages and messages[-1]["role"] == "assistant" else None
    if not messages:
        raise UsageError(f"{where}: {column} has no turn that asks for an answer; it needs one before the assistant's")
    other = columns.answer
    if other is None:
        found = [name for name in ANSWERS if _at(row, name) is not None]
        if reply is not None and found:
            raise UsageError(
                f"{where}: {column} ends with an assistant's turn and there is {found[0]}, too; set task.answer_column to "
                f"{column} or {found[0]}"
            )
        other = column if reply is not None else _choose(row, ANSWERS, "answer", where, names)
    if other == column:
        if reply is None:
            raise UsageError(f"{where}: {column} does not end with an assistant's turn, so it holds no answer")
        answer = reply.get("content") or ""
    else:
        answer, reply = _answer(row, other, where, names)
    return Problem.of_messages(where, messages, _accepted(answer, where, scorer), reply)


def _answer(row: Mapping[str, Any], column: str, where: str, names: Sequence[str]) -> tuple[str, Message | None]:
    """The answer as text; and as a turn, where the column holds one."""
    value = _at(row, column)
    if value is None and column not in row:
        raise UsageError(_missing(column, "answer", where, names, row))
    if isinstance(value, list | tuple) and value and all(isinstance(turn, Mapping) for turn in value):
        turns = _messages(value, column, where)
        if len(turns) != 1 or turns[0]["role"] != "assistant":
            raise UsageError(f"{where}: {column} must be a text or one assistant's turn, not {len(turns)} turns")
        return turns[0].get("content") or "", turns[0]
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return str(value), None
    return _text(value, column, where, "a text or a number"), None


def _accepted(answer: str, where: str, scorer: Scorer) -> str:
    if wrong := scorer.refuse(answer):
        raise UsageError(f"{where}: answer={show(repr(answer))}: {wrong}")
    return answer


def _choose(row: Mapping[str, Any], candidates: Sequence[str], kind: str, where: str, names: Sequence[str]) -> str:
    """The one of `candidates` that the row has."""
    found = [name for name in candidates if _at(row, name) is not None] or [name for name in candidates if name in row][:1]
    if len(found) > 1:
        both = "both " if len(found) == 2 else ""
        raise UsageError(
            f"{where}: has {both}{', '.join(found[:-1])} and {found[-1]}; keep one, or name one in task.{kind}_column"
        )
    if not found:
        raise UsageError(_missing(None, kind, where, names, row))
    return found[0]


def _missing(column: str | None, kind: str, where: str, names: Sequence[str], row: Mapping[str, Any]) -> str:
    """column: that the user named; None: none of the usual ones is there."""
    candidates = PROMPTS if kind == "prompt" else ANSWERS
    if column is not None:
        head, _, rest = column.partition(".")
        inside = row.get(head)
        known = [f"{head}.{name}" for name in inside] if rest and isinstance(inside, Mapping) else names
        return f"{where}: task.{kind}_column={column}: no such field, or null{near(column, known) or _listed(names)}"
    others = [name for name in names if name not in (*PROMPTS, *ANSWERS)]
    name, hint = next(((name, hint) for name in candidates if (hint := near(name, others))), (candidates[0], ""))
    usual = f" (nor {', '.join(candidates[1:])})" if not hint else ""
    return f"{where}: has no field {name}{usual}{hint or _listed(names)}; task.{kind}_column names another"


def _listed(names: Sequence[str]) -> str:
    return f"; it has {show(', '.join(names))}" if names else "; it has none at all"


def _at(row: Mapping[str, Any], column: str) -> Any:
    """The value in a column, or nested in one: `a.b`. None where there is none."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _messages(turns: Sequence[Any], column: str, where: str) -> list[dict[str, Any]]:
    """Turns with text in role and content; a key that is null is left out, as Parquet has every key in every turn."""
    messages = []
    for number, turn in enumerate(turns):
        place = f"{where}: {column}[{number}]"
        if not isinstance(turn, Mapping):
            raise UsageError(f"{place}={show(turn)}: must be {{role: ..., content: ...}}")
        message = {key: value for key, value in turn.items() if value is not None}
        if "role" not in message:
            raise UsageError(f"{place}: has no role{near('role', message) or _listed(list(message))}")
        if "content" not in message and not set(message) - {"role"}:  # a turn of tool calls alone has none
            raise UsageError(f"{place}: has no content")
        for name in ("role", "content"):
            if name in message:
                _text(message[name], f"{column}[{number}].{name}", where, "a text")
        if message["role"] == "user" and not message.get("content", "").strip():
            raise UsageError(f"{place}: the user's turn is blank")
        messages.append(message)
    return messages


def _text(value: Any, name: str, where: str, kind: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {name}={show(value)}: must be {kind}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UsageError(f"{where}: {name}={show(value)}: has half a surrogate pair, which is no character")
    return value
