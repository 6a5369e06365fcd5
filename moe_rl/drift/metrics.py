"""How expert choice differs between two passes over the same tokens, and how evenly experts are used.

Routes are [T, L, K]: the K distinct experts, in any order, of T response tokens at L MoE layers. Sums are kept a layer, so
that microbatches, ranks and pipeline stages add up before anything is divided.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float64, Int, Int64, Real
from torch import Tensor

Comparison = Literal["engine", "noise", "update"]


class ChangeSums(NamedTuple):
    """Sums over the unmasked tokens. change: of 1 - |S_old & S_new| / K. flips: of S_old != S_new. tokens: their number."""

    change: Float64[Tensor, " L"]
    flips: Float64[Tensor, " L"]
    tokens: int


def change_sums(old: Int[Tensor, "T L K"], new: Int[Tensor, "T L K"], mask: Bool[Tensor, " T"], experts: int) -> ChangeSums:
    """Raises ValueError at an unmasked row with an expert twice or outside [0, experts)."""
    return _change_sums(_checked(old, mask, experts, "old"), _checked(new, mask, experts, "new"))


def expert_load(routes: Int[Tensor, "T L K"], experts: int, mask: Bool[Tensor, " T"]) -> Int64[Tensor, "L E"]:
    """Unmasked tokens that each layer sends to each expert. Raises ValueError as `change_sums` does."""
    return _expert_load(_checked(routes, mask, experts, "routes"), experts)


def load_entropy(counts: Real[Tensor, "L E"]) -> Float64[Tensor, " L"]:
    """Entropy of the shares of load, over log E: 1 = even, 0 = all to one expert. [L, E] -> [L].

    It does not correct for K: a token's K experts are distinct, so the least that K experts a token can reach is
    log K / log E. A single expert counts as even. A layer without tokens gives NaN.
    """
    share = counts.double() / counts.double().sum(-1, keepdim=True)
    if counts.shape[-1] == 1:
        return share[:, 0]  # 1, or NaN without tokens
    return torch.special.entr(share).sum(-1) / math.log(counts.shape[-1])


def max_violation(counts: Real[Tensor, "L E"]) -> Float64[Tensor, " L"]:
    """Largest load / mean load - 1: 0 = even. A layer without tokens gives NaN. [L, E] -> [L]."""
    return counts.double().amax(-1) / counts.double().mean(-1) - 1


def dead_experts(counts: Real[Tensor, "L E"]) -> Int64[Tensor, " L"]:
    """Experts that no counted token chose: with few tokens many are, without being dead for good. [L, E] -> [L]."""
    return (counts == 0).sum(-1)


@dataclass(frozen=True)
class DriftSums:
    """One minibatch's sums. All-reduce `vector()` with SUM over the ranks that hold distinct tokens or distinct layers.

    tokens is kept a layer, so that stages which hold different layers of the same tokens do not count them twice.
    load: of the new routes.
    """

    change: Float64[Tensor, " L"]
    flips: Float64[Tensor, " L"]
    tokens: Float64[Tensor, " L"]
    load: Float64[Tensor, "L E"]

    @staticmethod
    def zeros(layers: int, experts: int, device: torch.device | str = "cpu") -> "DriftSums":
        vector = torch.zeros(layers * (3 + experts), dtype=torch.float64, device=device)
        return DriftSums.from_vector(vector, layers, experts)

    @staticmethod
    def measure(old: Int[Tensor, "T L K"], new: Int[Tensor, "T L K"], mask: Bool[Tensor, " T"], experts: int) -> "DriftSums":
        """Of the layers at hand. Raises ValueError as `change_sums` does."""
        old_slots, new_slots = _checked(old, mask, experts, "old"), _checked(new, mask, experts, "new")
        sums = _change_sums(old_slots, new_slots)
        tokens = torch.full_like(sums.change, sums.tokens)
        return DriftSums(sums.change, sums.flips, tokens, _expert_load(new_slots, experts).double())

    def placed(self, positions: Sequence[int], layers: int) -> "DriftSums":
        """These layers at their positions among all `layers` MoE layers of the model; zeros elsewhere."""
        if len(set(positions)) != len(self.tokens) or not all(0 <= position < layers for position in positions):
            raise ValueError(f"positions {tuple(positions)}: must be {len(self.tokens)} distinct ones in [0, {layers})")
        index = torch.tensor(positions, dtype=torch.int64, device=self.tokens.device)

        def place(values: Tensor) -> Tensor:
            return values.new_zeros(layers, *values.shape[1:]).index_copy(0, index, values)

        return DriftSums(place(self.change), place(self.flips), place(self.tokens), place(self.load))

    def __add__(self, other: "DriftSums") -> "DriftSums":
        return DriftSums(
            self.change + other.change, self.flips + other.flips, self.tokens + other.tokens, self.load + other.load
        )

    def vector(self) -> Float64[Tensor, " V"]:
        """Everything as one vector of L x (3 + E) numbers."""
        return torch.cat([self.change, self.flips, self.tokens, self.load.flatten()])

    @staticmethod
    def from_vector(vector: Float64[Tensor, " V"], layers: int, experts: int) -> "DriftSums":
        change, flips, tokens, load = vector.split([layers, layers, layers, layers * experts])
        return DriftSums(change, flips, tokens, load.view(layers, experts))


def to_metrics(minibatches: Sequence[DriftSums], layers: Sequence[int], comparison: Comparison = "update") -> dict[str, float]:
    """Reduced sums of a step's updates -> `drift/...` keys.

    minibatches: one entry an update, in order; update i has the suffix /minibatch_i, and the key without a suffix is over
    the tokens of all. layers: the global layer number of each of the L entries (dense layers leave gaps).
    Each quantity has a key a layer and a mean over layers; a layer without tokens has none and is not in the mean.
    drift/load/... describes the new routes, and is given with the comparison "update" alone.
    """
    if any(len(sums.tokens) != len(layers) for sums in minibatches):
        raise ValueError(f"layers {tuple(layers)}: must name every one of {[len(sums.tokens) for sums in minibatches]} layers")
    if not minibatches:
        return {}
    total = DriftSums.zeros(len(layers), minibatches[0].load.shape[1], minibatches[0].load.device)
    for sums in minibatches:
        total = total + sums
    metrics: dict[str, float] = {}
    suffixed = {"": total, **{f"/minibatch_{i}": sums for i, sums in enumerate(minibatches)}}
    for suffix, sums in suffixed.items():
        for name, values in _layer_values(sums, comparison).items():
            shown = {layer: v for layer, v, n in zip(layers, values.tolist(), sums.tokens.tolist(), strict=True) if n > 0}
            metrics.update({f"{name}/layer_{layer:02d}{suffix}": float(value) for layer, value in shown.items()})
            if shown:
                metrics[f"{name}/mean{suffix}"] = sum(shown.values()) / len(shown)
    return metrics


def _layer_values(sums: DriftSums, comparison: Comparison) -> dict[str, Tensor]:
    values = {
        f"drift/{comparison}/expert_change_rate": sums.change / sums.tokens,
        f"drift/{comparison}/flip_rate": sums.flips / sums.tokens,
    }
    if comparison == "update":
        values["drift/load/load_entropy"] = load_entropy(sums.load)
        values["drift/load/max_violation"] = max_violation(sums.load)
        values["drift/load/dead_experts"] = dead_experts(sums.load)
    return values


def _change_sums(old: Tensor, new: Tensor) -> ChangeSums:
    topk, tokens = old.shape[0], old.shape[1]
    kept = torch.zeros_like(old, dtype=torch.bool)
    for slot in range(topk):  # K passes over [K, T, L] instead of one over [K, K, T, L]
        kept |= old == new[slot]
    # integers until one division, so that equal routes give exactly 0
    change = (tokens * topk - kept.sum((0, 1))).double() / topk
    return ChangeSums(change, (~kept.all(0)).sum(0).double(), tokens)


def _expert_load(slots: Tensor, experts: int) -> Tensor:
    layers = slots.shape[2]
    flat = slots.long() + torch.arange(layers, device=slots.device) * experts
    return torch.bincount(flat.flatten(), minlength=layers * experts).view(layers, experts)


def _checked(routes: Tensor, mask: Tensor, experts: int, name: str) -> Tensor:
    """The unmasked rows as [K, T, L], narrow and contiguous: comparisons of slots then run over whole planes."""
    slots = routes[mask].permute(2, 0, 1)
    outside = (slots < 0) | (slots >= experts)
    if outside.any():
        _refuse(outside, slots, mask, name, f"outside [0, {experts})")
    slots = slots.to(torch.int16 if experts <= 2**15 else torch.int64).contiguous()
    twice = torch.zeros_like(slots, dtype=torch.bool)
    for shift in range(1, slots.shape[0]):
        twice[shift:] |= slots[shift:] == slots[:-shift]
    if twice.any():
        _refuse(twice, slots, mask, name, "a second time")
    return slots


def _refuse(wrong: Tensor, slots: Tensor, mask: Tensor, name: str, fault: str) -> None:
    slot, token, layer = wrong.nonzero()[0].tolist()
    row = int(mask.nonzero()[token])
    raise ValueError(
        f"{name} routes, row {row}, layer {layer} (position among the MoE layers): "
        f"expert {int(slots[slot, token, layer])} {fault}"
    )
