"""Settings of the stability watch: `drift.watch.RULE.threshold`, `.action` and, where a rule needs them, a window or a floor.

Why each default is what it is, and what was measured with it: docs/stability_watch.md.
"""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from moe_rl.section import Section

Action = Literal["off", "log", "save", "stop", "replay"]


class RuleSection(Section):
    """What every rule has."""

    threshold: NonNegativeFloat
    action: Action = Field(default="log", description="what an alarm does")


class RewardRule(RuleSection):
    threshold: float = Field(default=0.75, gt=0, lt=1, description="alarm below this share of the best smoothed reward")
    window: PositiveInt = Field(default=10, description="steps averaged")
    floor: PositiveFloat = Field(default=0.1, description="a best reward below this is nothing to lose: no alarm")


class SignalRule(RuleSection):
    threshold: PositiveFloat = Field(default=0.02, description="alarm below this reward/group_std, averaged over the window")
    window: PositiveInt = Field(default=10, description="steps averaged")
    low_reward: float = Field(default=0.5, description="no alarm at a mean reward of this or more: that is success")


class RatioMeanRule(RuleSection):
    threshold: PositiveFloat = Field(default=0.1, description="alarm above this |ratio/mean - 1|")


class RatioTailRule(RuleSection):
    threshold: float = Field(default=0.05, gt=0, lt=1, description="alarm above this share of ratios beyond a factor 2")


class EntropyLowRule(RuleSection):
    threshold: float = Field(default=0.2, gt=0, lt=1, description="alarm below this share of the entropy at the start")
    window: PositiveInt = Field(default=5, description="steps averaged")
    low_reward: float = Field(default=0.5, description="no alarm at a mean reward of this or more: certainty that is earned")


class EntropyHighRule(RuleSection):
    threshold: float = Field(default=1.5, gt=1, description="alarm above this multiple of the entropy at the start")
    window: PositiveInt = Field(default=5, description="steps averaged")


class GradNormRule(RuleSection):
    threshold: float = Field(default=4.0, gt=1, description="alarm above this multiple of the running median")
    window: PositiveInt = Field(default=20, description="earlier steps whose median it is")


class ExpertChangeRule(RuleSection):
    threshold: float = Field(default=3.0, gt=1, description="alarm above this multiple of the run's early level")
    window: PositiveInt = Field(default=5, description="steps whose median is compared")
    noise_multiple: NonNegativeFloat = Field(
        default=3.0, description="and only above this multiple of drift/noise, where that is measured"
    )
    floor: PositiveFloat = Field(default=0.005, description="the least early level that is counted with: a rate, 0 to 1")


class ExpertChangeLevelRule(RuleSection):
    threshold: float = Field(default=0.05, gt=0, lt=1, description="alarm above this rate")
    window: PositiveInt = Field(default=5, description="steps whose median it is")
    noise_multiple: NonNegativeFloat = Field(
        default=3.0, description="and only above this multiple of drift/noise, where that is measured"
    )


class LoadEntropyRule(RuleSection):
    threshold: float = Field(default=0.85, gt=0, lt=1, description="alarm below this share of the load entropy at the start")
    window: PositiveInt = Field(default=5, description="steps averaged")


class MaxViolationRule(RuleSection):
    threshold: float = Field(default=2.0, gt=1, description="alarm above this multiple of the largest load at the start")
    window: PositiveInt = Field(default=5, description="steps averaged")


class DeadExpertsRule(RuleSection):
    threshold: float = Field(
        default=2.0, gt=1, description="alarm above this multiple of the dead experts at the start (of 1 where fewer)"
    )
    window: PositiveInt = Field(default=5, description="steps averaged")


class WatchSection(Section):
    """The rules, by the names that alarms carry."""

    enabled: bool = Field(default=True, description="look for signs of instability in the metrics of every step")
    warmup: PositiveInt = Field(
        default=5, description="steps whose median is the level at the start; no alarm before it is known"
    )
    quiet: PositiveInt = Field(default=10, description="steps without cause after which a rule that fired may fire again")
    reward: RewardRule = RewardRule()
    signal: SignalRule = SignalRule()
    ratio_mean: RatioMeanRule = RatioMeanRule()
    ratio_tail: RatioTailRule = RatioTailRule()
    entropy_low: EntropyLowRule = EntropyLowRule()
    entropy_high: EntropyHighRule = EntropyHighRule()
    grad_norm: GradNormRule = GradNormRule()
    expert_change: ExpertChangeRule = ExpertChangeRule()
    expert_change_level: ExpertChangeLevelRule = ExpertChangeLevelRule()
    load_entropy: LoadEntropyRule = LoadEntropyRule()
    max_violation: MaxViolationRule = MaxViolationRule()
    dead_experts: DeadExpertsRule = DeadExpertsRule()
