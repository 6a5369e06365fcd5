"""What travels between the phases of a step.

Axes: B sequences, T tokens, L MoE layers, K experts a token, G responses a prompt. Log-probabilities in nats.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Problem:
    """One verifiable question. `answer` is whatever the task's score function compares with."""

    id: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Sampling:
    """How an engine draws tokens. temperature 0 is greedy; top_k 0 and top_p 1 are off. full_logprobs: log-probabilities are
    reported of the distribution before top-k and top-p, as the trainer computes them, instead of the one drawn from."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    full_logprobs: bool = False


@dataclass(frozen=True)
class Response:
    """What an engine returns for one request.

    logprobs: of the distribution really sampled from (after temperature, top-k and top-p), one a token; with
    Sampling.full_logprobs of the one before top-k and top-p.
    routes: [prompt + response - 1, L, K] expert ids of every token that entered the model (the last never does), of the MoE
    layers that this rank's pipeline stage owns; -1 where the engine does not know. Small integers; they stay on the rank.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    routes: "Tensor | None" = None


@dataclass
class Rollout:
    """One scored response. `index` is its place in the step's batch: prompt number * G + response number."""

    index: int
    problem: Problem
    prompt_ids: list[int]
    response: Response
    text: str
    reward: float
    parts: dict[str, float] = field(default_factory=dict)
