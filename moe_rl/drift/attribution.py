"""What of a log-ratio comes from routing and what from weights, and who is clipped. Pure numpy over a table of tokens.

With pi(free) a forward in which routers choose and pi(old routes) one along the routes of the old policy:
log r = log pi_new(free) - log pi_old = routing + weights,
routing = log pi_new(free) - log pi_new(old routes), weights = log pi_new(old routes) - log pi_old.
"""

import numpy as np

from moe_rl.drift.tokens import Array, TokenTable

BINS = 5


def attribution(table: TokenTable, replayed: bool) -> dict[str, float]:
    """`attribution/...` (and under replay `replay/forced_gap`) of the response tokens of one update. Keys without a value (no
    flips, no variance, the other pass not made) are left out.

    A token is flipped where any layer's natural choice differs from the old one; a sequence where any of its tokens is, and
    it is clipped where any of its tokens is. The margin is the smallest over layers, in quantile bins: 0 is nearest to a tie.
    """
    rows = table.response.astype(bool)
    flips = layer_flips(table, replayed)[rows]
    log_ratio = (table.train_logprob - table.old_logprob)[rows].astype(np.float64)
    clipped, flipped = table.clipped[rows].astype(bool), flips.any(axis=1)
    sequence = np.unique(table.sample[rows], return_inverse=True)[1]
    found = _clipping("token", clipped, flipped) | _clipping("sequence", _any(clipped, sequence), _any(flipped, sequence))
    found |= {
        "attribution/flip_correlation/token": correlation(flips.mean(axis=1), np.abs(log_ratio)),
        "attribution/flip_correlation/sequence": correlation(
            _mean(flips.mean(axis=1), sequence), np.abs(_mean(log_ratio, sequence))
        ),
    }
    found |= _margins(table.old_margin[rows], clipped, flipped)
    other = table.other_logprob[rows].astype(np.float64)
    if len(other) and np.isfinite(other).all():
        found |= split(table, replayed)
    return {key: float(value) for key, value in found.items() if value is not None and np.isfinite(value)}


def layer_flips(table: TokenTable, replayed: bool) -> Array:
    """[N, L] where the natural choice differs from the old one; under replay that of the free pass, where there was one."""
    natural = table.new_routes
    if replayed and table.free_routes.size and (table.free_routes >= 0).all():
        natural = table.free_routes
    return (table.old_routes != natural).any(axis=2)


def parts(table: TokenTable, replayed: bool) -> tuple[Array, Array, Array]:
    """(log r, routing, weights) of the response tokens, float64; log r = routing + weights. Needs the other pass."""
    rows = table.response.astype(bool)
    old, train, other = (
        column[rows].astype(np.float64) for column in (table.old_logprob, table.train_logprob, table.other_logprob)
    )
    free, along_old = (other, train) if replayed else (train, other)
    return free - old, free - along_old, along_old - old


def split(table: TokenTable, replayed: bool) -> dict[str, float | None]:
    """routing_share: cov(routing, log r) / var(log r); with the share of weights it makes 1."""
    total, routing, weights = parts(table, replayed)
    # exact but for the rounding of float64 sums of float32 numbers
    assert np.abs(routing + weights - total).max() <= 1e-12 * (1 + np.abs(total).max())
    variance = total.var()
    found: dict[str, float | None] = {
        "attribution/log_ratio_abs": np.abs(total).mean(),
        "attribution/routing_abs": np.abs(routing).mean(),
        "attribution/weights_abs": np.abs(weights).mean(),
        "attribution/routing_share": ((routing - routing.mean()) * (total - total.mean())).mean() / variance
        if variance > 0
        else None,
    }
    if replayed:
        found["replay/forced_gap"] = np.abs(routing).mean()
    return found


def correlation(a: Array, b: Array) -> float | None:
    """Pearson's; None where one of the two does not vary."""
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return None
    return float(((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std()))


def _clipping(level: str, clipped: Array, flipped: Array) -> dict[str, float | None]:
    return {
        f"attribution/clip_fraction/{level}/flipped": clipped[flipped].mean() if flipped.any() else None,
        f"attribution/clip_fraction/{level}/steady": clipped[~flipped].mean() if not flipped.all() else None,
        f"attribution/flip_rate/{level}": flipped.mean() if len(flipped) else None,
    }


def _margins(margins: Array, clipped: Array, flipped: Array) -> dict[str, float | None]:
    """By quantile bins of the smallest margin over layers."""
    if not margins.shape[1] or not len(margins) or not np.isfinite(margins).all():
        return {}
    order = margins.min(axis=1).argsort(kind="stable")
    found: dict[str, float | None] = {}
    for i, rows in enumerate(np.array_split(order, BINS)):
        if len(rows):
            found[f"attribution/clip_fraction/margin_{i}"] = clipped[rows].mean()
            found[f"attribution/flip_rate/margin_{i}"] = flipped[rows].mean()
    return found


def _any(values: Array, group: Array) -> Array:
    return np.bincount(group, weights=values.astype(np.float64)) > 0


def _mean(values: Array, group: Array) -> Array:
    return np.bincount(group, weights=values) / np.maximum(np.bincount(group), 1)
