"""Small runs through the real trainer: their settings, and what they leave behind."""

import json
from pathlib import Path
from typing import Any

import torch

from moe_rl import config
from moe_rl.config import RunConfig

YAML = """
run: {steps: 2}
model: {preset: tiny_moe, hidden: 32, head_dim: 8, ffn: 48, moe_ffn: 32}
task: {name: jsonl, scorer: "tests.distributed.rewards:share_of_even", eval_size: 8}
rollout: {prompts: 4, responses: 4, max_response_tokens: 6}
algorithm: {name: grpo, minibatches: 4}
optimizer: {lr: 1e-3}
eval: {problems: 8}
tracking: {rollouts_every: 0}
"""


class Runs:
    """A folder of runs that share their problems."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.yaml = folder, folder / "run.yaml"
        problems = folder / "problems.jsonl"
        lines = [json.dumps({"prompt": "0" * (i % 7) + f"{i}:", "answer": "even"}) for i in range(64)]
        problems.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.yaml.write_text(YAML, encoding="utf-8")
        self.shared = [f"run.dir={folder}", f"task.train_path={problems}"]

    def config(self, name: str, *overrides: str) -> RunConfig:
        return config.load(self.yaml, [*self.shared, f"run.name={name}", *overrides])

    def steps(self, name: str) -> list[dict[str, Any]]:
        """metrics.jsonl without times: line i is of step i."""
        text = (self.folder / name / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["step"] for line in lines] == list(range(len(lines)))
        return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]

    def saved(self, name: str, step: int, inside: str = "") -> dict[str, Any]:
        """Everything in a checkpoint, by name; inside="critic": in the critic's."""
        return read(self.folder / name / "checkpoints" / f"step_{step:06d}" / inside)


def read(checkpoint: Path) -> dict[str, Any]:
    """The tensors of a checkpoint and whatever else is in it, by name."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, target)
    return torch.load(target, weights_only=False)


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def differing(ours: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Names of tensors that are not the same to the bit, or on one side alone."""
    mine, theirs = tensors(ours), tensors(wanted)
    return [
        k
        for k in sorted(mine.keys() | theirs.keys())
        if k not in mine or k not in theirs or not torch.equal(mine[k], theirs[k])
    ]
