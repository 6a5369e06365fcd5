"""Sums of drift over microbatches, ranks and pipeline stages, and the metrics that they become. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Integer
from torch import Tensor

from moe_rl.drift.metrics import (
    checked_slots,
    dead_experts,
    gate_shift,
    load_entropy,
    max_violation,
    router_kl,
    slot_change,
    slot_load,
)

Comparison = Literal["engine", "noise", "update", "probe"]

# What is summed a layer, in the order of DriftSums.layers. tokens counts change, flips and jaccard; scored counts router_kl
# and gate_shift; bounded counts margin, which is infinite where K = E.
_SUMS = ("change", "flips", "jaccard", "tokens", "router_kl", "gate_shift", "scored", "margin", "bounded")
# metric: (its sum, its count, whether more is worse)
_METRICS = {
    "expert_change_rate": ("change", "tokens", True),
    "flip_rate": ("flips", "tokens", True),
    "jaccard": ("jaccard", "tokens", False),
    "router_kl": ("router_kl", "scored", True),
    "gate_shift": ("gate_shift", "scored", True),
    "margin": ("margin", "bounded", False),
}
_EACH_MINIBATCH = ("expert_change_rate", "flip_rate")


class ScoredRows(NamedTuple):
    """Rows of which both passes' router scores are known. n rows: log gate distributions, the old choice, its margin."""

    old: Float[Tensor, "n L E"]
    new: Float[Tensor, "n L E"]
    old_routes: Integer[Tensor, "n L K"]
    old_margin: Float[Tensor, "n L"]


@dataclass(frozen=True)
class DriftSums:
    """One comparison's sums. All-reduce `vector()` with SUM over the ranks that hold distinct tokens or distinct layers.

    layers: by _SUMS; counts are kept a layer, so that stages which hold different layers of the same tokens do not count them
    twice. load: of the new routes. any: tokens with a flip on any layer, and tokens.
    """

    layers: Float64[Tensor, "S L"]
    load: Float64[Tensor, "L E"]
    any: Float64[Tensor, " 2"]

    @staticmethod
    def zeros(layers: int, experts: int, device: torch.device | str = "cpu") -> "DriftSums":
        numbers = layers * (len(_SUMS) + experts) + 2
        return DriftSums.from_vector(torch.zeros(numbers, dtype=torch.float64, device=device), layers, experts)

    @staticmethod
    def measure(
        old: Integer[Tensor, "T L K"],
        new: Integer[Tensor, "T L K"],
        mask: Bool[Tensor, " T"],
        experts: int,
        scored: ScoredRows | None = None,
    ) -> "DriftSums":
        """Of the layers at hand, over the unmasked tokens. `any` stays 0: no rank may have all layers (see `with_any`).

        Raises ValueError as `change_sums` does.
        """
        slots = checked_slots(new, mask, experts, "new")
        sums = slot_change(checked_slots(old, mask, experts, "old"), slots)
        zeros = torch.zeros_like(sums.change)
        found = dict.fromkeys(_SUMS, zeros) | {
            "change": sums.change,
            "flips": sums.flips,
            "jaccard": sums.jaccard,
            "tokens": torch.full_like(zeros, sums.tokens),
        }
        if scored is not None:
            bounded = scored.old_margin.isfinite()
            found |= {
                "router_kl": router_kl(scored.old, scored.new).double().sum(0),
                "gate_shift": gate_shift(scored.old, scored.new, scored.old_routes).double().sum(0),
                "scored": torch.full_like(zeros, len(scored.old)),
                "margin": scored.old_margin.where(bounded, 0).double().sum(0),
                "bounded": bounded.double().sum(0),
            }
        load = slot_load(slots, experts).double()
        return DriftSums(torch.stack([found[name] for name in _SUMS]), load, zeros.new_zeros(2))

    def with_any(self, flips: Bool[Tensor, " T"]) -> "DriftSums":
        """flips: of each unmasked token, whether any layer of the whole model flipped."""
        return DriftSums(
            self.layers, self.load, self.any + torch.stack([flips.sum(), torch.ones_like(flips).sum()]).to(self.any)
        )

    def placed(self, positions: Sequence[int], layers: int) -> "DriftSums":
        """These layers at their positions among all `layers` MoE layers of the model; zeros elsewhere."""
        here = self.layers.shape[1]
        if len(set(positions)) != here or not all(0 <= position < layers for position in positions):
            raise ValueError(f"positions {tuple(positions)}: must be {here} distinct ones in [0, {layers})")
        index = torch.tensor(positions, dtype=torch.int64, device=self.layers.device)
        wide = self.layers.new_zeros(len(_SUMS), layers).index_copy(1, index, self.layers)
        load = self.load.new_zeros(layers, self.load.shape[1]).index_copy(0, index, self.load)
        return DriftSums(wide, load, self.any)

    def __add__(self, other: "DriftSums") -> "DriftSums":
        return DriftSums(self.layers + other.layers, self.load + other.load, self.any + other.any)

    def vector(self) -> Float64[Tensor, " V"]:
        """Everything as one vector of L x (9 + E) + 2 numbers."""
        return torch.cat([self.layers.flatten(), self.load.flatten(), self.any])

    @staticmethod
    def from_vector(vector: Float64[Tensor, " V"], layers: int, experts: int) -> "DriftSums":
        sums, load, flips = vector.split([len(_SUMS) * layers, layers * experts, 2])
        return DriftSums(sums.view(len(_SUMS), layers), load.view(layers, experts), flips)

    def sum_of(self, name: str) -> Float64[Tensor, " L"]:
        return self.layers[_SUMS.index(name)]


