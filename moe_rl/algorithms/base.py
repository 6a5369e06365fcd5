"""What every objective takes and gives. B sequences, T response tokens, packed one after the other without padding;
log-probabilities in nats.

T or B may be 0 (a rank with nothing left): the loss is then a 0 that still has a gradient, and every metric is present.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Exponents stop here: exp(20) = 4.9e8. The gradient is 0 beyond, as under a very wide clip. It only matters where no clip
# cuts: a negative advantage with a grown ratio, and the KL terms. Downwards exp underflows to 0, which needs no bound.
LOG_RATIO_BOUND = 20.0


class ClipRange(NamedTuple):
    """The ratio is clipped to [1 - low, 1 + high]; 0 <= low <= 1, and at 1 there is no lower bound."""

    low: float
    high: float


class Constants(NamedTuple):
    """Of an objective. clip: None where there is none. tau: sharpness of SAPO's gate, by the sign of the advantage."""

    clip: ClipRange | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05


class Denominators(NamedTuple):
    """GLOBAL counts of the minibatch, over all its microbatches and data-parallel ranks.

    sequences: those with at least one unmasked token. tokens: the unmasked ones.
    """

    sequences: int | float
    tokens: int | float


@dataclass(frozen=True)
class LossInputs:
    """One microbatch. A sequence's response tokens all lie in the same microbatch; their order does not matter.

    train_logprobs: [T] of the weights being updated, with gradient; entropy: [T], with gradient where there is a bonus on it;
    all others are taken as constants. sequence: [T] which of the `sequences` (B) a token belongs to. advantages: [T]; an
    objective with one term a sequence takes their mean over it.
    mask: [T] False: the token gives no gradient and is not counted, whatever its values are.
    weights: [T] factors on the tokens' terms (corrections.py); such an objective takes their mean, too. log_router_shift: [T]
    log of RSPO's factor on the ratio, at most 0. rollout_logprobs are for metrics only.
    Raises ValueError where a shape or a dtype does not fit.
    """

    train_logprobs: Float[Tensor, " T"]
    old_logprobs: Float[Tensor, " T"]
    advantages: Float[Tensor, " T"]
    sequence: Int[Tensor, " T"]
    sequences: int
    mask: Bool[Tensor, " T"]
    weights: Float[Tensor, " T"] | None = None
    log_router_shift: Float[Tensor, " T"] | None = None
    ref_logprobs: Float[Tensor, " T"] | None = None
    rollout_logprobs: Float[Tensor, " T"] | None = None
    entropy: Float[Tensor, " T"] | None = None

    def __post_init__(self) -> None:
        # Production runs without the tests' type checks, and a [T, 1] here would broadcast to [T, T].
        expected = (self.train_logprobs.numel(),)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and tuple(value.shape) != expected:
                raise ValueError(f"{field.name}: shape {tuple(value.shape)} must be {expected}")
            if field.name.endswith("_logprobs") and value is not None and value.dtype.itemsize < 4:
                raise ValueError(f"{field.name}: {value.dtype} cannot resolve a ratio; must be float32 or float64")


@dataclass(frozen=True)
class Ratios:
    """For the metrics: the N importance ratios (of tokens, or of sequences) that an objective used, without gradient.

    cut: where its clip took effect; None where it has no clip. counted: those that are not masked.
    """

    log_ratio: Float[Tensor, " N"]
    advantages: Float[Tensor, " N"]
    counted: Bool[Tensor, " N"]
    cut_low: Bool[Tensor, " N"] | None = None
    cut_high: Bool[Tensor, " N"] | None = None


@dataclass(frozen=True)
class Objective:
    """What is maximised, before weights and aggregation. terms: [T], or [B] where by_sequence."""

    terms: Float[Tensor, " N"]
    ratios: Ratios
    by_sequence: bool = False


def log_difference(a: Float[Tensor, " T"], b: Float[Tensor, " T"], mask: Bool[Tensor, " T"]) -> Float[Tensor, " T"]:
    """a - b, and 0 where masked: what lies there (an infinity even) reaches neither value nor gradient."""
    return torch.where(mask, a - b, 0.0)


def token_log_ratio(inputs: LossInputs) -> Float[Tensor, " T"]:
    """log(pi_train / pi_old) of each token, plus the log of the router-shift factor where there is one (arXiv 2510.23027:
    the ratio is rescaled before it is clipped and aggregated). 0 where masked."""
    log_ratio = log_difference(inputs.train_logprobs, inputs.old_logprobs.detach(), inputs.mask)
    if inputs.log_router_shift is None:
        return log_ratio
    return log_ratio + torch.where(inputs.mask, inputs.log_router_shift.detach(), 0.0)


def sequence_sizes(inputs: LossInputs) -> Int[Tensor, " B"]:
    """Unmasked tokens of each sequence."""
    return sequence_sums(inputs.mask.long(), inputs)


def sequence_means(values: Float[Tensor, " T"], inputs: LossInputs) -> Float[Tensor, " B"]:
    """Mean over each sequence's unmasked tokens; 0 for a sequence that has none.

    Summed in float64: thousands of float32 additions would eat into GSPO's clip range of 3e-4.
    """
    sums = sequence_sums(torch.where(inputs.mask, values, 0.0).double(), inputs)
    return (sums / sequence_sizes(inputs).clamp(min=1)).to(values.dtype)


def sequence_sums(values: Tensor, inputs: LossInputs) -> Tensor:
    """[T] -> [B]."""
    return values.new_zeros(inputs.sequences).index_add(0, inputs.sequence, values)
