"""The MoE transformer of one rank, assembled, and passes through it. What is made of its hidden states is a subclass's."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models import build
from models.config import ModelConfig, OptimizerConfig
from models.initialise import initialise
from models.layer_map import let_go_of_graphs, moe_modules
from models.optimizer import Optimizer
from models.routing import Replay, check_replayed, install_taps, open_logs
from models.stream import Stream
from parallel.groups import Groups
from parallel.schedule import round_up_microbatches, run_microbatches

# What `_head` gives for one stream -> (this stream's share of the global loss, anything to hand back)
HeadLoss = Callable[[Any], tuple[Tensor, Any]]


class Transformer(ABC):
    """`chunks`: modules with data-parallel gradient buffers around them. `bare`: the modules themselves.

    All methods that run the model are collective over the model-parallel and expert-parallel groups. Several may live on the
    same ranks and groups: each has its own Megatron configuration, where Megatron keeps what belongs to one model.
    """

    def __init__(self, config: ModelConfig, groups: Groups, device: torch.device, seed: int) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

        self.config, self.groups, self.device = config, groups, device
        self.megatron_config = build.transformer_config(config, groups)
        self.bare = self._build()
        initialise(self.bare, config, groups, seed)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.chunks = [
            DistributedDataParallel(self.megatron_config, ddp, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(self.bare)
        ]
        self.megatron_config.finalize_model_grads_func = finalize_model_grads
        self.taps = install_taps(self.bare, config.router_group_best)
        self.moe_layers = [layer for layer, _ in moe_modules(self.bare)]

    def _build(self) -> list[Any]:
        """The modules, weights undefined."""
        return build.build_chunks(self.config, self.groups, self.megatron_config)

    @abstractmethod
    def _head(self, stream: Stream) -> Callable[..., Any]:
        """What the last stage makes of the stream's hidden states: Megatron's output_processor."""

    def optimizer(self, config: OptimizerConfig, total_updates: int) -> Optimizer:
        """A fresh optimizer for these weights."""
        optimizer = Optimizer(config, self.chunks, total_updates, self.megatron_config.params_dtype)
        # weakly: Megatron keeps configurations, and with a whole optimizer its process groups and their threads
        held = weakref.WeakMethod(optimizer.megatron.scale_loss)
        self.megatron_config.grad_scale_func = lambda loss: scale(loss) if (scale := held()) else loss
        return optimizer

    def _run(
        self,
        streams: Sequence[Stream],
        losses: Sequence[HeadLoss],
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

        def finish(stream: Stream, loss: HeadLoss, output: Any) -> tuple[Tensor, Tensor, Any]:
            value, result = loss(output)
            return value * scale, torch.tensor(stream.real, dtype=torch.int), result

        pairs = list(zip(streams, losses, strict=True))
        longest = max(stream.size for stream in streams)
        try:
            results = run_microbatches(self.chunks, step, pairs, self.groups, longest=longest, forward_only=forward_only)
        finally:
            let_go_of_graphs(self.bare)
        check_replayed(streams, self.moe_layers)
        return results

    def _forward(self, chunk: Any, stream: Stream) -> Any:
        return chunk(
            input_ids=stream.tokens[None],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=stream,
            padding_mask=self._padding_mask(chunk, stream),
            output_processor=self._head(stream),
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

    def _rows_asked_about(self, hidden: Tensor, stream: Stream, *, duplicated: bool = False) -> Tensor:
        """[T / tensor, 1, hidden] -> [len(score_at), hidden], on every tensor rank.

        The gradients of the tensor ranks are parts, and summed; where `duplicated`, each computes the whole, and none are.
        """
        if self.groups.tensor.size > 1:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=not duplicated, group=self.groups.tensor.group
            )
        return hidden[stream.score_at, 0]

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
