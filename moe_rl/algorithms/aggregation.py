"""From terms to one number: one concept for every algorithm, its penalties and its bonus.

seq_mean_token_mean: mean over sequences of the mean over tokens (GRPO, arXiv 2402.03300, eq. 3).
token_mean: mean over all tokens of the minibatch (DAPO, arXiv 2503.14476, eq. 8): long responses weigh more.
seq_mean_token_sum: mean over sequences of the sum over tokens (Dr. GRPO, arXiv 2503.20783).
constant: the same over a constant number of tokens (Dr. GRPO's own code).
An objective with one term a sequence has their mean, whose name is seq_mean_token_mean.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.algorithms.base import Denominators, LossInputs, sequence_means, sequence_sizes
from moe_rl.algorithms.table import Aggregation


class Total(NamedTuple):
    """Of one microbatch. value / denominator, summed over microbatches and ranks, is the global number; counted: how much of
    the denominator is here."""

    value: Float[Tensor, ""]
    counted: Tensor
    denominator: int | float


def aggregate(
    terms: Float[Tensor, " N"],
    inputs: LossInputs,
    kind: Aggregation,
    length: int,
    denominators: Denominators,
    *,
    by_sequence: bool = False,
) -> Total:
    """terms: [T], or [B] where by_sequence; masked ones count nothing. length: the tokens of `constant`.

    A sequence without unmasked tokens gives 0 and is not counted. A term that a weight made 0 is counted.
    """
    sizes = sequence_sizes(inputs)
    if by_sequence:
        assert kind == "seq_mean_token_mean", "the configuration refuses others"
        return Total(torch.where(sizes > 0, terms, 0.0).sum(), (sizes > 0).sum(), denominators.sequences)
    present = torch.where(inputs.mask, terms, 0.0)
    if kind == "token_mean":
        return Total(present.sum(), inputs.mask.sum(), denominators.tokens)
    if kind == "seq_mean_token_mean":
        value = sequence_means(present, inputs).sum()
    else:
        value = present.sum() / (length if kind == "constant" else 1)
    return Total(value, (sizes > 0).sum(), denominators.sequences)
