"""The settings `eval:`."""

from typing import Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from moe_rl.section import Section


class EvalSection(Section):
    """What `moe-rl eval` and the evaluations of a run look at. A response passes at a reward of 1, or where the task's Score
    says so by `passed`."""

    every: NonNegativeInt = Field(default=0, description="RL steps between held-out evaluations; 0: only before and after")
    problems: PositiveInt | None = Field(default=256, description="held-out problems, the first so many; null: all")
    samples: PositiveInt = Field(default=1, description="responses a problem")
    k: list[PositiveInt] = Field(
        default=[], description="of the pass@k beside pass@1; none: powers of 2 up to eval.samples, and eval.samples"
    )
    temperature: NonNegativeFloat = Field(default=0.0, description="0: greedy")

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if self.k and max(self.k) > self.samples:
            raise ValueError(
                f"eval.k={self.k}: must be at most eval.samples={self.samples}; raise eval.samples to {max(self.k)} or more"
            )
        return self

    @property
    def ks(self) -> list[int]:
        """Every k whose pass@k is estimated, in order."""
        powers = [2**i for i in range(self.samples.bit_length())]
        return sorted({1, *(self.k or [*powers, self.samples])})
