"""What traces say, or where a run has none, what its metrics say of the same: flips against margin, clipping, correlations."""

from typing import NamedTuple

import numpy as np

from moe_rl.drift.runs import Run

UNITS = ("token", "sequence")
_METRIC_BINS = 5  # attribution/.../margin_0 to margin_4


class MarginBin(NamedTuple):
    """A quantile bin, nearest to a tie first. margin: its mean, where traces hold it. pairs: how many it stands on."""

    flip_rate: float
    margin: float | None = None
    pairs: int | None = None


def margin_bins(run: Run, last: int) -> list[MarginBin]:
    """Traces: ten bins of (token, layer) pairs by that layer's margin. Metrics: five bins of tokens by their least margin."""
    if run.traces is not None and run.traces.margins is not None:
        sums = run.traces.margins
        rows = zip(sums.flip_rate.tolist(), sums.mean_margin.tolist(), sums.pairs.tolist(), strict=True)
        return [MarginBin(rate, margin, int(pairs)) for rate, margin, pairs in rows if pairs]
    values = [run.history.recent(f"attribution/flip_rate/margin_{i}", last) for i in range(_METRIC_BINS)]
    return [MarginBin(value) for value in values if value is not None]


def clip_fractions(run: Run, unit: str, last: int) -> tuple[float | None, float | None]:
    """The share that is clipped of the steady and of the flipped tokens (or sequences)."""
    if run.traces is not None and unit in run.traces.clipped:
        steady, flipped = run.traces.clipped[unit].fraction.tolist()
        return _number(steady), _number(flipped)
    steady, flipped = (run.history.recent(f"attribution/clip_fraction/{unit}/{of}", last) for of in ("steady", "flipped"))
    return steady, flipped


def correlations(run: Run, unit: str, last: int) -> tuple[float | None, float | None]:
    """Of flips with |log r|: over everything, and within an update (which only traces tell)."""
    if run.traces is not None and unit in run.traces.moments:
        whole, within = (_number(run.traces.correlation(unit, within)) for within in (False, True))
        return whole, within
    return run.history.recent(f"attribution/flip_correlation/{unit}", last), None


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
