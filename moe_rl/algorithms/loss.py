"""The loss of a policy: an objective, weighed and aggregated; a KL penalty, an entropy bonus; and the metrics of all."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from moe_rl.algorithms.aggregation import Total, aggregate
from moe_rl.algorithms.base import (
    ClipRange,
    Constants,
    Denominators,
    LossInputs,
    Objective,
    log_difference,
    sequence_means,
)
from moe_rl.algorithms.cispo import cispo
from moe_rl.algorithms.clipped import clipped
from moe_rl.algorithms.config import AlgorithmSection
from moe_rl.algorithms.diagnostics import ratio_metrics, token_metrics
from moe_rl.algorithms.gmpo import gmpo
from moe_rl.algorithms.gspo import gspo
from moe_rl.algorithms.gspo_token import gspo_token
from moe_rl.algorithms.kl import ESTIMATORS
from moe_rl.algorithms.sapo import sapo
from moe_rl.algorithms.table import Aggregation, KLEstimator, ObjectiveName
from moe_rl.metrics import Metrics

OBJECTIVES: dict[ObjectiveName, Callable[[LossInputs, Constants], Objective]] = {
    "clipped": clipped,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
}


@dataclass(frozen=True)
class KLTerm:
    """A penalty added to the loss: coefficient x KL(policy || reference), by one of Schulman's estimators."""

    estimator: KLEstimator
    coefficient: float


@dataclass(frozen=True)
class LossSettings:
    """What of `algorithm:` a loss needs. length: the tokens that the aggregation `constant` divides by."""

    objective: ObjectiveName
    constants: Constants
    aggregation: Aggregation
    length: int
    entropy_coefficient: float = 0.0

    @classmethod
    def of(cls, section: AlgorithmSection, max_response_tokens: int) -> "LossSettings":
        return cls(
            objective=section.spec.objective,
            constants=Constants(
                None if section.clip is None else ClipRange(*section.clip), section.sapo_tau_positive, section.sapo_tau_negative
            ),
            aggregation=section.aggregates,
            length=section.aggregation_length or max_response_tokens,
            entropy_coefficient=section.entropy_coefficient,
        )


def policy_loss(
    inputs: LossInputs, settings: LossSettings, denominators: Denominators, kl: KLTerm | None = None
) -> tuple[Float[Tensor, ""], Metrics]:
    """-objective + coefficient x KL - coefficient x entropy, each aggregated alike.

    Sum the returned loss over microbatches and data-parallel ranks for the global one, which is the reduced loss/total;
    loss/policy + loss/kl + loss/entropy = loss/total. Raises ValueError where a term lacks its inputs.
    """
    found = OBJECTIVES[settings.objective](inputs, settings.constants)
    terms = found.terms
    if inputs.weights is not None:
        weights = inputs.weights.detach()
        terms = terms * (sequence_means(weights, inputs) if found.by_sequence else weights)

    def total(values: Tensor, by_sequence: bool = False) -> Total:
        return aggregate(values, inputs, settings.aggregation, settings.length, denominators, by_sequence=by_sequence)

    policy = total(terms, found.by_sequence)
    parts = {"loss/policy": -policy.value}
    if kl is not None:
        if inputs.ref_logprobs is None:
            raise ValueError("ref_logprobs: none given, but there is a KL term; must be the reference's log-probabilities")
        log_ratio = log_difference(inputs.train_logprobs, inputs.ref_logprobs.detach(), inputs.mask)
        parts["loss/kl"] = kl.coefficient * total(ESTIMATORS[kl.estimator](log_ratio)).value
    if settings.entropy_coefficient:
        if inputs.entropy is None:
            raise ValueError("entropy: none given, but there is a bonus on it; must be that of the next-token distributions")
        parts["loss/entropy"] = -settings.entropy_coefficient * total(inputs.entropy).value
    value = torch.stack(list(parts.values())).sum()
    metrics = token_metrics(inputs)
    for key, part in {**parts, "loss/total": value}.items():
        metrics.add(key, part, policy.counted)
    metrics.merge(ratio_metrics(found.ratios, settings.constants.clip))
    return value / max(policy.denominator, 1), metrics
