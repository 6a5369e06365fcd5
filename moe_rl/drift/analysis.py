"""What trace columns say about routing: pure functions of numpy arrays, kept as sums so that files and updates add up.

T rows (tokens that entered the model), L MoE layers, K experts a token, E experts. Routes are [T, L, K]; -1 is unknown, and
a token's layer with an unknown id on either side is left out of every sum.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Compared:
    """Two passes over the same tokens, S and S' their sets of K experts. Each [T, L]; meaningless where known is false.

    change: 1 - |S & S'| / K. flips: S != S'. jaccard: |S & S'| / |S | S'|.
    """

    change: Floats
    flips: Bools
    jaccard: Floats
    known: Bools

    def token_flips(self) -> tuple[Bools, Floats, Bools]:
        """A token: flips in any known layer [T], the share of its known layers that flip [T], any layer known [T]."""
        layers = self.known.sum(-1)
        flipped = (self.flips & self.known).sum(-1)
        return flipped > 0, flipped / np.maximum(layers, 1), layers > 0


def compare(old: np.ndarray, new: np.ndarray) -> Compared:
    """The expert choice of two passes. Raises ValueError where the shapes differ."""
    if old.shape != new.shape or old.ndim != 3:
        raise ValueError(f"routes of shape {old.shape} and {new.shape}: must both be [T, L, K]")
    topk = old.shape[2]
    kept = np.zeros(old.shape, bool)
    for slot in range(topk):  # K passes over [T, L, K] instead of one over [T, L, K, K]
        kept |= old == new[..., slot : slot + 1]
    same = kept.sum(-1)
    known = ((old >= 0) & (new >= 0)).all(-1)
    return Compared((topk - same) / topk, same != topk, same / (2 * topk - same), known)


@dataclass(frozen=True)
class LayerSums:
    """Sums over tokens, each [L]: divide by `tokens` for expert change rate, flip rate and jaccard."""

    change: Floats
    flips: Floats
    jaccard: Floats
    tokens: Floats

    def __add__(self, other: "LayerSums") -> "LayerSums":
        return LayerSums(
            self.change + other.change, self.flips + other.flips, self.jaccard + other.jaccard, self.tokens + other.tokens
        )

    def rates(self) -> dict[str, Floats]:
        """Metric -> [L]; NaN in a layer without tokens."""
        named = {"expert_change_rate": self.change, "flip_rate": self.flips, "jaccard": self.jaccard}
        return {name: ratio(sums, self.tokens) for name, sums in named.items()}


def by_layer(compared: Compared, mask: Bools) -> LayerSums:
    """Sums over the tokens of `mask` [T]."""
    used = compared.known & mask[:, None]

    def total(values: np.ndarray) -> Floats:
        return np.where(used, values, 0).sum(0, dtype=np.float64)

    return LayerSums(total(compared.change), total(compared.flips), total(compared.jaccard), total(np.ones_like(used)))


@dataclass(frozen=True)
class MarginSums:
    """Bins of (token, layer) pairs by margin, nearest to a tie first. Each [bins]; margin: the sum over the bin's pairs."""

    pairs: Floats
    flips: Floats
    margin: Floats

    def __add__(self, other: "MarginSums") -> "MarginSums":
        return MarginSums(self.pairs + other.pairs, self.flips + other.flips, self.margin + other.margin)

    @property
    def flip_rate(self) -> Floats:
        return ratio(self.flips, self.pairs)

    @property
    def mean_margin(self) -> Floats:
        return ratio(self.margin, self.pairs)


def flips_by_margin(margin: np.ndarray, flips: np.ndarray, bins: int = 10) -> MarginSums:
    """Bins pairs by the quantiles of their margin (k-th minus (k+1)-th selection score).

    margin, flips: [N]; a margin that is not finite is left out. Edges are the quantiles 1/bins, 2/bins, ... (linear between
    values); a margin on an edge belongs to the higher bin, so that equal margins stay together.
    Files are binned one by one and their bins added: bin i is then the i-th quantile within its own step.
    """
    finite = np.isfinite(margin)
    values, flipped = margin[finite].astype(np.float64), flips[finite]
    if not len(values):
        return MarginSums(np.zeros(bins), np.zeros(bins), np.zeros(bins))
    edges = np.quantile(values, np.arange(1, bins) / bins)
    place = np.searchsorted(edges, values, side="right")

    def total(weights: np.ndarray) -> Floats:
        return np.bincount(place, weights=weights, minlength=bins)

    return MarginSums(total(np.ones_like(values)), total(flipped), total(values))


def load(routes: np.ndarray, mask: Bools, experts: int) -> Ints:
    """Tokens of `mask` [T] that each layer sends to each expert: [L, E]. Unknown ids are not counted."""
    chosen = routes[mask]
    layers = routes.shape[1]
    flat = (chosen.astype(np.int64) + np.arange(layers)[:, None] * experts)[chosen >= 0]
    return np.bincount(flat, minlength=layers * experts).reshape(layers, experts)


def load_entropy(counts: np.ndarray) -> Floats:
    """Entropy of the shares of load, over log E: 1 = even, 0 = all to one expert. [L, E] -> [L]; NaN without tokens."""
    experts = counts.shape[1]
    share = ratio(counts, counts.sum(-1, keepdims=True))
    if experts == 1:
        return share[:, 0]
    logs = np.log(np.where(share > 0, share, 1))
    return -(share * logs).sum(-1) / np.log(experts) + 0.0


def max_violation(counts: np.ndarray) -> Floats:
    """Largest load / mean load - 1: 0 = even. [L, E] -> [L]; NaN without tokens."""
    return ratio(counts.max(-1), counts.mean(-1)) - 1


def dead_experts(counts: np.ndarray) -> Ints:
    """Experts that no counted token chose. [L, E] -> [L]."""
    return (counts == 0).sum(-1)


def ratio(sums: np.ndarray, counts: np.ndarray) -> Floats:
    """sums / counts, NaN where there is nothing to count."""
    return np.divide(sums, counts, out=np.full(np.broadcast(sums, counts).shape, np.nan), where=np.asarray(counts) > 0)
