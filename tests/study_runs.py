"""Run directories of a grid, made up from a few numbers a step, and work that fails."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONFIG = """\
run: {{name: {name}, steps: {steps}, seed: {seed}}}
algorithm: {{name: {algorithm}, minibatches: {minibatches}}}
replay: {{mode: "{replay}"}}
optimizer: {{lr: {lr}}}
"""


def make(
    root: Path,
    method: str,
    minibatches: int,
    lr: float,
    seed: int,
    rewards: Sequence[float],
    passed: tuple[float, float] | None,
    change: Sequence[float] = (),
    more: Mapping[int, Mapping[str, float]] | None = None,
) -> Path:
    """A run of len(rewards) steps. passed: pass@1 before and after; None: interrupted before its end.

    change: expert change rate at the last minibatch, a step; under replay of the natural choice. more: further keys by step.
    """
    algorithm, _, replay = method.partition("_")
    directory = root / f"{method}-m{minibatches}-lr{lr:g}-s{seed}"
    directory.mkdir(parents=True)
    fields = {"name": directory.name, "steps": len(rewards), "seed": seed, "algorithm": algorithm, "lr": lr}
    (directory / "config.yaml").write_text(CONFIG.format(**fields, minibatches=minibatches, replay=replay or "off"))
    lines: list[dict[str, Any]] = [{"step": 0, "eval/pass_at_1": (passed or (0.5,))[0]}]
    for step, reward in enumerate(rewards, start=1):
        line: dict[str, Any] = {"step": step, "reward/mean": reward, **(more or {}).get(step, {})}
        if change:
            key = "expert_change_rate/mean/minibatch_"
            for minibatch in range(minibatches):  # the earlier ones are not looked at
                last = change[step - 1] if minibatch == minibatches - 1 else 0.9
                line[f"drift/update/{key}{minibatch}"] = 0.0 if replay else last
                if replay:
                    line[f"drift/update/local/{key}{minibatch}"] = last
        lines.append(line)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if passed is not None:
        (directory / "summary.json").write_text(json.dumps({"step": len(rewards), "eval/pass_at_1": passed[1]}))
    return directory


FALLING = [0.4, 0.4, 0.4, 0.0, 0.0, 0.0, 0.0, 0.0]  # means so far: .4 .4 .4 .3 .24 .2 .171 .15: below .2 from step 7 on
RISING = [0.2, 0.2, *[0.3] * 8, 0.5, 0.5]
FAR = {"ratio/mean": 2.0}  # fires the rule ratio_mean


def small_grid(root: Path) -> list[Path]:
    """Two methods x minibatches 1 and 4 x two learning rates, one seed; the higher rate collapses; one run is missing."""
    made = []
    for method, shift in (("grpo", 0.0), ("grpo_r2", 0.05)):
        for minibatches in (1, 4):
            rate = 0.01 * (minibatches - 1)
            probe = {"drift/probe/expert_change_rate/mean": 0.1, "drift/probe/router_shift/mean": 0.01}
            calm = make(root, method, minibatches, 5e-5, 0, RISING, (0.4, 0.6 + shift), [rate] * 12, {12: probe})
            made.append(calm)
            if (method, minibatches) != ("grpo_r2", 4):
                made.append(make(root, method, minibatches, 6e-4, 0, FALLING, (0.4, 0.0), [3 * rate] * 8, {4: FAR, 8: probe}))
    return [*made, root / "grpo_r2-m4-lr0.0006-s0"]


def broken(number: int) -> float:
    """For a spawned process, which imports this module: it brings no torch."""
    if number == 2:
        raise ValueError("two\nis out")
    return number / 4


def killed(number: int) -> float:
    os._exit(number)
