"""What an evaluation estimates and how well, from what became of each response. Pure: no model, no ranks.

A standard error here is clustered by problem: responses to one problem resemble each other, so what counts as one observation
is a problem's own mean (or its pass@k), and the P problems are the sample.
"""

import math
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Stopped = Literal["eos", "stop", "length"]  # by the end of sequence, by another stop, at rollout.max_response_tokens


@dataclass(frozen=True)
class Outcome:
    """What became of one response. tokens: generated, with the one that ended it. failed: its reward broke and counts as 0."""

    reward: float
    passed: bool
    tokens: int
    stopped: Stopped
    failed: bool = False


@dataclass(frozen=True)
class Estimate:
    """stderr: None where it is not defined: of one problem alone, of a median or a maximum."""

    value: float
    stderr: float | None = None


@lru_cache(maxsize=4096)
def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k responses is correct: 1 - C(n - c, k) / C(n, k), with n `samples` and c
    `correct` (Chen et al., arXiv 2107.03374, eq. 1).

    In whole numbers until the one division, which Python rounds correctly: nothing overflows and nothing cancels.
    """
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(f"k={k}, correct={correct}: need 1 <= k <= samples={samples} and 0 <= correct <= samples")
    every = math.comb(samples, k)
    return (every - math.comb(samples - correct, k)) / every


def over_problems(values: Sequence[float]) -> Estimate:
    """Mean of one value a problem and its standard error, sqrt(sum (s_i - mean)^2 / (P - 1) / P).

    Miller, arXiv 2411.00640: eq. 1 with the means of problems as the scores, as section 3.1 takes several responses a problem.
    With equally many responses a problem it is the clustered error of section 2.2 times sqrt(P / (P - 1)), for few problems.
    """
    count, mean = len(values), math.fsum(values) / len(values)
    if count < 2:
        return Estimate(mean)
    return Estimate(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count))


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest of `values` that at least `share` of them do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Tally:
    """Adds up problems as they are answered; holds numbers alone, no texts. ks: of the pass@k that are wanted."""

    def __init__(self, samples: int, ks: Sequence[int]) -> None:
        self._samples, self._ks = samples, sorted({1, *ks})
        self._correct: list[int] = []
        self._means: dict[str, list[float]] = {
            "reward_mean": [],
            "response_length_mean": [],
            "response_truncated_fraction": [],
            "response_eos_fraction": [],
        }
        self._lengths = array("q")
        self._failed = 0

    @property
    def problems(self) -> int:
        return len(self._correct)

    @property
    def tokens(self) -> int:
        return sum(self._lengths)

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """The responses to one problem."""
        if len(outcomes) != self._samples:
            raise ValueError(f"{len(outcomes)} responses to a problem: must be {self._samples}")
        self._correct.append(sum(o.passed for o in outcomes))
        self._failed += sum(o.failed for o in outcomes)
        self._lengths.extend(o.tokens for o in outcomes)
        sums = (
            math.fsum(o.reward for o in outcomes),
            sum(o.tokens for o in outcomes),
            sum(o.stopped == "length" for o in outcomes),
            sum(o.stopped == "eos" for o in outcomes),
        )
        for means, total in zip(self._means.values(), sums, strict=True):
            means.append(total / self._samples)

    def estimates(self) -> dict[str, Estimate]:
        """By the name that stands behind `eval/` in a metric's key. Lengths in tokens."""
        found = {f"pass_at_{k}": over_problems([pass_at_k(self._samples, c, k) for c in self._correct]) for k in self._ks}
        found |= {name: over_problems(means) for name, means in self._means.items()}
        found["response_length_median"] = Estimate(float(statistics.median(self._lengths)))
        found["response_length_p95"] = Estimate(float(percentile(self._lengths, 0.95)))
        found["response_length_max"] = Estimate(float(max(self._lengths)))
        found["reward_failed"] = Estimate(float(self._failed))
        return found

    def metrics(self) -> dict[str, float]:
        """`eval/NAME`, and `eval/NAME_stderr` where that is defined."""
        found = {"eval/problems": float(self.problems)}
        for name, estimate in self.estimates().items():
            found[f"eval/{name}"] = estimate.value
            if estimate.stderr is not None:
                found[f"eval/{name}_stderr"] = estimate.stderr
        return found