def to_metrics(
    minibatches: Sequence[DriftSums], layers: Sequence[int], comparison: Comparison = "update", view: str | None = None
) -> dict[str, float]:
    """Reduced sums of a step -> `drift/COMPARISON[/VIEW]/METRIC/LAYER` keys.

    minibatches: one entry an update, in order; the keys are over the tokens of all, and update i's expert_change_rate and
    flip_rate, of used and of local routes, have the suffix /minibatch_i. layers: the global layer number of each of the L
    entries (dense layers leave gaps). view: whose tokens or routes, where not response tokens and the routes used.
    Each quantity has a key a layer, a mean over layers and the worst layer; a layer without tokens has none and is not in the
    mean. Without layers (a dense model) there are none at all. drift/load/... describes the new routes, and is given for the
    update's plain view alone.
    """
    if any(sums.layers.shape[1] != len(layers) for sums in minibatches):
        held = [sums.layers.shape[1] for sums in minibatches]
        raise ValueError(f"layers {tuple(layers)}: must name every one of {held} layers")
    if not minibatches or not layers:
        return {}
    total = DriftSums.zeros(len(layers), minibatches[0].load.shape[1], minibatches[0].load.device)
    for sums in minibatches:
        total = total + sums
    prefix = f"drift/{comparison}" + (f"/{view}" if view else "")
    metrics = _rates(total, layers, prefix, "", tuple(_METRICS))
    if total.any[1] > 0:
        metrics[f"{prefix}/any_layer_flip_rate"] = float(total.any[0] / total.any[1])
    if comparison == "update" and view is None:
        metrics |= _loads(total, layers)
    if comparison == "update" and view in (None, "local"):
        for i, sums in enumerate(minibatches):
            metrics |= _rates(sums, layers, prefix, f"/minibatch_{i}", _EACH_MINIBATCH)
    return metrics


def _rates(sums: DriftSums, layers: Sequence[int], prefix: str, suffix: str, names: Sequence[str]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in names:
        total, count, more_is_worse = _METRICS[name]
        found = _shown(sums.sum_of(total) / sums.sum_of(count), sums.sum_of(count), layers)
        metrics |= {f"{prefix}/{name}/layer_{layer:02d}{suffix}": value for layer, value in found.items()}
        if found:
            metrics[f"{prefix}/{name}/mean{suffix}"] = sum(found.values()) / len(found)
            metrics[f"{prefix}/{name}/worst{suffix}"] = (max if more_is_worse else min)(found.values())
    return metrics


def _loads(sums: DriftSums, layers: Sequence[int]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    measures = {"load_entropy": (load_entropy, min), "max_violation": (max_violation, max), "dead_experts": (dead_experts, max)}
    for name, (measure, worst) in measures.items():
        found = _shown(measure(sums.load), sums.sum_of("tokens"), layers)
        metrics |= {f"drift/load/{name}/layer_{layer:02d}": value for layer, value in found.items()}
        if found:
            metrics[f"drift/load/{name}/mean"] = sum(found.values()) / len(found)
            metrics[f"drift/load/{name}/worst"] = float(worst(found.values()))
    return metrics


def _shown(values: Tensor, counts: Tensor, layers: Sequence[int]) -> dict[int, float]:
    return {layer: float(value) for layer, value, n in zip(layers, values.tolist(), counts.tolist(), strict=True) if n > 0}
