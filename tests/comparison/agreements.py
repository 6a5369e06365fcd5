"""Losses that TRL has under the same definition: which settings correspond, and how far the two sides are apart."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_rl.algorithms.base import Denominators, LossInputs
from moe_rl.algorithms.config import AlgorithmSection
from moe_rl.algorithms.loss import KLTerm, LossSettings, policy_loss
from moe_rl.corrections import correction_weights
from tests.comparison import trl_side
from tests.comparison.batches import LONGEST, Batch, random_batch
from tests.comparison.trl_side import Trainer

SEEDS = range(20)


class Agreement(NamedTuple):
    """ours: of `algorithm:`. theirs: of the trainer's configuration. spread: of train - old, so that the clip range is left in
    both directions. cuts: directions in which ratios are clipped. value: whether values agree, not only gradients."""

    ours: dict[str, Any]
    theirs: dict[str, Any]
    trainer: Trainer = "GRPOTrainer"
    spread: float = 0.4
    cuts: tuple[str, ...] = ("low", "high")
    value: bool = True
    tool_tokens: bool = True


_CLIP = {"clip_low": 0.2, "clip_high": 0.28}
EPSILON = {"epsilon_low": 0.2, "epsilon_high": 0.28}
_KL = {"beta": 0.1, "use_bias_correction_kl": False}
_GRPO = {"loss_type": "grpo", **EPSILON}
_GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
_GMPO = {"epsilon_low": 0.4, "epsilon_high": 0.4}  # logarithms of the ratio, there
# 1.0625 for the default 1.05: TRL's own tensor of temperatures is float32, which holds the one exactly and not the other
_SAPO = {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.0625}


def _correction(mode: str, high: float, low: float | None = None, level: str = "token") -> dict[str, Any]:
    return {"correction": {"mode": mode, "level": level, "high": high, "low": low}}


def _vllm(mode: str, high: float, low: float | None = None) -> dict[str, Any]:
    names = ("mode", "clip_max", "clip_min")
    return {f"vllm_importance_sampling_{name}": value for name, value in zip(names, (mode, high, low), strict=True)}


AGREEMENTS: dict[str, Agreement] = {
    "grpo": Agreement({"name": "grpo", **_CLIP}, _GRPO),
    "grpo, KL": Agreement({"name": "grpo", "kl_coefficient": 0.1, **_CLIP}, {**_GRPO, **_KL}),
    "dr_grpo": Agreement({"name": "dr_grpo", **_CLIP}, {"loss_type": "dr_grpo", **EPSILON}),
    "dapo": Agreement({"name": "dapo", **_CLIP}, {"loss_type": "dapo", **EPSILON}),
    "dapo, KL": Agreement({"name": "dapo", "kl_coefficient": 0.1, **_CLIP}, {"loss_type": "dapo", **EPSILON, **_KL}),
    "dapo, entropy": Agreement(
        {"name": "dapo", "entropy_coefficient": 0.05, **_CLIP}, {"loss_type": "dapo", "entropy_coef": 0.05, **EPSILON}
    ),
    "gspo": Agreement({"name": "gspo"}, _GSPO, spread=1e-3),
    "gspo, wide ratios": Agreement({"name": "gspo"}, _GSPO),
    "gspo, KL": Agreement({"name": "gspo", "kl_coefficient": 0.1}, {**_GSPO, **_KL}, spread=1e-3),
    "gmpo": Agreement({"name": "gmpo"}, _GMPO, trainer="GMPOTrainer"),
    "gmpo, KL": Agreement({"name": "gmpo", "kl_coefficient": 0.1}, {**_GMPO, "beta": 0.1}, trainer="GMPOTrainer"),
    "cispo": Agreement(
        {"name": "cispo", "clip_high": 0.5}, {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 1.5}, cuts=("high",)
    ),
    "sapo": Agreement({"name": "sapo", "sapo_tau_negative": 1.0625}, _SAPO, cuts=()),
    "rloo, ratio 1": Agreement(
        {"name": "rloo", **_CLIP}, EPSILON, trainer="RLOOTrainer", spread=0.0, cuts=(), value=False, tool_tokens=False
    ),
    "grpo, tis a token": Agreement(
        {"name": "grpo", **_CLIP, **_correction("tis", 1.3)}, {**_GRPO, **_vllm("token_truncate", 1.3)}
    ),
    "grpo, tis a sequence": Agreement(
        {"name": "grpo", **_CLIP, **_correction("tis", 1.3, level="sequence")}, {**_GRPO, **_vllm("sequence_truncate", 1.3)}
    ),
    "grpo, mis a token": Agreement({"name": "grpo", **_CLIP, **_correction("mis", 1.3)}, {**_GRPO, **_vllm("token_mask", 1.3)}),
    "grpo, mis a sequence": Agreement(
        {"name": "grpo", **_CLIP, **_correction("mis", 1.3, level="sequence")}, {**_GRPO, **_vllm("sequence_mask", 1.3)}
    ),
    "grpo, icepop": Agreement(
        {"name": "grpo", **_CLIP, **_correction("icepop", 1.3, 0.8)}, {**_GRPO, **_vllm("token_mask", 1.3, 0.8)}
    ),
    "dapo, mis a token, KL": Agreement(
        {"name": "dapo", "kl_coefficient": 0.1, **_CLIP, **_correction("mis", 1.3)},
        {"loss_type": "dapo", **EPSILON, **_KL, **_vllm("token_mask", 1.3)},
    ),
    "gspo, tis a sequence": Agreement(
        {"name": "gspo", **_correction("tis", 1.3, level="sequence")}, {**_GSPO, **_vllm("sequence_truncate", 1.3)}, spread=1e-3
    ),
    "gspo, mis a sequence": Agreement(
        {"name": "gspo", **_correction("mis", 1.3, level="sequence")}, {**_GSPO, **_vllm("sequence_mask", 1.3)}, spread=1e-3
    ),
}


class Deviation(NamedTuple):
    """Largest absolute differences. gradient: with respect to the log-probabilities (and entropies) of all tokens. scale: the
    largest gradient. metrics: of our loss."""

    value: float
    gradient: float
    scale: float
    metrics: dict[str, float]


def deviation(agreement: Agreement, seed: int) -> Deviation:
    batch = random_batch(seed, agreement.spread, agreement.tool_tokens)
    ours, metrics = our_loss(batch, AlgorithmSection.model_validate(agreement.ours))
    theirs = trl_side.loss(batch, agreement.trainer, **agreement.theirs)
    a, b = gradients(ours, batch), gradients(theirs, batch)
    value = float((ours - theirs).detach().abs()) if agreement.value else math.nan
    return Deviation(value, float((a - b).abs().max()), float(b.abs().max()), metrics)


def gradients(loss: Tensor, batch: Batch) -> Tensor:
    """[2, B, T]: of the log-probabilities and of the entropies."""
    leaves = (batch.train, batch.entropy)
    return torch.stack(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def our_loss(batch: Batch, section: AlgorithmSection) -> tuple[Tensor, dict[str, float]]:
    """The loss as an update makes it, in one microbatch, and its metrics with those of the correction."""
    packed = batch.packed()
    mask, sequence, sequences = packed["counted"], packed["sequence"], len(batch.advantages)
    weights, found = correction_weights(packed["old"], packed["rollout"], sequence, sequences, mask, section.correction)
    inputs = LossInputs(
        train_logprobs=packed["train"],
        old_logprobs=packed["old"],
        advantages=packed["advantages"],
        sequence=sequence,
        sequences=sequences,
        mask=mask,
        weights=None if section.correction.mode == "off" else weights,
        ref_logprobs=packed["ref"],
        entropy=packed["entropy"],
    )
    denominators = Denominators(sequences=int(batch.counted.any(1).sum()), tokens=int(mask.sum()))
    kl = KLTerm(section.estimates_kl, section.kl_coefficient) if section.kl_coefficient else None
    loss, metrics = policy_loss(inputs, LossSettings.of(section, LONGEST), denominators, kl)
    metrics.merge(found)
    return loss, metrics.means()
