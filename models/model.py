"""The MoE transformer of one rank, assembled: forward passes that score, and passes with gradients that train."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models import build
from models.config import ModelConfig, OptimizerConfig
from models.initialise import initialise
from models.layer_map import moe_modules
from models.logprobs import Vocabulary, local_logits, logprobs_and_entropy
from models.optimizer import Optimizer
from models.routing import Replay, RouteLog, check_replayed, install_taps, open_logs
from models.stream import Stream
from models.torch_layers import StackedExperts
from parallel.groups import Groups
from parallel.schedule import round_up_microbatches, run_microbatches


@dataclass(frozen=True)
class Scores:
    """Of a stream's targets, in their order: log-probabilities and entropies of the next-token distributions, float32."""

    logprobs: Tensor
    entropy: Tensor


# Scores of one stream -> (this stream's share of the global loss, anything to hand back)
Loss = Callable[[Scores], tuple[Tensor, Any]]


class MoEModel:
    """`chunks`: modules with data-parallel gradient buffers around them. `bare`: the modules themselves.

    All methods that run the model are collective over the model-parallel and expert-parallel groups.
    """

    def __init__(self, config: ModelConfig, groups: Groups, device: torch.device, seed: int) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

        self.config, self.groups, self.device = config, groups, device
        self.megatron_config = build.transformer_config(config, groups)
        self.bare = build.build_chunks(config, groups, self.megatron_config)
        initialise(self.bare, config, groups, seed)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.chunks = [
            DistributedDataParallel(self.megatron_config, ddp, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(self.bare)
        ]
        self.megatron_config.finalize_model_grads_func = finalize_model_grads
        self.taps = install_taps(self.bare)
        self.moe_layers = [layer for layer, _ in moe_modules(self.bare)]

    def optimizer(self, config: OptimizerConfig, total_updates: int) -> Optimizer:
        """A fresh optimizer for these weights."""
        optimizer = Optimizer(config, self.chunks, total_updates, self.megatron_config.params_dtype)
        self.megatron_config.grad_scale_func = optimizer.megatron.scale_loss
        return optimizer

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

    def _run(
        self,
        streams: Sequence[Stream],
        losses: Sequence[Loss],
        scale: int,
        replay: Sequence[Replay] | None,
        forward_only: bool,
    ) -> list[Any]:
        open_logs(streams, replay, self.moe_layers)
        for chunk in self.chunks:
            chunk.train(not forward_only)

        def step(iterator: Any, chunk: Any) -> tuple[Any, Any]:
            stream, loss = next(iterator)
            return self._forward(chunk, stream), partial(finish, stream, loss)

        def finish(stream: Stream, loss: Loss, scores: Scores) -> tuple[Tensor, Tensor, Any]:
            value, result = loss(scores)
            return value * scale, torch.tensor(stream.real, dtype=torch.int), result

        pairs = list(zip(streams, losses, strict=True))
        longest = max(stream.size for stream in streams)
        results = run_microbatches(self.chunks, step, pairs, self.groups, longest=longest, forward_only=forward_only)
        check_replayed(streams, self.moe_layers)
        return results

    def _forward(self, chunk: Any, stream: Stream) -> Any:
        return chunk(
            input_ids=stream.tokens[None],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=stream,
            padding_mask=self._padding_mask(chunk, stream),
            output_processor=self._score_hidden if stream.targets is not None else self._next_token_logits,
            output_processor_context=stream,
        )

    def _padding_mask(self, chunk: Any, stream: Stream) -> Tensor | None:
        if self.config.load_balancing == "none":
            return None  # nothing looks at it
        mask = stream.padding_mask()
        if self.config.load_balancing == "global_aux_loss":
            if mask is None:  # Megatron would think that all ranks have as many tokens as this one
                mask = torch.zeros(1, stream.size, dtype=torch.bool, device=self.device)
            elif not stream.real:
                mask[:, 0] = False  # were no rank to have a token, Megatron would divide by zero
        module = getattr(chunk, "module", chunk)
        if mask is None or module.pre_process or self.groups.tensor.size == 1:
            return mask
        return mask.chunk(self.groups.tensor.size, dim=1)[self.groups.tensor.rank]  # the first stage splits it by itself

    def _vocabulary(self, weight: Tensor) -> Vocabulary:
        tensor = self.groups.tensor
        return Vocabulary(tensor.rank * weight.shape[0], self.config.vocab_size, tensor.group if tensor.size > 1 else None)

    def _rows_asked_about(self, hidden: Tensor, stream: Stream) -> Tensor:
        """[T / tensor, 1, hidden] -> [len(score_at), hidden], on every tensor rank."""
        if self.groups.tensor.size > 1:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            hidden = gather_from_sequence_parallel_region(hidden, group=self.groups.tensor.group)
        return hidden[stream.score_at, 0]

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

    def microbatch_count(self, needed: int) -> int:
        """Microbatches that every data-parallel rank must bring, when one of them needs `needed` (collective)."""
        count = torch.tensor(needed, device=self.device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        return round_up_microbatches(int(count), self.groups)

    def stream_sizes(self, wanted: Sequence[int]) -> list[int]:
        """Sizes to fill streams up to: a multiple of the tensor group, and equal over the ranks that exchange tokens where
        the dispatcher demands it (collective; each rank brings equally many)."""
        tensor = self.groups.tensor.size
        sizes = torch.tensor([max(size, 1) for size in wanted], device=self.device)
        if self.groups.parallel.dispatcher == "allgather":
            dist.all_reduce(sizes, dist.ReduceOp.MAX)
        return [-(-int(size) // tensor) * tensor for size in sizes]
