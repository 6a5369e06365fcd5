"""The settings `rollout:`."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from moe_rl.section import Section


class RolloutSection(Section):
    engine: Literal["embedded"] = "embedded"
    prompts: PositiveInt = Field(default=16, description="prompts a step")
    responses: PositiveInt = Field(default=16, description="responses a prompt (G)")
    max_response_tokens: PositiveInt = 16
    temperature: PositiveFloat = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: NonNegativeInt = Field(default=0, description="0: off")
    logprobs: Literal["renormalised", "full"] = Field(
        default="renormalised",
        description="what the engine reports under top_p or top_k: of the distribution drawn from, or of the one before",
    )
    stop_token_ids: list[NonNegativeInt] = Field(default=[], description="beside the tokenizer's end of sequence")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[], description="texts that end a response: it is rewarded for what stands before"
    )
    max_batch: PositiveInt = Field(default=1024, description="sequences that generate at once on one data-parallel rank")

    @property
    def batch(self) -> int:
        """Sequences a step."""
        return self.prompts * self.responses

    @property
    def is_restricted(self) -> bool:
        """Whether it draws from less than the whole distribution."""
        return self.top_p < 1 or self.top_k > 0
