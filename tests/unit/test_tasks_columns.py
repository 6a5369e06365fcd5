"""Rows of files: column names of common sets, conversations, Parquet, and the row of each error."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moe_rl.task_config import TaskSection
from moe_rl.tasks import Task, build_task, fingerprint
from moe_rl.types import Problem
from parallel.errors import UsageError

ASK = {"role": "user", "content": "What is 2+3?"}
SYSTEM = {"role": "system", "content": "Be terse."}
FIVE = {"role": "assistant", "content": "5"}
OTHER = {"prompt": "other", "answer": "0"}  # a file needs two prompts, one of them to hold out


def build(path: Path, **keys: Any) -> Task:
    return build_task(TaskSection.model_validate({"name": "file", "train_path": path, "eval_size": 1, **keys}))


def write(path: Path, *rows: dict[str, Any]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def problems(path: Path, **keys: Any) -> list[Problem]:
    task = build(path, **keys)
    return sorted((*task.train, *task.heldout), key=lambda problem: problem.id)


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"prompt": "p", "answer": "a", "data_source": "x"}, "p", "a"),
        ({"question": "q", "answer": "so\n#### 72"}, "q", "so\n#### 72"),  # GSM8K
        ({"problem": "q", "solution": "$1$", "level": "Level 5"}, "q", "$1$"),  # MATH
        ({"prompt": "p", "response": "r"}, "p", "r"),
        ({"prompt": "p", "completion": "c"}, "p", "c"),
        ({"prompt": "p", "reward_model": {"ground_truth": "7", "style": "rule"}, "extra_info": {"index": 0}}, "p", "7"),  # verl
        ({"prompt": [ASK], "reward_model": {"ground_truth": 7}}, "What is 2+3?", "7"),
        ({"prompt": [ASK], "completion": [FIVE]}, "What is 2+3?", "5"),  # TRL
        ({"messages": [SYSTEM, ASK, FIVE], "id": "1"}, "system: Be terse.\n\nuser: What is 2+3?", "5"),
        ({"messages": [ASK], "answer": 5}, "What is 2+3?", "5"),
        ({"prompt": "p", "question": None, "answer": "a", "solution": None}, "p", "a"),  # null is absent
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_of_common_sets(tmp_path: Path, row: dict[str, Any], prompt: str, answer: str, suffix: str) -> None:
    second = json.loads(json.dumps(row).replace("2+3", "3+2").replace('"p"', '"p2"').replace('"q"', '"q2"'))
    path = write(tmp_path / f"t.{suffix}", row, second)
    first, other = problems(path)
    assert (first.id, first.prompt, first.answer) == (f"{path}:1", prompt, answer)
    assert other.id == f"{path}:2" and other.prompt != prompt and other.answer == answer


def test_a_conversation_keeps_its_turns_and_the_answers_turn_is_apart(tmp_path: Path) -> None:
    reply = {**FIVE, "reasoning": "2 and 3"}
    rows = [{"messages": [SYSTEM, ASK, reply]}, {"messages": [ASK, FIVE, ASK, FIVE]}]
    for suffix in ("jsonl", "parquet"):  # in Parquet every turn has every key, null where it has none
        one, two = problems(write(tmp_path / f"t.{suffix}", *rows))
        assert (one.messages, one.reply) == ((SYSTEM, ASK), reply)
        assert (two.messages, two.reply) == ((ASK, FIVE, ASK), FIVE)


def test_settings_decide_where_a_row_has_several(tmp_path: Path) -> None:
    row = {"problem": "q", "messages": [ASK, FIVE], "solution": "long", "answer": "short", "extra": {"deep": "d"}}
    path = write(tmp_path / "t.jsonl", row, {**row, "problem": "q2", "messages": [SYSTEM, ASK, FIVE]})

    def first(prompt: str, answer: str) -> tuple[str, str, tuple[Any, ...], Any]:
        one = problems(path, prompt_column=prompt, answer_column=answer)[0]
        return one.prompt, one.answer, one.messages, one.reply

    assert first("problem", "solution") == ("q", "long", (), None)
    assert first("problem", "extra.deep") == ("q", "d", (), None)
    assert first("messages", "answer") == ("What is 2+3?", "short", (ASK,), None)
    assert first("messages", "messages") == ("What is 2+3?", "5", (ASK,), FIVE)
    for keys, text in [
        ({}, "has both problem and messages; keep one, or name one in task.prompt_column"),
        ({"prompt_column": "problem"}, "has both answer and solution; keep one, or name one in task.answer_column"),
        (
            {"prompt_column": "messages"},
            "messages ends with an assistant's turn and there is answer, too; set task.answer_column to messages or answer",
        ),
        ({"prompt_column": "problm"}, "task.prompt_column=problm: no such field, or null; did you mean problem?"),
        (
            {"prompt_column": "problem", "answer_column": "extra.depe"},
            "task.answer_column=extra.depe: no such field, or null; did you mean extra.deep?",
        ),
    ]:
        with pytest.raises(UsageError, match=re.escape(f"{path}:1: {text}")):
            build(path, **keys)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"text": "t", "answer": "a"},
            "has no field prompt (nor question, problem, messages); it has text, answer; task.prompt",
        ),
        ({"quesion": "t", "answer": "a"}, "has no field question; did you mean quesion?; task.prompt_column names another"),
        ({"prompt": "p", "solutions": "a"}, "has no field solution; did you mean solutions?; task.answer_column names another"),
        (
            {"question": "p"},
            "has no field answer (nor solution, response, completion, reward_model.ground_truth); it has question",
        ),
        ({"messages": [ASK]}, "has no field answer"),
        ({"messages": [FIVE]}, "messages has no turn that asks for an answer"),
        ({"messages": []}, "messages has no turn that asks"),
        ({"messages": ["hello"]}, "messages[0]=hello: must be {role: ..., content: ...}"),
        ({"messages": [{"from": "human", "value": "x"}]}, "messages[0]: has no role; it has from, value"),
        ({"messages": [{"rol": "user", "content": "x"}]}, "messages[0]: has no role; did you mean rol?"),
        ({"messages": [ASK, {"role": "assistant"}]}, "messages[1]: has no content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content=[{'type': 'image'}]: must be a text",
        ),
        ({"messages": [{"role": "user", "content": " "}, FIVE]}, "messages[0]: the user's turn is blank"),
        ({"messages": "hello", "answer": "a", "prompt": None}, None),
        ({"prompt": [ASK], "completion": [FIVE, ASK]}, "completion must be a text or one assistant's turn, not 2 turns"),
        ({"prompt": {"a": 1}, "answer": "a"}, "prompt={'a': 1}: must be a text or a list of {role, content}"),
        ({"prompt": [ASK], "answer": "\ud800"}, "answer='\\ud800': has half a surrogate pair"),
    ],
)
def test_what_is_wrong_with_a_row_is_one_line(tmp_path: Path, row: dict[str, Any], text: str | None) -> None:
    path = write(tmp_path / "t.jsonl", OTHER, row)
    if text is None:  # a text in `messages` is a prompt as any other
        assert problems(path)[1].prompt == "hello"
        return
    with pytest.raises(UsageError) as caught:
        build(path)
    shown = str(caught.value)
    assert shown.startswith(f"{path}:2: {text}"), shown
    assert "\n" not in shown and len(shown) < 300 + len(str(path))


def test_parquet_is_read_in_order_and_only_the_columns_that_count(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": i, "image": b"x"} for i in range(3000)]  # several batches
    path = write(tmp_path / "t.parquet", *rows)
    found = {p.id: (p.prompt, p.answer) for p in problems(path, scorer="numeric")}
    assert found == {f"{path}:{i + 1}": (f"q{i}", str(i)) for i in range(3000)}


def test_a_bad_row_of_parquet_is_named_by_number(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": "7" if i != 1500 else "seven"} for i in range(2000)]
    path = write(tmp_path / "t.parquet", *rows)
    with pytest.raises(
        UsageError, match=re.escape(f"{path}:1501: answer='seven': must contain a number for task.scorer=numeric")
    ):
        build(path, scorer="numeric")
    path = write(tmp_path / "u.parquet", {"qestion": "q", "answer": "7", "level": 1})
    with pytest.raises(UsageError, match=re.escape(f"{path}:1: has no field question; did you mean qestion?")):
        build(path)
    for row in ({"text": "q", "answer": "7", "level": 1}, {"text": "q", "label": 1}):
        path = write(tmp_path / "v.parquet", row)
        with pytest.raises(
            UsageError, match=rf"v.parquet:1: has no field prompt \(nor .*\); it has {', '.join(row)}; task.prompt"
        ):
            build(path)


def test_files_that_are_not_what_their_names_say(tmp_path: Path) -> None:
    good = write(tmp_path / "g.parquet", *[{"prompt": f"p{i}" * 50, "answer": "a"} for i in range(500)])
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(good.read_bytes()[:-100])
    text = tmp_path / "text.parquet"
    text.write_text('{"prompt": "p", "answer": "a"}\n')
    (tmp_path / "empty.parquet").write_bytes(b"")
    torn = bytearray(good.read_bytes())
    torn[40:140] = bytes(100)  # the footer is whole, a page is not
    (tmp_path / "torn.parquet").write_bytes(torn)
    for name in ("cut", "text", "empty", "torn"):
        with pytest.raises(UsageError, match=rf"^task.train_path=.*{name}.parquet: is not Parquet that can be read") as caught:
            build(tmp_path / f"{name}.parquet")
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 350
    wrong = tmp_path / "data.jsonl"
    wrong.write_bytes(good.read_bytes())
    with pytest.raises(UsageError, match="data.jsonl: is Parquet; give it a name that ends in .parquet"):
        build(wrong)
    with pytest.raises(UsageError, match=r"no\.parquet: cannot be read: No such file"):
        build(tmp_path / "no.parquet")
    (tmp_path / "array.json").write_text('[\n  {"prompt": "p", "answer": "a"}\n]\n')
    with pytest.raises(UsageError, match=r"array.json:1: is not JSON: .*; the file must hold one object a line, not an array"):
        build(tmp_path / "array.json")


def test_compressed_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "p", "answer": "a"}\n{"prompt": "q", "answer": "b"}\n'))
    assert [(p.id, p.prompt) for p in problems(path)] == [(f"{path}:1", "p"), (f"{path}:2", "q")]
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(UsageError, match=r"t.jsonl.gz: is not gzip that can be read"):
        build(path)


def test_one_prompt_as_text_and_as_a_conversation_is_the_same(tmp_path: Path) -> None:
    train = write(tmp_path / "t.jsonl", {"prompt": "What is 2+3?", "answer": "5"})
    heldout = write(tmp_path / "e.parquet", {"messages": [ASK, FIVE]})
    with pytest.raises(UsageError, match=re.escape(f"{heldout}:1: prompt 'What is 2+3?' is also at {train}:1")):
        build(train, eval_path=heldout)


def test_the_earlier_name_of_the_task_still_works(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", OTHER, {"prompt": "p", "answer": "a"})
    assert fingerprint(build(path, name="jsonl")) == fingerprint(build(path))


def test_a_fingerprint_sees_turns_and_their_other_keys(tmp_path: Path) -> None:
    seen = set()
    for number, reply in enumerate([FIVE, {**FIVE, "reasoning": "x"}, {**FIVE, "reasoning": "y"}]):
        for ask in (ASK, {**ASK, "name": "Ann"}):
            path = write(tmp_path / "t.jsonl", {"messages": [ask, reply]}, {"messages": [SYSTEM, ASK, FIVE]})
            seen.add(fingerprint(build(path)))
        assert len(seen) == 2 * number + 2
