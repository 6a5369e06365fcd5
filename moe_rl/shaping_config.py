"""The settings `shaping:`."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from moe_rl.section import Section


class ShapingSection(Section):
    """What is added to a task's reward before advantages are taken (shaping.py)."""

    overlong_buffer: NonNegativeInt | None = Field(
        default=None,
        description="tokens before rollout.max_response_tokens over which a penalty grows to its whole; 0: off; "
        "none: off, in dapo a fifth of rollout.max_response_tokens",
    )
    overlong_penalty: PositiveFloat = Field(default=1.0, description="what a response of rollout.max_response_tokens loses")
    length_target: PositiveInt | None = Field(
        default=None, description="rewards above 0 are scaled by min(1, (length_target / tokens)^length_power); none: off"
    )
    length_power: PositiveFloat = 0.5
    spread_penalty: NonNegativeFloat = Field(
        default=0.0, description="times the standard deviation of a response's log-probabilities, subtracted; an article's: 0.3"
    )
