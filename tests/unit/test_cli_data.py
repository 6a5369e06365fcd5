"""What is wrong with a user's data, tokenizer or chat settings ends `moe-rl` before anything starts, in one line."""

import json
from pathlib import Path

import pytest

from moe_rl import cli
from tests.chat_tokenizers import BOS_NO_SYSTEM, CHATML, save_tokenizer

TALK = {"messages": [{"role": "user", "content": "What is 2+3?"}, {"role": "assistant", "content": "5"}]}
FILE = """\
run: {name: one}
model: {preset: tiny_moe, vocab_size: 400}
task: {name: file, train_path: talk.jsonl}
sft: {steps: 2}
"""


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    save_tokenizer(root / "chatml", CHATML)
    save_tokenizer(root / "bos", BOS_NO_SYSTEM, eos="</s>", bos=True)
    save_tokenizer(root / "bare", None)
    return root


@pytest.fixture
def started(tmp_path: Path, tokenizers: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that got as far as to start, in a directory with data and tokenizers."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "tokenizers").symlink_to(tokenizers)
    (tmp_path / "one.yaml").write_text(FILE)
    second = json.loads(json.dumps(TALK).replace("2+3", "3+2"))
    long = {"messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one " * 90}]}
    (tmp_path / "talk.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in (TALK, second)))
    (tmp_path / "long.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in (TALK, second, long, long)))
    found: list[str] = []
    monkeypatch.setattr(cli, "_entry", lambda command: lambda config: found.append(command))
    monkeypatch.setattr("parallel.launch.launch", lambda command, processes, threads: bool(found.append("launched")))
    return found


CHAT = "model.tokenizer=tokenizers/chatml"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("train one.yaml", "talk.jsonl:1: the prompt is a conversation, which needs a chat template, and bytes has no chat"),
        ("train one.yaml model.tokenizer=tokenizers/bare", "the prompt is a conversation, which needs a chat template"),
        (f"train one.yaml {CHAT} task.chat=maybe", "task.chat=maybe: must be 'auto', True or False"),
        (f"train one.yaml {CHAT} task.chat=false", "talk.jsonl:1: the prompt is a conversation"),
        (
            f"train one.yaml {CHAT} task.template_options.thinking=1",
            "task.template_options.thinking: the chat template of chatml",
        ),
        (
            "train one.yaml model.tokenizer=tokenizers/bos task.system=Hi",
            "refuses the conversation (system, user): System role",
        ),
        (f"train one.yaml {CHAT} rollout.stop=[</s>x]", "rollout.stop: '</s>x' holds the special token </s>"),
        (f"train one.yaml {CHAT} rollout.stop=['']", "rollout.stop[0]='': must have at least 1 character"),
        (f"train one.yaml {CHAT} rollout.stop=x", "rollout.stop=x: must be a valid list"),
        (
            f"train one.yaml {CHAT} task.prompt_column=mesages",
            "talk.jsonl:1: task.prompt_column=mesages: no such field, or null; did",
        ),
        (f"train one.yaml {CHAT} model.vocab_size=300", "model.vocab_size=300: must be at least 340, the ids of the tokenizer"),
        (f"sft one.yaml {CHAT} task.train_path=long.jsonl", "problem long.jsonl:3: its prompt and answer of"),
        (f"train one.yaml {CHAT} task.train_path=long.jsonl", "or set sft.too_long=skip"),
        (f"sft one.yaml {CHAT} sft.train_on=al", "sft.train_on=al: must be 'last' or 'all'; did you mean all?"),
        (
            "train one.yaml task.name=addition task.train_path=x.parquet",
            "task.train_path=x.parquet: only task.name=file reads it",
        ),
    ],
)
def test_bad_input_is_one_line(started: list[str], capsys: pytest.CaptureFixture[str], command: str, says: str) -> None:
    assert cli.main(command.split()) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("moe-rl: error: ") and says in shown and shown.count("\n") == 1, shown
    assert not started


@pytest.mark.parametrize(
    "command",
    [
        f"train one.yaml {CHAT}",
        f"train one.yaml {CHAT} task.system=Hi task.template_options.enable_thinking=false rollout.stop=[</s>,x]",
        "train one.yaml model.tokenizer=tokenizers/bos",
        f"sft one.yaml {CHAT} task.train_path=long.jsonl sft.too_long=skip",
        f"train one.yaml {CHAT} task.train_path=long.jsonl sft.steps=0",  # no example is taught, no answer is too long
    ],
)
def test_what_is_right_starts(started: list[str], command: str) -> None:
    assert cli.main(command.split()) == 0
    assert len(started) == 1
