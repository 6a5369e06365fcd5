"""A whole run on what a user brings: conversations in a file, a tokenizer with a chat template, stop texts."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe_rl import config as configuration
from moe_rl.sft import sft
from moe_rl.trainer import train
from tests.chat_tokenizers import MARKED, PLAIN, save_tokenizer

pytestmark = pytest.mark.distributed

TALK = [
    ["What is 2+3?", "It is 5.", "And 4?", "24"],
    ["Reverse the word stone, then say why.", "enots"],
    ["You", "are", "terse", "then", "say", "48 72"],
    ["24", "stone written backward."],
    ["And 4?", "48", "And 4?", "72"],
    ["stone " * 9, "stone " * 90],
]


def settings(tmp_path: Path, rows: list[dict[str, Any]], tokenizer: Path, **sections: Any) -> configuration.RunConfig:
    data, held = tmp_path / "talk.jsonl", tmp_path / "held.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held.write_text(json.dumps({"prompt": "What is 3?", "answer": "5"}) + "\n")
    shape = dict(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=32, moe_ffn=16, vocab_size=352, max_positions=96)
    values: dict[str, Any] = {
        "run": {"name": "talk", "dir": str(tmp_path)},
        "model": {"preset": "tiny_moe", **shape, "tokenizer": str(tokenizer)},
        "task": {"name": "file", "train_path": str(data), "eval_path": str(held)},
        **sections,
    }
    (tmp_path / "run.yaml").write_text(json.dumps(values))  # which is YAML
    return configuration.load(tmp_path / "run.yaml")


def steps(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_supervised_steps_on_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roles = ("user", "assistant")
    rows = [{"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]} for turns in TALK]
    section = {"steps": 30, "batch": 5, "lr": 1e-2, "train_on": "all", "too_long": "skip", "warmup_updates": 1}
    tokenizer = save_tokenizer(tmp_path / "marked", MARKED)
    sft(settings(tmp_path, rows, tokenizer, sft=section, rollout={"max_response_tokens": 8}))
    said = capsys.readouterr().out
    assert "note: prompts go through the chat template of the tokenizer marked; task.chat=false leaves them as they are" in said
    assert "1 of 6 examples exceed model.max_positions and are left out" in said
    found = steps(tmp_path / "talk" / "sft.jsonl")
    assert found[0]["sft/loss"] > 5 and found[-1]["sft/loss"] < 1


def test_rl_with_a_stop_text_and_a_tokenizer_that_has_no_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is rewarded ends before the stop; what is trained holds it."""
    rows = [{"prompt": f"{i}", "answer": "1"} for i in range(4)]
    tokenizer = save_tokenizer(tmp_path / "endless", PLAIN, eos=None)
    rollout = {"prompts": 2, "responses": 8, "max_response_tokens": 12, "stop": ["e", "zz"]}
    sections: dict[str, Any] = {
        "rollout": rollout,
        "run": {"name": "talk", "dir": str(tmp_path), "steps": 1},
        "algorithm": {"minibatches": 2},
        "tracking": {"rollouts_every": 1},
    }
    config = settings(tmp_path, rows, tokenizer, **sections)
    train(config)
    assert "note: the tokenizer endless has no end-of-sequence token" in capsys.readouterr().out
    responses = [json.loads(line) for line in (tmp_path / "talk" / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert {one["finish_reason"] for one in responses} == {"stop", "length"}
    for one in responses:
        assert "e" not in one["response"]
        assert one["tokens"] == 12 or one["finish_reason"] == "stop"
