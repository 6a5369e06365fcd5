"""Group Sequence Policy Optimization: one importance ratio a sequence (Zheng et al., arXiv 2507.18071)."""

from jaxtyping import Float
from torch import Tensor

from moe_rl.algorithms.base import (
    ClipRange,
    Denominators,
    KLTerm,
    LossInputs,
    log_difference,
    sequence_means,
    sequence_sizes,
)
from moe_rl.algorithms.surrogate import clipped_objective, ratio_metrics, sequence_loss
from moe_rl.metrics import Metrics


def gspo_loss(
    inputs: LossInputs, clip: ClipRange, denominators: Denominators, kl: KLTerm | None = None
) -> tuple[Float[Tensor, ""], Metrics]:
    """Mean over sequences of min(s A, clip(s) A), s = exp(mean over tokens of (train - old)) (eq. 5, 7), as a loss.

    s is the geometric mean of the token ratios, so it does not grow with length. ONE term a sequence, whatever its length.
    Sum the returned loss over microbatches and data-parallel ranks for the global one. Ratio metrics count sequences.
    Raises ValueError where a KL term lacks its reference.
    """
    token_log_ratio = log_difference(inputs.train_logprobs, inputs.old_logprobs.detach(), inputs.mask)
    log_ratio = sequence_means(token_log_ratio, inputs)
    clipped = clipped_objective(log_ratio, inputs.advantages.detach(), clip)
    loss, metrics = sequence_loss(inputs, clipped.objective, denominators, kl)
    metrics.merge(ratio_metrics(log_ratio, clipped, sequence_sizes(inputs) > 0))
    return loss, metrics
