"""The settings `algorithm:` and `critic:`, checked against the table. What is null is the algorithm's own default."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from models.config import OptimizerConfig
from moe_rl.algorithms.table import (
    ALGORITHMS,
    SEQUENCE_OBJECTIVES,
    Aggregation,
    Algorithm,
    Estimator,
    KLEstimator,
    Name,
)
from moe_rl.section import Section

# (low, high) of each correction; None: no such bound
CORRECTION_BOUNDS: dict[str, tuple[float | None, float]] = {
    "tis": (None, 2.0),
    "mis": (None, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.999, 1.001),
}


class CorrectionSection(Section):
    """Weights for what the engine that sampled and the trainer disagree by with the same weights (corrections.py)."""

    mode: Literal["off", "tis", "mis", "icepop", "sequence_mask"] = Field(
        default="off",
        description="of old / rollout probability: tis: cut at high; mis: 0 above high; icepop: 0 outside [low, high]; "
        "sequence_mask: 0 for sequences whose geometric mean is outside [low, high], 1 for others",
    )
    level: Literal["token", "sequence"] = Field(
        default="token", description="tis, mis: a ratio a token, or the product over a sequence for all of its tokens"
    )
    low: PositiveFloat | None = Field(default=None, description="none: icepop 0.5, sequence_mask 0.999")
    high: PositiveFloat | None = Field(default=None, description="none: tis and mis 2, icepop 5, sequence_mask 1.001")

    @property
    def bounds(self) -> tuple[float | None, float]:
        """(low or None, high) of a mode that is not off."""
        low, high = CORRECTION_BOUNDS[self.mode]
        return self.low if self.low is not None else low, self.high if self.high is not None else high

    @model_validator(mode="after")
    def _check(self) -> Self:
        key = "algorithm.correction"
        if self.mode == "off":
            if idle := [name for name in ("low", "high") if getattr(self, name) is not None]:
                raise ValueError(f"{key}.{idle[0]}={getattr(self, idle[0]):g}: nothing is corrected; set {key}.mode")
            return self
        if self.level == "sequence" and self.mode == "icepop":
            raise ValueError(f"{key}.level=sequence: icepop decides for each token; set {key}.mode=sequence_mask or mis")
        low, high = self.bounds
        if CORRECTION_BOUNDS[self.mode][0] is None and low is not None:
            raise ValueError(f"{key}.low={low:g}: {self.mode} has no lower bound; leave it out, or set {key}.mode=icepop")
        if low is not None and low >= high:
            raise ValueError(f"{key}.low={low:g}: must be below {key}.high={high:g}")
        if high < 1 or (low is not None and low > 1):
            name, value = ("high", high) if high < 1 else ("low", low)
            side = "at least 1" if high < 1 else "at most 1"
            raise ValueError(f"{key}.{name}={value:g}: must be {side}, the ratio of an engine that agrees with the trainer")
        return self


class AlgorithmSection(Section):
    name: Name = "gspo"
    minibatches: PositiveInt = Field(default=4, description="updates a rollout batch is split into")
    epochs: PositiveInt = Field(default=1, description="passes over a rollout batch")
    clip_low: PositiveFloat | None = Field(
        default=None, le=1, description="ratios are clipped below 1 - clip_low (1: no bound); none: the algorithm's default"
    )
    clip_high: PositiveFloat | None = Field(
        default=None, description="ratios are clipped above 1 + clip_high; none: the algorithm's default"
    )
    sapo_tau_positive: PositiveFloat = Field(default=1.0, description="sapo: sharpness of the gate, advantages above 0")
    sapo_tau_negative: PositiveFloat = Field(default=1.05, description="sapo: the same, advantages below 0")
    aggregation: Aggregation | None = Field(
        default=None, description="how terms of tokens become a loss; none: the algorithm's default"
    )
    aggregation_length: PositiveInt | None = Field(
        default=None, description="constant: tokens a sequence is divided by; none: rollout.max_response_tokens"
    )
    advantage: Estimator | None = Field(
        default=None,
        description="group: reward - mean of the group; leave_one_out: - mean of the others; group_batch: - mean of the group, "
        "over the batch's deviation; batch: returns normalised over the batch; gae: with a value model; none: the algorithm's",
    )
    advantage_std: bool | None = Field(
        default=None, description="group: divide by the group's standard deviation; none: yes, but not in dr_grpo"
    )
    advantage_epsilon: PositiveFloat = Field(default=1e-6, description="added to a deviation before dividing by it")
    dynamic_sampling: bool | None = Field(
        default=None, description="replace groups without both right and wrong answers; none: only in dapo"
    )
    sampling_rounds: PositiveInt = Field(default=4, description="dynamic sampling: rollouts a step at most")
    kl_coefficient: NonNegativeFloat = Field(default=0.0, description="0: no reference model")
    kl_estimator: KLEstimator | None = Field(
        default=None, description="none: k1 in the reward, k3 in the loss (k2 in reinforce_plus_plus_baseline)"
    )
    kl_placement: Literal["loss", "reward"] | None = Field(
        default=None, description="none: reward in ppo, rloo and reinforce_plus_plus, else loss"
    )
    kl_target: PositiveFloat | None = Field(
        default=None, description="mean KL a token (kl/ref) that an adaptive coefficient aims at; none: fixed"
    )
    kl_horizon: PositiveFloat = Field(
        default=10000.0, description="sequences over which the adaptive coefficient moves by its error"
    )
    kl_error_limit: PositiveFloat = Field(
        default=0.2, description="the error, KL / target - 1, counts up to this in either direction"
    )
    reference_on_cpu: bool = Field(
        default=False, description="the reference's weights lie in host memory and are swapped in for its pass"
    )
    entropy_coefficient: NonNegativeFloat = Field(default=0.0, description="bonus on the entropy of next-token distributions")
    router_shift: bool = Field(
        default=False,
        description="scale each token's ratio by how far its routers moved (RSPO); a pass more an update with pipeline stages",
    )
    router_shift_floor: float = Field(default=0.8, gt=0, le=1, description="least such factor")
    correction: CorrectionSection = CorrectionSection()
    microbatch_tokens: PositiveInt = Field(default=4096, description="tokens a microbatch holds at most")

    @property
    def spec(self) -> Algorithm:
        return ALGORITHMS[self.name]

    @property
    def clip(self) -> tuple[float, float] | None:
        """(low, high); None where the algorithm has no clip."""
        low, high = self.spec.clip_low, self.spec.clip_high
        if low is None or high is None:
            return None
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def estimator(self) -> Estimator:
        return self.advantage or self.spec.advantages[0]

    @property
    def divides_by_std(self) -> bool:
        return self.spec.advantage_std if self.advantage_std is None else self.advantage_std

    @property
    def aggregates(self) -> Aggregation:
        return self.aggregation or self.spec.aggregations[0]

    @property
    def samples_dynamically(self) -> bool:
        return self.spec.dynamic_sampling if self.dynamic_sampling is None else self.dynamic_sampling

    @property
    def kl_in_reward(self) -> bool:
        return self.spec.kl_in_reward if self.kl_placement is None else self.kl_placement == "reward"

    @property
    def estimates_kl(self) -> KLEstimator:
        return self.kl_estimator or ("k1" if self.kl_in_reward else self.spec.kl_estimator)

    @property
    def trains_critic(self) -> bool:
        return self.estimator == "gae"

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        spec, name = self.spec, f"algorithm.name={self.name}"
        if self.clip is None and (given := self.clip_low or self.clip_high):
            key = "clip_low" if self.clip_low else "clip_high"
            raise ValueError(
                f"algorithm.{key}={given:g}: {name} has no clip range, its gate is soft; set algorithm.sapo_tau_positive and "
                "algorithm.sapo_tau_negative instead"
            )
        if self.clip is not None and self.clip[0] >= 1 and self.name != "cispo":
            raise ValueError(f"algorithm.clip_low={self.clip[0]:g}: must be below 1; only cispo goes without a lower bound")
        if self.aggregates not in spec.aggregations:
            raise ValueError(
                f"algorithm.aggregation={self.aggregates}: contradicts {name}: {spec.why}{_choices(spec.aggregations)}"
            )
        if self.aggregation_length is not None and self.aggregates != "constant":
            raise ValueError(
                f"algorithm.aggregation_length={self.aggregation_length}: only algorithm.aggregation=constant divides by it, "
                f"and here it is {self.aggregates}; leave it out"
            )
        if self.estimator not in spec.advantages:
            hint = " (gspo_token takes advantages that differ within a sequence)" if self.name == "gspo" else ""
            raise ValueError(
                f"algorithm.advantage={self.estimator}: contradicts {name}: {spec.why}{hint}{_choices(spec.advantages)}"
            )
        if self.name == "dr_grpo" and self.advantage_std:
            raise ValueError(f"algorithm.advantage_std=true: contradicts {name}: {spec.why}")
        if self.advantage_std is not None and self.estimator != "group":
            raise ValueError(
                f"algorithm.advantage_std={str(self.advantage_std).lower()}: only the group estimator divides by the group's "
                f"deviation, and algorithm.advantage is {self.estimator}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_around(self) -> Self:
        correction = self.correction
        if self.spec.objective in SEQUENCE_OBJECTIVES and correction.mode in ("tis", "mis", "icepop"):
            if correction.level == "token":
                raise ValueError(
                    f"algorithm.correction.mode={correction.mode}: weighs tokens one by one, and algorithm.name={self.name} "
                    "has one term a sequence; set algorithm.correction.level=sequence (tis, mis) or mode=sequence_mask"
                )
        idle = [key for key in ("kl_target", "kl_placement", "kl_estimator") if getattr(self, key) is not None]
        if idle and not self.kl_coefficient:
            key, value = idle[0], getattr(self, idle[0])
            raise ValueError(f"algorithm.{key}={value}: there is no KL term; set algorithm.kl_coefficient above 0")
        return self


def _choices(allowed: tuple[str, ...]) -> str:
    return f"; must be {' or '.join(allowed)}"


class CriticOptimizer(OptimizerConfig):
    """As the policy's, with a learning rate of its own."""

    lr: NonNegativeFloat = 1e-5


class CriticSection(Section):
    """The value model of algorithm.advantage=gae: the model's own shape, on the same ranks."""

    optimizer: CriticOptimizer = CriticOptimizer()
    warmup_steps: NonNegativeInt = Field(default=0, description="first steps that train the critic alone")
    clip: PositiveFloat | None = Field(default=0.2, description="values move this far in a step at most; none: off")
    load: Path | None = Field(
        default=None, description="a checkpoint or run whose critic to start from; none: the policy's weights"
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount a token")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="0: one-step advantage; 1: return minus value")
