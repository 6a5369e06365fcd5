"""The losses. One file each, one table of them; all are pure: no collectives, denominators passed in."""

from typing import NamedTuple, Protocol

from torch import Tensor

from moe_rl.algorithms.base import ClipRange, Denominators, KLTerm, LossInputs
from moe_rl.algorithms.grpo import grpo_loss
from moe_rl.algorithms.gspo import gspo_loss
from moe_rl.config import AlgorithmSection
from moe_rl.metrics import Metrics

__all__ = ["ALGORITHMS", "Algorithm", "ClipRange", "Denominators", "KLTerm", "LossInputs", "clip_range", "clip_warning"]

# Above this a sequence ratio is practically never clipped: the paper's range is 3e-4 / 4e-4.
_GSPO_WIDE_CLIP = 0.01


class Loss(Protocol):
    def __call__(
        self, inputs: LossInputs, clip: ClipRange, denominators: Denominators, kl: KLTerm | None = None
    ) -> tuple[Tensor, Metrics]: ...


class Algorithm(NamedTuple):
    loss: Loss
    clip_low: float
    clip_high: float


# Clip ranges: arXiv 2507.18071, section 5.1, for both.
ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(grpo_loss, clip_low=0.2, clip_high=0.27),
    "gspo": Algorithm(gspo_loss, clip_low=3e-4, clip_high=4e-4),
}


def clip_range(section: AlgorithmSection) -> ClipRange:
    """What the section says, or the algorithm's default where it says nothing."""
    algorithm = ALGORITHMS[section.name]
    return ClipRange(
        low=algorithm.clip_low if section.clip_low is None else section.clip_low,
        high=algorithm.clip_high if section.clip_high is None else section.clip_high,
    )


def clip_warning(section: AlgorithmSection) -> str | None:
    """One line for the user where GSPO's clip range looks like one meant for token ratios; None where all is well."""
    clip = clip_range(section)
    if section.name != "gspo" or max(clip) <= _GSPO_WIDE_CLIP:
        return None
    return (
        f"algorithm.clip_low={clip.low:g}, algorithm.clip_high={clip.high:g}: above {_GSPO_WIDE_CLIP:g} GSPO's sequence ratio"
        " is practically never clipped; the paper (arXiv 2507.18071) uses 3e-4 / 4e-4"
    )
