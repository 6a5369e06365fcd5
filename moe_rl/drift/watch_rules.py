"""The rules of the stability watch: each takes one step's metrics and says how far the run is from calm.

A rule sees the step's metrics and its own memory, and nothing else. A metric that is missing or not finite makes the rule
skip the step: it returns None and remembers nothing of it.
"""

import math
import re
from collections.abc import Callable, Mapping
from statistics import fmean, median
from typing import Any, NamedTuple

from moe_rl.drift.watch_config import (
    DeadExpertsRule,
    EntropyHighRule,
    EntropyLowRule,
    ExpertChangeLevelRule,
    ExpertChangeRule,
    GradNormRule,
    LoadEntropyRule,
    MaxViolationRule,
    RatioMeanRule,
    RatioTailRule,
    RewardRule,
    SignalRule,
)

Line = Mapping[str, float | None]

_LAST_MINIBATCH = re.compile(r"drift/update/(local/)?expert_change_rate/mean/minibatch_(\d+)")


class Reading(NamedTuple):
    """value: what is compared with the threshold. cause: whether that is reason for alarm. text: what it means."""

    value: float
    cause: bool
    text: str


class Memory:
    """What one rule keeps between steps: named lists of numbers, so that it is JSON as it stands."""

    def __init__(self, warmup: int, lists: Mapping[str, list[float]] | None = None) -> None:
        self.warmup = warmup
        self.lists = {name: list(values) for name, values in (lists or {}).items()}

    def recent(self, name: str, value: float, most: int) -> list[float]:
        """The last `most` values of that name, with this one."""
        self.lists[name] = [*self.lists.get(name, []), value][-most:]
        return self.lists[name]

    def start(self, value: float) -> float | None:
        """The median of the first `warmup` values; None for as long as they come in. It stays as it is once it is known."""
        if known := self.lists.get("start"):
            return known[0]
        first = self.recent("first", value, self.warmup)
        if len(first) == self.warmup:
            self.lists["start"] = [median(self.lists.pop("first"))]
        return None

    def best(self, value: float) -> float:
        self.lists["best"] = [max([value, *self.lists.get("best", [])])]
        return self.lists["best"][0]


def reward(section: RewardRule, memory: Memory, metrics: Line) -> Reading | None:
    """The smoothed reward over the best it ever was, counted from the end of the warm-up."""
    now = _finite(metrics, "reward/mean")
    if now is None:
        return None
    recent = memory.recent("reward", now, section.window)
    if len(recent) < min(section.window, memory.warmup):
        return None
    level = fmean(recent)
    best = memory.best(level)
    if best < section.floor:
        return None
    share = level / best
    text = (
        f"reward of {level:.3f} ({section.window} steps) is {share:.0%} of its best {best:.3f}: the policy loses what "
        "it learned; go back to a checkpoint from before, with a lower optimizer.lr or fewer algorithm.minibatches"
    )
    return Reading(share, share < section.threshold, text)


def signal(section: SignalRule, memory: Memory, metrics: Line) -> Reading | None:
    """The spread of rewards within groups, while the reward is low."""
    spread, now = _finite(metrics, "reward/group_std"), _finite(metrics, "reward/mean")
    if spread is None or now is None:
        return None
    rewards, spreads = memory.recent("reward", now, section.window), memory.recent("spread", spread, section.window)
    if len(spreads) < section.window:
        return None
    level, value = fmean(rewards), fmean(spreads)
    text = (
        f"reward/group_std of {value:.4f} ({section.window} steps) at a reward of {level:.3f}: responses to one prompt score "
        "alike, so there is nothing to learn from; take easier problems, more rollout.responses, or more warm start"
    )
    return Reading(value, value < section.threshold and level < section.low_reward, text)


def ratio_mean(section: RatioMeanRule, memory: Memory, metrics: Line) -> Reading | None:
    """The distance of the mean importance ratio from 1, its expectation."""
    now = _finite(metrics, "ratio/mean")
    if now is None:
        return None
    text = (
        f"ratio/mean of {now:.3f}, which samples of the old policy would hold near 1: the new policy is far from the one that "
        "sampled, or old log-probabilities are not its own; lower optimizer.lr or algorithm.minibatches"
    )
    return Reading(abs(now - 1), abs(now - 1) > section.threshold, text)


