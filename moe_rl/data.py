"""The order in which problems come: a permutation an epoch, so that a position is all there is to remember."""

import random
from collections.abc import Sequence

from moe_rl.types import Problem


class ProblemOrder:
    """An endless sequence of problems. The same seed gives the same order, on every rank and after a restart."""

    def __init__(self, problems: Sequence[Problem], seed: int, purpose: str) -> None:
        self._problems, self._name = problems, f"{seed}:{purpose}"
        self._epoch: int | None = None
        self._permutation: list[int] = []

    def take(self, position: int, count: int) -> list[Problem]:
        """The problems at [position, position + count)."""
        return [self._at(position + i) for i in range(count)]

    def _at(self, position: int) -> Problem:
        epoch, place = divmod(position, len(self._problems))
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, list(range(len(self._problems)))
            random.Random(f"{self._name}:{epoch}").shuffle(self._permutation)
        return self._problems[self._permutation[place]]
