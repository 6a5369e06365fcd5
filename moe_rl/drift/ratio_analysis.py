"""What flips have to do with the importance ratio: pure functions of numpy arrays.

log r = train_logprob - old_logprob of a response token, in nats. A token is flipped when at least one layer chose another
set of experts than in the old pass, else steady; a sequence is flipped when one of its response tokens is. In a deep model
nearly every token is flipped: the correlations, which take the share of layers, still tell tokens apart then.
Arrays of two: [steady, flipped].
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_rl.drift.analysis import ratio

_DECADE = np.concatenate([10.0 ** (exponent + np.arange(4) / 4) for exponent in range(-5, 1)] + [[10.0]])
# 50 edges of 51 bins, in nats: quarter decades from 1e-5 to 10 on both sides of a bin around 0, and what is beyond
EDGES = np.concatenate([-_DECADE[::-1], _DECADE])


def histogram(log_ratio: np.ndarray, flipped: np.ndarray) -> NDArray[np.int64]:
    """Tokens by log r, [2, 51]: bin i holds EDGES[i - 1] <= log r < EDGES[i]. log_ratio, flipped: [N]."""
    place = np.searchsorted(EDGES, log_ratio, side="right")
    bins = len(EDGES) + 1
    return np.stack([np.bincount(place[flipped == which], minlength=bins) for which in (False, True)])


class Clipped(NamedTuple):
    """How many are clipped, of how many: each [2]."""

    clipped: NDArray[np.float64]
    total: NDArray[np.float64]

    def plus(self, other: "Clipped") -> "Clipped":
        return Clipped(self.clipped + other.clipped, self.total + other.total)

    @property
    def fraction(self) -> NDArray[np.float64]:
        return ratio(self.clipped, self.total)


def clip_by_flip(clipped: np.ndarray, flipped: np.ndarray) -> Clipped:
    """Of tokens or of sequences: both [N] and boolean."""
    which = flipped.astype(np.int64)
    cut = np.bincount(which, weights=clipped.astype(np.float64), minlength=2)
    return Clipped(cut.astype(np.float64), np.bincount(which, minlength=2).astype(np.float64))


@dataclass(frozen=True)
class Moments:
    """Count, means and centred sums of two quantities x and y, which add up without loss (Chan, Golub and LeVeque 1979)."""

    n: float
    mean_x: float
    mean_y: float
    xx: float  # sum of (x - mean)^2
    yy: float
    xy: float

    @staticmethod
    def of(x: np.ndarray, y: np.ndarray) -> "Moments":
        if not len(x):
            return Moments(0, 0, 0, 0, 0, 0)
        a, b = x.astype(np.float64), y.astype(np.float64)
        mean_x, mean_y = float(a.mean()), float(b.mean())
        a, b = a - mean_x, b - mean_y
        return Moments(len(x), mean_x, mean_y, float(a @ a), float(b @ b), float(a @ b))

    def __add__(self, other: "Moments") -> "Moments":
        n = self.n + other.n
        if not n:
            return self
        dx, dy = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        share = other.n / n
        between = self.n * share
        return Moments(
            n,
            self.mean_x + dx * share,
            self.mean_y + dy * share,
            self.xx + other.xx + dx * dx * between,
            self.yy + other.yy + dy * dy * between,
            self.xy + other.xy + dx * dy * between,
        )

    def within(self, other: "Moments") -> "Moments":
        """The sum without what the two groups' means contribute: each value as its distance from its own group's mean."""
        return Moments(self.n + other.n, 0, 0, self.xx + other.xx, self.yy + other.yy, self.xy + other.xy)

    @property
    def correlation(self) -> float:
        """Pearson's: xy / sqrt(xx yy). NaN where x or y does not vary."""
        return self.xy / (self.xx * self.yy) ** 0.5 if self.xx > 0 and self.yy > 0 else float("nan")


class Sequences(NamedTuple):
    """Response tokens gathered by sequence. Each [B]: |mean log r|, mean share of layers that flip, any flip, any clipped."""

    log_ratio: NDArray[np.float64]
    flip_share: NDArray[np.float64]
    flipped: NDArray[np.bool_]
    clipped: NDArray[np.bool_]


def by_sequence(
    sample: np.ndarray, log_ratio: np.ndarray, flip_share: np.ndarray, flipped: np.ndarray, clipped: np.ndarray
) -> Sequences:
    """Response tokens of one update -> its sequences. All [N]; sample says which sequence a token is of.

    GSPO's sequence ratio is exp(mean log r), so a sequence's |log r| is the absolute value of the mean.
    """
    _, place = np.unique(sample, return_inverse=True)
    count = np.bincount(place)

    def mean(values: np.ndarray) -> NDArray[np.float64]:
        return np.bincount(place, weights=values) / count

    return Sequences(np.abs(mean(log_ratio)), mean(flip_share), mean(flipped) > 0, mean(clipped) > 0)
