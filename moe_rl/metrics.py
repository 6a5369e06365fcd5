"""Numbers of a step, kept as sums and counts so that microbatches and ranks add up before anything is divided."""

import zlib

import torch
from jaxtyping import Float64
from torch import Tensor

Number = int | float | Tensor

# Positions of the key fingerprint at the head of the maxima vector: its largest and (negated) smallest value over ranks.
_FINGERPRINTS = 2


class Metrics:
    """An additive store. Keys are paths such as "ratio/clip_fraction"; a key is either a mean or a maximum.

    Tensors stay where they are, unread, until `means`, `maxima` or `load_vector`: adding never waits for a device.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Number] = {}
        self._counts: dict[str, Number] = {}
        self._maxima: dict[str, Number] = {}

    def add(self, key: str, total: Number, count: Number = 1) -> None:
        """Add a sum of `count` values to a mean. A key with nothing to count is still added, as (0, 0)."""
        if key in self._maxima:
            raise ValueError(f"metric {key!r}: is a maximum and cannot become a mean")
        total, count = _scalar(key, total), _scalar(key, count)
        self._totals[key] = self._totals[key] + total if key in self._totals else total
        self._counts[key] = self._counts[key] + count if key in self._counts else count

    def add_max(self, key: str, value: Number) -> None:
        """Raise a maximum to `value`. Minus infinity stands for "no value here"."""
        if key in self._totals:
            raise ValueError(f"metric {key!r}: is a mean and cannot become a maximum")
        value = _scalar(key, value)
        self._maxima[key] = _larger(self._maxima[key], value) if key in self._maxima else value

    def merge(self, other: "Metrics") -> None:
        """Add everything that `other` holds."""
        for key, total in other._totals.items():
            self.add(key, total, other._counts[key])
        for key, value in other._maxima.items():
            self.add_max(key, value)

    def vector(self, device: torch.device | str | None = None) -> tuple[Float64[Tensor, " S"], Float64[Tensor, " M"]]:
        """Everything as two vectors in sorted key order: all-reduce the first with SUM and the second with MAX.

        Every rank must hold the same keys; the maxima begin with a fingerprint of the keys that `load_vector` checks.
        device: that of the process group; none: that of the first tensor held, or the CPU.
        """
        sums = [self._totals[key] for key in sorted(self._totals)] + [self._counts[key] for key in sorted(self._counts)]
        fingerprint = float(self._fingerprint())
        maxima = [fingerprint, -fingerprint] + [self._maxima[key] for key in sorted(self._maxima)]
        held = next((value.device for value in [*sums, *maxima] if isinstance(value, Tensor)), torch.device("cpu"))
        return _stack(sums, device or held), _stack(maxima, device or held)

    def load_vector(self, sums: Float64[Tensor, " S"], maxima: Float64[Tensor, " M"]) -> None:
        """Take the reduced vectors back in place of what is held. Reads from the device once.

        Raises ValueError where the lengths or the fingerprint say that ranks held different keys.
        """
        keys, max_keys = sorted(self._totals), sorted(self._maxima)
        if len(sums) != 2 * len(keys) or len(maxima) != _FINGERPRINTS + len(max_keys):
            raise ValueError(
                f"metrics: {len(sums)} sums and {len(maxima)} maxima do not fit {len(keys)} means and {len(max_keys)} maxima"
            )
        *totals, largest, negated_smallest = torch.cat([sums, maxima[_FINGERPRINTS:], maxima[:_FINGERPRINTS]]).tolist()
        if not largest == -negated_smallest == float(self._fingerprint()):
            raise ValueError(f"metrics: ranks held different keys; this rank: {', '.join(keys + max_keys)}")
        self._totals = dict(zip(keys, totals, strict=False))
        self._counts = dict(zip(keys, totals[len(keys) :], strict=False))
        self._maxima = dict(zip(max_keys, totals[2 * len(keys) :], strict=True))

    def means(self) -> dict[str, float]:
        """Sum / count of each key. A key that counted nothing is left out: a mean of nothing has no value."""
        sums = self.vector()[0].tolist()
        half = len(self._totals)
        return {key: sums[i] / sums[half + i] for i, key in enumerate(sorted(self._totals)) if sums[half + i] != 0}

    def maxima(self) -> dict[str, float]:
        """Each maximum. A key that saw no value is left out."""
        values = self.vector()[1].tolist()[_FINGERPRINTS:]
        return {key: value for key, value in zip(sorted(self._maxima), values, strict=True) if value != float("-inf")}

    def _fingerprint(self) -> int:
        names = "\n".join(sorted(self._totals)) + "\n\n" + "\n".join(sorted(self._maxima))
        return zlib.crc32(names.encode())


def _scalar(key: str, value: Number) -> Number:
    if not isinstance(value, Tensor):
        return float(value)
    if value.ndim:
        raise ValueError(f"metric {key!r}: must be one number, not a tensor of shape {tuple(value.shape)}")
    return value.detach().to(torch.float64)


def _larger(a: Number, b: Number) -> Number:
    tensor = a if isinstance(a, Tensor) else b
    if not isinstance(tensor, Tensor):
        return a if a != a or a >= b else b  # a NaN stays, as torch.maximum keeps it
    return torch.maximum(torch.as_tensor(a).to(tensor), torch.as_tensor(b).to(tensor))


def _stack(values: list[Number], device: torch.device | str) -> Tensor:
    """One float64 vector; the plain numbers cross to the device together."""
    vector = torch.tensor([0.0 if isinstance(v, Tensor) else v for v in values], dtype=torch.float64).to(device)
    places = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
    if places:
        vector[torch.tensor(places, device=device)] = torch.stack([v.to(device) for v in values if isinstance(v, Tensor)])
    return vector