def ratio_tail(section: RatioTailRule, memory: Memory, metrics: Line) -> Reading | None:
    """The share of importance ratios that are off by more than a factor of 2."""
    now = _finite(metrics, "ratio/tail_fraction")
    if now is None:
        return None
    text = (
        f"{now:.1%} of importance ratios are beyond a factor 2: few samples carry the update; "
        "lower optimizer.lr or algorithm.minibatches, or replay routes if these come from routing"
    )
    return Reading(now, now > section.threshold, text)


def entropy_low(section: EntropyLowRule, memory: Memory, metrics: Line) -> Reading | None:
    """The policy's entropy over that at the start, while the reward is low."""
    now, gained = _finite(metrics, "entropy/mean"), _finite(metrics, "reward/mean")
    if now is None or gained is None:
        return None
    level, rewards = fmean(memory.recent("entropy", now, section.window)), memory.recent("reward", gained, section.window)
    start = memory.start(now)
    if not start:
        return None
    text = (
        f"entropy of {level:.3f} is {level / start:.0%} of {start:.3f} at the start at a reward of {fmean(rewards):.3f}: the "
        "policy is certain without being right and no longer explores; lower optimizer.lr or raise algorithm.clip_high"
    )
    return Reading(level / start, level / start < section.threshold and fmean(rewards) < section.low_reward, text)


def entropy_high(section: EntropyHighRule, memory: Memory, metrics: Line) -> Reading | None:
    """The policy's entropy over that at the start."""
    now = _finite(metrics, "entropy/mean")
    if now is None:
        return None
    level, start = fmean(memory.recent("entropy", now, section.window)), memory.start(now)
    if not start:
        return None
    text = (
        f"entropy of {level:.3f} is {level / start:.1f} times {start:.3f} at the start: the policy comes apart into noise; "
        "go back to a checkpoint from before, with a lower optimizer.lr"
    )
    return Reading(level / start, level / start > section.threshold, text)


def grad_norm(section: GradNormRule, memory: Memory, metrics: Line) -> Reading | None:
    """The largest gradient norm of the step over the median of the steps before it."""
    now = _finite(metrics, "optimizer/grad_norm_max")
    if not now:  # no group differed: no gradient, and none to measure later ones by
        return None
    before = list(memory.lists.get("norm", []))
    memory.recent("norm", now, max(section.window, memory.warmup))
    if len(before) < memory.warmup:
        return None
    usual = median(before[-section.window :])
    text = (
        f"gradient norm of {now:.3g} is {now / usual:.1f} times the usual {usual:.3g}: one update can undo many; "
        "check optimizer.grad_clip and the samples of this step"
    )
    return Reading(now / usual, now / usual > section.threshold, text)


def expert_change(section: ExpertChangeRule, memory: Memory, metrics: Line) -> Reading | None:
    """The expert change rate at the last minibatch over the run's early level, and above the noise floor.

    The early level is taken once the learning rate no longer rises: until then the rate grows with it, as it should.
    """
    now = _last_change(metrics)
    if now is None:
        return None
    level, noise = median(memory.recent("change", now, section.window)), _noise(memory, metrics)
    lr, before = _finite(metrics, "optimizer/lr"), memory.lists.get("lr")
    if lr is not None:
        memory.lists["lr"] = [lr]
        if "start" not in memory.lists and (before is None or lr > before[0]):
            return None
    start = memory.start(now)
    if start is None:
        return None
    usual = max(start, section.floor)
    text = (
        f"expert change rate of {level:.4f} at the last minibatch ({section.window} steps) is {level / usual:.1f} times the "
        f"early {usual:.4f} (noise {noise:.4f}): routing leaves the policy that sampled; lower optimizer.lr or "
        "algorithm.minibatches, replay routes (GRPO) or take algorithm.name=gspo"
    )
    cause = level / usual > section.threshold and level > section.noise_multiple * noise
    return Reading(level / usual, cause, text)


