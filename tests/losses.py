"""Small inputs for the losses, and every algorithm with every aggregation that it may have."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_rl.algorithms.base import Denominators, LossInputs
from moe_rl.algorithms.config import AlgorithmSection
from moe_rl.algorithms.loss import LossSettings
from moe_rl.algorithms.table import ALGORITHMS

INF = float("inf")
LONGEST = 10  # the response tokens that the aggregation `constant` divides by
# (algorithm, aggregation)
EVERY = [(name, kind) for name, spec in ALGORITHMS.items() for kind in spec.aggregations]


def make_inputs(
    log_ratios: Sequence[Sequence[float]],
    advantages: Sequence[float | Sequence[float]],
    masked: Sequence[int] = (),
    dtype: torch.dtype = torch.float64,
    **optional: Sequence[float],
) -> LossInputs:
    """From each sequence's token log-ratios (train - old); train_logprobs is a leaf with gradient, old_logprobs are -1.5.

    advantages: one a sequence, or one for each of its tokens. masked: places in the packed stream. optional: weights,
    log_router_shift, ref_logprobs, rollout_logprobs, entropy, as lists over the stream.
    """
    flat = [value for sequence in log_ratios for value in sequence]
    old = torch.full((len(flat),), -1.5, dtype=dtype)
    mask = torch.ones(len(flat), dtype=torch.bool)
    mask[list(masked)] = False
    of_tokens = [
        value
        for sequence, given in zip(log_ratios, advantages, strict=True)
        for value in (given if isinstance(given, Sequence) else [given] * len(sequence))
    ]
    return LossInputs(
        train_logprobs=(old + torch.tensor(flat, dtype=dtype)).requires_grad_(),
        old_logprobs=old,
        advantages=torch.tensor(of_tokens, dtype=dtype),
        sequence=torch.tensor([i for i, sequence in enumerate(log_ratios) for _ in sequence], dtype=torch.int64),
        sequences=len(log_ratios),
        mask=mask,
        **{name: torch.tensor(values, dtype=dtype) for name, values in optional.items()},
    )


def logs(*ratios: float) -> list[float]:
    return [math.log(ratio) for ratio in ratios]


def settings(name: str, **section: Any) -> LossSettings:
    """What the settings `algorithm:` with this name and these keys make of a loss."""
    return LossSettings.of(AlgorithmSection.model_validate({"name": name, **section}), LONGEST)


def mild(name: str, **section: Any) -> LossSettings:
    """The same with a clip range that cuts some of `full_inputs` on either side, and not all."""
    clip = {} if name == "sapo" else {"clip_low": 0.05, "clip_high": 0.08}
    return settings(name, **clip, **section)


def counts(inputs: LossInputs) -> Denominators:
    """Of a minibatch that is one microbatch."""
    return Denominators(len(inputs.sequence[inputs.mask].unique()), int(inputs.mask.sum()))


def gradient(loss: Tensor, inputs: LossInputs) -> Tensor:
    return torch.autograd.grad(loss, inputs.train_logprobs)[0]


def full_inputs(masked: Sequence[int] = (1, 5, 7), *, by_token: bool = False) -> LossInputs:
    """Five sequences of unequal length with all optional inputs; sequence 2 (token 5) is masked away. by_token: advantages
    that differ within a sequence."""
    log_ratios = [[0.01, -0.02, 0.03], [0.2, 0.1], [-0.3], [-0.2, 0.1, 0.0, -0.3], [0.02, 0.5]]
    advantages = [[1.0, 0.3, -0.6], [0.7, -0.2], [-2.0], [-0.5, 0.4, 1.1, -0.9], [0.0, 0.8]]
    return make_inputs(
        log_ratios,
        advantages if by_token else [1.0, 0.7, -2.0, -0.5, 0.0],
        masked,
        weights=[1.0, 0.4, 0.0, 1.5, 2.0, 1.0, 0.7, 3.0, 1.0, 1.2, 0.5, 1.0],
        log_router_shift=[0.0, -0.1, -0.02, -0.03, 0.0, 0.0, -0.05, -0.1, -0.01, 0.0, -0.2, -0.03],
        ref_logprobs=[-1.4, -1.7, -1.5, -0.9, -2.0, -1.1, -1.6, -1.5, -1.2, -3.0, -1.3, -1.4],
        rollout_logprobs=[-1.5 + 0.01 * i for i in range(12)],
        entropy=[0.1 * i for i in range(12)],
    )


def changed(inputs: LossInputs, **values: Any) -> LossInputs:
    return dataclasses.replace(inputs, **values)


def select(inputs: LossInputs, sequences: Sequence[int]) -> LossInputs:
    """A microbatch of these sequences, renumbered, in this order."""
    places = torch.cat([torch.zeros(0).long(), *[(inputs.sequence == s).nonzero()[:, 0] for s in sequences]])
    lengths = [int((inputs.sequence == s).sum()) for s in sequences]
    numbers = torch.arange(len(sequences)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return changed(of_places(inputs, places), sequence=numbers, sequences=len(sequences))


def of_places(inputs: LossInputs, places: Tensor) -> LossInputs:
    """These tokens, in this order."""
    tensors = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    return changed(inputs, **{name: value[places] for name, value in tensors.items() if isinstance(value, Tensor)})
