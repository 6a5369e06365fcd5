"""What travels between the phases of a step.

Axes: B sequences, T tokens, L MoE layers, K experts a token, G responses a prompt. Log-probabilities in nats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]
Message = Mapping[str, Any]  # role, content, and whatever else a chat template reads


@dataclass(frozen=True)
class Problem:
    """One verifiable question. `answer` is whatever the task's score function compares with.

    messages: the conversation that asks it, where it is one; `prompt` then is its text, for people, score functions and the
    comparison of prompts, and not what a model sees. reply: the assistant's turn as the data has it, for supervised training;
    none: the answer is the turn.
    """

    id: str
    prompt: str
    answer: str
    messages: tuple[Message, ...] = ()
    reply: Message | None = None

    @classmethod
    def of_messages(cls, id: str, messages: Sequence[Message], answer: str, reply: Message | None = None) -> Self:
        """A problem that a conversation asks. Its `prompt` is the turns, each behind its role; a single user's turn alone."""
        if len(messages) == 1 and messages[0].get("role") == "user":
            text = str(messages[0].get("content"))
        else:
            text = "\n\n".join(f"{message.get('role')}: {message.get('content') or ''}" for message in messages)
        return cls(id, text, answer, tuple(messages), reply)


@dataclass(frozen=True)
class Sampling:
    """How an engine draws tokens. temperature 0 is greedy; top_k 0 and top_p 1 are off. full_logprobs: log-probabilities are
    reported of the distribution before top-k and top-p, as the trainer computes them, instead of the one drawn from.

    stop: texts. A response ends with the token with which its text first holds one of them; that token stays in the
    response, and the text that is rewarded ends before the stop."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    full_logprobs: bool = False
    stop: tuple[str, ...] = ()


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
