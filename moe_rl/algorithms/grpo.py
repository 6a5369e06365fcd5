"""Group Relative Policy Optimization: one importance ratio a token (Shao et al., arXiv 2402.03300)."""

from jaxtyping import Float
from torch import Tensor

from moe_rl.algorithms.base import ClipRange, Denominators, KLTerm, LossInputs, log_difference, sequence_means
from moe_rl.algorithms.surrogate import clipped_objective, ratio_metrics, sequence_loss
from moe_rl.metrics import Metrics


def grpo_loss(
    inputs: LossInputs, clip: ClipRange, denominators: Denominators, kl: KLTerm | None = None
) -> tuple[Float[Tensor, ""], Metrics]:
    """Mean over sequences of the mean over tokens of min(w A, clip(w) A), w = exp(train - old) (eq. 3), as a loss.

    Sum the returned loss over microbatches and data-parallel ranks for the global one. Ratio metrics count tokens.
    Raises ValueError where a KL term lacks its reference.
    """
    log_ratio = log_difference(inputs.train_logprobs, inputs.old_logprobs.detach(), inputs.mask)
    clipped = clipped_objective(log_ratio, inputs.advantages.detach()[inputs.sequence], clip)
    loss, metrics = sequence_loss(inputs, sequence_means(clipped.objective, inputs), denominators, kl)
    metrics.merge(ratio_metrics(log_ratio, clipped, inputs.mask))
    return loss, metrics
