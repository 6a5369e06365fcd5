"""The policy of one rank: forward passes that score, passes with gradients that train, and single ones that generate."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.logprobs import Vocabulary, local_logits, logprobs_and_entropy
from models.routing import Replay, RouteLog
from models.stream import Stream
from models.torch_layers import StackedExperts
from models.transformer import Transformer


@dataclass(frozen=True)
class Scores:
    """Of a stream's targets, in their order: log-probabilities and entropies of the next-token distributions, float32."""

    logprobs: Tensor
    entropy: Tensor


# Scores of one stream -> (this stream's share of the global loss, anything to hand back)
Loss = Callable[[Scores], tuple[Tensor, Any]]


class MoEModel(Transformer):
    """The MoE transformer with next-token distributions on top."""

    @torch.no_grad()
    def score(self, streams: Sequence[Stream], replay: Sequence[Replay] | None = None) -> list[Scores]:
        """Log-probabilities without gradients; records routes into each stream's log. On the last stage, else [].

        replay: what each stream's routers must choose in this pass, and in no other. Raises RuntimeError, with layer,
        microbatch and sample, where a router did not.
        """
        losses: list[Loss] = [lambda scores: (scores.logprobs.sum(), scores)] * len(streams)
        return self._run(streams, losses, 1, replay, forward_only=True)

    def accumulate_gradients(
        self, streams: Sequence[Stream], losses: Sequence[Loss], tokens: int, replay: Sequence[Replay] | None = None
    ) -> list[Any]:
        """Forward and backward of sum(losses); leaves reduced gradients for the optimizer. Results on the last stage, else [].

        tokens: real tokens of all streams over all data-parallel ranks. Megatron divides by it what we multiply by it, so
        that load-balancing losses, which it counts a token, keep their weight. replay: as in `score`.
        """
        return self._run(streams, losses, tokens, replay, forward_only=False)

    def _head(self, stream: Stream) -> Callable[..., Any]:
        return self._score_hidden if stream.targets is not None else self._next_token_logits

    def _vocabulary(self, weight: Tensor) -> Vocabulary:
        tensor = self.groups.tensor
        return Vocabulary(tensor.rank * weight.shape[0], self.config.vocab_size, tensor.group if tensor.size > 1 else None)

    def _score_hidden(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Any, context: Stream, **_: Any
    ) -> Scores:
        weight = output_weight if output_weight is not None else output_layer.weight
        assert context.targets is not None
        return Scores(
            *logprobs_and_entropy(
                self._rows_asked_about(hidden_states, context),
                weight,
                context.targets,
                context.temperature,
                self.config.logprob_chunk,
                self._vocabulary(weight),
            )
        )

    def _next_token_logits(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Any, context: Stream, **_: Any
    ) -> Tensor:
        """[len(score_at), padded vocabulary] on every tensor rank."""
        weight = output_weight if output_weight is not None else output_layer.weight
        hidden = self._rows_asked_about(hidden_states, context)
        part = local_logits(hidden, weight, 1.0, self._vocabulary(weight))
        if self.groups.tensor.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.groups.tensor.size)]
        dist.all_gather(parts, part.contiguous(), group=self.groups.tensor.group)
        return torch.cat(parts, dim=-1)

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Weights stay as they are within the block: experts are stacked once for it."""
        experts = [m for chunk in self.bare for m in chunk.modules() if isinstance(m, StackedExperts)]
        for chunk in self.bare:
            chunk.eval()
        try:
            for module in experts:
                module.stack()
            yield
        finally:
            for module in experts:
                module.unstack()

    @torch.no_grad()
    def next_token_logits(self, stream: Stream) -> Tensor | None:
        """One forward for generation, through all stages by hand (no schedule): logits on the last stage, else None."""
        stream.routes = RouteLog()
        groups, output = self.groups, None
        size = stream.size // groups.tensor.size
        for number, chunk in enumerate(self.bare):
            if not groups.is_first_chunk(number):
                hidden = torch.empty(size, 1, self.config.hidden, dtype=self.megatron_config.params_dtype, device=self.device)
                dist.recv(hidden, groups.previous_stage)
                chunk.set_input_tensor(hidden)
            output = self._forward(chunk, stream)
            if not groups.is_last_chunk(number):
                dist.send(output.contiguous(), groups.next_stage)
                output = None
        return output
