"""Random batches in float64, as both sides take them: padded rows for TRL, one packed stream for moe_rl."""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

RESPONSES = 8
LONGEST = 12  # tokens of the longest response, and what the aggregation `constant` divides by


@dataclass(frozen=True)
class Batch:
    """B responses of unequal length, T the longest; response i stands at the left of row i.

    present: the responses' tokens. counted: those of them that are the policy's own, not a tool's. What lies elsewhere is
    arbitrary but finite. train and entropy take a gradient. Log-probabilities in nats.
    """

    present: Bool[Tensor, "B T"]
    counted: Bool[Tensor, "B T"]
    train: Float64[Tensor, "B T"]
    old: Float64[Tensor, "B T"]
    rollout: Float64[Tensor, "B T"]
    ref: Float64[Tensor, "B T"]
    entropy: Float64[Tensor, "B T"]
    advantages: Float64[Tensor, " B"]

    def lists(self, rows: Tensor) -> list[list[float]]:
        """[B, T] -> the present tokens of each response."""
        return [row[kept].tolist() for row, kept in zip(rows, self.present, strict=True)]

    def packed(self) -> dict[str, Tensor]:
        """Fields in the packed stream, with the response each token belongs to; advantages once a token."""
        sequence = self.present.nonzero()[:, 0]
        taken = {f.name: getattr(self, f.name)[self.present] for f in fields(self) if f.name not in ("present", "advantages")}
        return taken | {"sequence": sequence, "advantages": self.advantages[sequence]}


def random_batch(seed: int, spread: float, tool_tokens: bool = True) -> Batch:
    """spread: standard deviation of a token's train - old; rollout and ref lie 0.3 around old. Every response keeps at
    least one counted token."""
    generator = torch.Generator().manual_seed(seed)
    shape = (RESPONSES, LONGEST)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, LONGEST + 1, (RESPONSES,), generator=generator)
    lengths[0], lengths[1] = 1, LONGEST
    present = torch.arange(LONGEST) < lengths[:, None]
    counted = present.clone()
    if tool_tokens:
        counted[:, 1:] &= torch.rand(RESPONSES, LONGEST - 1, generator=generator) > 0.25
    old = -normal(*shape).abs() - 0.1
    return Batch(
        present,
        counted,
        train=(old + spread * normal(*shape)).requires_grad_(),
        old=old,
        rollout=old + 0.3 * normal(*shape),
        ref=old + 0.3 * normal(*shape),
        entropy=normal(*shape).abs().requires_grad_(),
        advantages=normal(RESPONSES),
    )


def batch_of(
    log_ratios: list[list[float]],
    advantages: list[float],
    *,
    gaps: list[list[float]] | None = None,
    above_ref: float = 0.0,
    entropy: list[list[float]] | None = None,
    uncounted: list[int] | None = None,
) -> Batch:
    """From numbers worked out by hand. log_ratios: train - old of each response's tokens. gaps: old - rollout. above_ref:
    train - ref, of all tokens. uncounted: responses none of whose tokens counts."""
    longest = max(map(len, log_ratios))

    def rows(lists: list[list[float]]) -> Tensor:
        return torch.tensor([row + [0.0] * (longest - len(row)) for row in lists], dtype=torch.float64)

    ratios = rows(log_ratios)
    present = rows([[1.0] * len(row) for row in log_ratios]).bool()
    counted = present.clone()
    counted[uncounted or []] = False
    old = torch.full_like(ratios, -1.5)
    return Batch(
        present,
        counted,
        train=(old + ratios).requires_grad_(),
        old=old,
        rollout=old if gaps is None else old - rows(gaps),
        ref=old + ratios - above_ref,
        entropy=(torch.zeros_like(old) if entropy is None else rows(entropy)).requires_grad_(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
    )