def expert_change_level(section: ExpertChangeLevelRule, memory: Memory, metrics: Line) -> Reading | None:
    """The expert change rate at the last minibatch as it is: high from the first step on, it has no calm level to rise over."""
    now = _last_change(metrics)
    if now is None:
        return None
    recent, noise = memory.recent("change", now, section.window), _noise(memory, metrics)
    if len(recent) < section.window:
        return None
    level = median(recent)
    text = (
        f"expert change rate of {level:.4f} at the last minibatch ({section.window} steps, noise {noise:.4f}): the policy that "
        "is updated uses other experts than the one that sampled; lower optimizer.lr or algorithm.minibatches, replay routes "
        "(GRPO) or take algorithm.name=gspo"
    )
    return Reading(level, level > section.threshold and level > section.noise_multiple * noise, text)


def load_entropy(section: LoadEntropyRule, memory: Memory, metrics: Line) -> Reading | None:
    """The evenness of expert load over that at the start."""
    now = _finite(metrics, "drift/load/load_entropy/mean")
    if now is None:
        return None
    level, start = fmean(memory.recent("load", now, section.window)), memory.start(now)
    if not start:
        return None
    text = (
        f"load entropy of {level:.3f} is {level / start:.0%} of {start:.3f} at the start: tokens gather at few experts; "
        "lower optimizer.lr, or set model.load_balancing"
    )
    return Reading(level / start, level / start < section.threshold, text)


def max_violation(section: MaxViolationRule, memory: Memory, metrics: Line) -> Reading | None:
    """The load of the busiest expert over the mean load (max_violation + 1), over that at the start."""
    now = _finite(metrics, "drift/load/max_violation/mean")
    if now is None:
        return None
    level, start = fmean(memory.recent("load", now + 1, section.window)), memory.start(now + 1)
    if start is None:
        return None
    text = (
        f"the busiest expert takes {level:.2f} times the mean load, {level / start:.1f} times the {start:.2f} at the start: "
        "tokens gather at few experts; lower optimizer.lr, or set model.load_balancing"
    )
    return Reading(level / start, level / start > section.threshold, text)


def dead_experts(section: DeadExpertsRule, memory: Memory, metrics: Line) -> Reading | None:
    """Experts of a layer that no token chose, over their number at the start, which counts as 1 at least."""
    now = _finite(metrics, "drift/load/dead_experts/mean")
    if now is None:
        return None
    level, start = fmean(memory.recent("dead", now, section.window)), memory.start(now)
    if start is None:
        return None
    value = level / max(start, 1.0)
    text = (
        f"{level:.2f} experts a layer get no token (mean over layers), {start:.2f} at the start: the router gives experts up; "
        "lower optimizer.lr, or set model.load_balancing"
    )
    return Reading(value, value > section.threshold, text)


# Any: each takes the section of its own name in WatchSection.
RULES: dict[str, Callable[[Any, Memory, Line], Reading | None]] = {
    "reward": reward,
    "signal": signal,
    "ratio_mean": ratio_mean,
    "ratio_tail": ratio_tail,
    "entropy_low": entropy_low,
    "entropy_high": entropy_high,
    "grad_norm": grad_norm,
    "expert_change": expert_change,
    "expert_change_level": expert_change_level,
    "load_entropy": load_entropy,
    "max_violation": max_violation,
    "dead_experts": dead_experts,
}


def _finite(metrics: Line, key: str) -> float | None:
    value = metrics.get(key)
    return value if value is not None and math.isfinite(value) else None


def _noise(memory: Memory, metrics: Line) -> float:
    """The noise floor of the expert change rate, which is measured now and then: the last one. 0 before the first."""
    if (noise := _finite(metrics, "drift/noise/expert_change_rate/mean")) is not None:
        memory.lists["noise"] = [noise]
    return memory.lists.get("noise", [0.0])[0]


def _last_change(metrics: Line) -> float | None:
    """At the last minibatch, mean over layers; of the natural choice under replay, where the routes used agree by force."""
    found = [match for key in metrics if (match := _LAST_MINIBATCH.fullmatch(key))]
    if any(match[1] for match in found):
        found = [match for match in found if match[1]]
    return _finite(metrics, max(found, key=lambda match: int(match[2]))[0]) if found else None
