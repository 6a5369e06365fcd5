"""What every rollout engine offers."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_rl.types import Response, Sampling


@dataclass(frozen=True)
class Request:
    """One response to be sampled. The same prompt and seed give the same response, whatever else is in the batch."""

    prompt_ids: list[int]
    seed: int


class Engine(Protocol):
    def generate(self, requests: Sequence[Request], sampling: Sampling, *, routes: bool = True) -> list[Response]:
        """A response a request, in order. Collective: every rank calls it at the same time, a data-parallel rank with its
        own requests (possibly none), the ranks of one model copy with the same ones. routes: record expert choices."""
        ...


def sample_seed(run_seed: int, purpose: str, step: int, index: int) -> int:
    """A seed for one response that depends on what it is, not on where it is sampled."""
    text = f"{run_seed}:{purpose}:{step}:{index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
