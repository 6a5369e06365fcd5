"""Run directories as a training run leaves them, made up: drift that grows with the minibatch, flips near ties, alarms."""

import json
import math
from pathlib import Path

import numpy as np

from moe_rl.drift import traces
from moe_rl.drift.traces import Header

LAYERS = (1, 2, 3, 5)  # the others are dense
EXPERTS, TOPK, MINIBATCHES = 8, 2, 4
CONFIG = """\
run: {{name: {name}, steps: {steps}, seed: 0}}
model: {{layers: 6, hidden: 64, experts: 8, topk: 2, load_balancing: none}}
task: {{name: reversal}}
rollout: {{prompts: 16, responses: 8, max_response_tokens: 10}}
algorithm: {{name: {algorithm}, minibatches: 4, epochs: 1, clip_low: null, clip_high: null}}
replay: {{mode: "off"}}
optimizer: {{lr: {lr}, schedule: cosine}}
"""


def make_run(
    directory: Path, algorithm: str = "gspo", steps: int = 60, scale: float = 1.0, traced: int = 3, seed: int = 0
) -> Path:
    """A run directory with config.yaml, metrics.jsonl and `traced` trace files. scale: how much routing drifts."""
    directory.mkdir(parents=True)
    config = CONFIG.format(name=directory.name, steps=steps, algorithm=algorithm, lr=1e-4 * scale)
    (directory / "config.yaml").write_text(config)
    rng = np.random.default_rng(seed)
    lines = [_line(step, steps, scale, rng) for step in range(steps + 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    header = Header(directory.name, algorithm, "off", LAYERS, EXPERTS, TOPK)
    for step in np.linspace(1, steps, traced).astype(int) if traced else ():
        traces.write(directory, int(step), header, trace_columns(int(step), scale, rng))
    return directory


def _line(step: int, steps: int, scale: float, rng: np.random.Generator) -> dict[str, float | None]:
    if step == 0:
        return {"step": 0, "eval/pass_at_1": 0.2}
    gone = step / steps
    line: dict[str, float | None] = {
        "step": step,
        "reward/mean": 0.2 + 0.6 * (1 - math.exp(-3 * gone)) + rng.normal(0, 0.03),
        "reward/group_std": 0.3 * (1 - gone),
        "entropy/mean": 1.5 * math.exp(-2 * gone) + rng.normal(0, 0.02),
        "optimizer/grad_norm": math.exp(rng.normal(-1, 0.3)),
        "optimizer/lr": 1e-4 * scale,
        "ratio/mean": 1 + rng.normal(0, 1e-4),
        "ratio/max": 1 + 0.4 * scale * math.exp(rng.normal(0, 0.5)),
        "ratio/log_abs_mean": 1e-3 * scale * math.exp(rng.normal(0, 0.3)),
        "ratio/clip_fraction": min(1.0, 0.15 * scale + rng.normal(0, 0.02)),
        "ratio/tail_fraction": 1e-3 * scale,
        "ratio/effective_sample_share": 1 - 1e-3 * scale,
        "kl/old_new": None,  # not finite
        "kl/ref": 0.01 * scale * gone,
    }
    if step % 10 == 0:
        line["eval/pass_at_1"] = 0.2 + 0.6 * gone
    if scale > 1 and gone > 0.7 and step % 6 == 0:
        line["alarm/ratio_tail"] = 1.0
    for minibatch in (None, *range(MINIBATCHES)):
        suffix = "" if minibatch is None else f"/minibatch_{minibatch}"
        growth = MINIBATCHES / 2 - 0.5 if minibatch is None else minibatch
        _add_layers(line, "drift/update", suffix, growth * scale * (0.3 + gone), rng)
    _add_layers(line, "drift/update/prompt", "", 0.5 * scale, rng)
    for layer in LAYERS:
        line[f"drift/load/load_entropy/layer_{layer:02d}"] = 0.9 - 0.05 * gone * layer
    line["drift/load/load_entropy/mean"] = 0.9 - 0.05 * gone * sum(LAYERS) / len(LAYERS)
    line["drift/update/router_kl/mean"] = 1e-4 * scale * (1 + gone)
    line["drift/update/any_layer_flip_rate"] = 0.1 * scale
    if step % 10 == 0:
        for comparison, size in (("engine", 0.2), ("noise", 0.05), ("probe", 3 * gone)):
            _add_layers(line, f"drift/{comparison}", "", size, rng)
    return line


def _add_layers(line: dict[str, float | None], prefix: str, suffix: str, size: float, rng: np.random.Generator) -> None:
    rates = [0.002 * size * (1 + place) * math.exp(rng.normal(0, 0.2)) for place in range(len(LAYERS))]
    for metric, factor in (("expert_change_rate", 1.0), ("flip_rate", 1.9)):
        for layer, rate in zip(LAYERS, rates, strict=True):
            line[f"{prefix}/{metric}/layer_{layer:02d}{suffix}"] = rate * factor
        line[f"{prefix}/{metric}/mean{suffix}"] = factor * sum(rates) / len(rates)
        line[f"{prefix}/{metric}/worst{suffix}"] = factor * max(rates)


def trace_columns(step: int, scale: float, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """16 sequences of 4 prompt and 8 response tokens, a quarter of them in each update."""
    sequences, prompt, length = 16, 4, 12
    sample = np.arange(sequences).repeat(length)
    position = np.tile(np.arange(length), sequences)
    update = sample * MINIBATCHES // sequences
    response = position >= prompt - 1
    tokens, layers = len(sample), len(LAYERS)
    scores = rng.normal(0, 1, (tokens, layers, EXPERTS)) + np.linspace(1, 0, EXPERTS)
    moved = scores + rng.normal(0, 0.05 * scale, scores.shape) * update[:, None, None]
    old, new = (np.argsort(-s, -1)[..., :TOPK] for s in (scores, moved))
    flips = (np.sort(old, -1) != np.sort(new, -1)).any((1, 2))
    old_logprob = np.where(response, -np.abs(rng.normal(1, 0.5, tokens)), np.nan)
    log_ratio = rng.normal(0, 0.002 * scale, tokens) * update * np.where(flips, 4, 1)
    advantage = rng.normal(0, 1, sequences)[sample]
    ranked = [-np.sort(-s, -1) for s in (scores, moved)]
    return {
        "step": np.full(tokens, step),
        "update": update,
        "policy_version": np.full(tokens, (step - 1) * MINIBATCHES),
        "sample": sample,
        "position": position,
        "token": rng.integers(0, 256, tokens),
        "target": rng.integers(0, 256, tokens),
        "response": response,
        "advantage": advantage,
        "reward": (advantage > 0).astype(float),
        "clipped": response & (np.abs(log_ratio) > 0.006 * scale),
        "rollout_logprob": old_logprob + rng.normal(0, 1e-6, tokens),
        "old_logprob": old_logprob,
        "train_logprob": old_logprob + log_ratio,
        "rollout_routes": old,
        "old_routes": old,
        "new_routes": new,
        "old_margin": ranked[0][..., TOPK - 1] - ranked[0][..., TOPK],
        "new_margin": ranked[1][..., TOPK - 1] - ranked[1][..., TOPK],
    }
