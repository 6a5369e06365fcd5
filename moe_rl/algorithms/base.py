"""What every loss takes. B sequences, T response tokens, packed one after the other without padding; log-probabilities in nats.

T or B may be 0 (a rank with nothing left): the loss is then a 0 that still has a gradient, and every metric is present.
"""

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Exponents stop here: exp(20) = 4.9e8. The gradient is 0 beyond, as under a very wide clip. It only matters where no clip
# cuts: a negative advantage with a grown ratio, and the KL terms. Downwards exp underflows to 0, which needs no bound.
LOG_RATIO_BOUND = 20.0

Estimator = Literal["k1", "k2", "k3"]


class ClipRange(NamedTuple):
    """The ratio is clipped to [1 - low, 1 + high]; 0 <= low < 1."""

    low: float
    high: float


class Denominators(NamedTuple):
    """GLOBAL counts of the minibatch, over all its microbatches and data-parallel ranks.

    sequences: those with at least one unmasked token. tokens: the unmasked ones.
    """

    sequences: int | float
    tokens: int | float


@dataclass(frozen=True)
class KLTerm:
    """A penalty added to the loss: coefficient x KL(policy || reference), by one of Schulman's estimators."""

    estimator: Estimator
    coefficient: float


@dataclass(frozen=True)
class LossInputs:
    """One microbatch. A sequence's response tokens all lie in the same microbatch; their order does not matter.

    train_logprobs: [T] of the weights being updated, with gradient; the others are taken as constants.
    sequence: [T] which of the B sequences a token belongs to. advantages: [B].
    mask: [T] False: the token gives no gradient and is not counted, whatever its values are.
    rollout_logprobs and entropy are for metrics only. Raises ValueError where a shape or a dtype does not fit.
    """

    train_logprobs: Float[Tensor, " T"]
    old_logprobs: Float[Tensor, " T"]
    advantages: Float[Tensor, " B"]
    sequence: Int[Tensor, " T"]
    mask: Bool[Tensor, " T"]
    ref_logprobs: Float[Tensor, " T"] | None = None
    rollout_logprobs: Float[Tensor, " T"] | None = None
    entropy: Float[Tensor, " T"] | None = None

    def __post_init__(self) -> None:
        # Production runs without the tests' type checks, and a [T, 1] here would broadcast to [T, T].
        tokens = (self.train_logprobs.numel(),)
        for field in fields(self):
            value = getattr(self, field.name)
            expected = (self.advantages.numel(),) if field.name == "advantages" else tokens
            if value is not None and tuple(value.shape) != expected:
                raise ValueError(f"{field.name}: shape {tuple(value.shape)} must be {expected}")
            if field.name.endswith("_logprobs") and value is not None and value.dtype.itemsize < 4:
                raise ValueError(f"{field.name}: {value.dtype} cannot resolve a ratio; must be float32 or float64")


def log_difference(a: Float[Tensor, " T"], b: Float[Tensor, " T"], mask: Bool[Tensor, " T"]) -> Float[Tensor, " T"]:
    """a - b, and 0 where masked: what lies there (an infinity even) reaches neither value nor gradient."""
    return torch.where(mask, a - b, 0.0)


def sequence_sizes(inputs: LossInputs) -> Int[Tensor, " B"]:
    """Unmasked tokens of each sequence."""
    return _sequence_sums(inputs.mask.long(), inputs)


def sequence_means(values: Float[Tensor, " T"], inputs: LossInputs) -> Float[Tensor, " B"]:
    """Mean over each sequence's unmasked tokens; 0 for a sequence that has none."""
    return _sequence_sums(torch.where(inputs.mask, values, 0.0), inputs) / sequence_sizes(inputs).clamp(min=1)


def _sequence_sums(values: Tensor, inputs: LossInputs) -> Tensor:
    return values.new_zeros(inputs.advantages.shape).index_add(0, inputs.sequence, values)
