"""Streams of random sequences, routes to force on them, and what each router then gave."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.layer_map import moe_modules
from models.model import MoEModel, Scores
from models.routing import Replay
from models.stream import Stream, pack_sequences
from tests.distributed.passes import Case, sample_batch


def random_streams(case: Case, count: int, filler: int = 0) -> list[Stream]:
    """One sequence in each; sequence i is called sample 10 + i."""
    sequences, prompts, _ = sample_batch(case.config, case.seed, count)
    return [
        pack_sequences([s], [p], len(s) - 1 + filler, torch.device("cpu"), samples=[10 + i])
        for i, (s, p) in enumerate(zip(sequences, prompts, strict=True))
    ]


def random_replay(model: MoEModel, streams: list[Stream], seed: int = 0) -> list[Replay]:
    """Any valid routes: most rows hold experts that the live routers would not choose."""
    generator, config = torch.Generator().manual_seed(seed), model.config
    shapes = [(stream.size_here, len(model.moe_layers), config.experts) for stream in streams]
    return [Replay(torch.rand(s, generator=generator).topk(config.topk).indices.sort(-1).values) for s in shapes]


def routes_of(model: MoEModel, streams: list[Stream], what: str = "choice") -> list[Tensor]:
    """[T / tensor, L here, K] of each stream's last pass."""
    logs = [stream.routes for stream in streams]
    return [log.stacked(model.moe_layers, what).clone() for log in logs if log is not None]


def gradients(
    model: MoEModel, streams: list[Stream], replay: list[Replay] | None, before_loss: Any = None
) -> dict[str, Tensor]:
    """By name, of the sum of -log-probabilities. before_loss: called between a stream's forward and its backward."""
    from models.config import OptimizerConfig

    optimizer = model.optimizer(OptimizerConfig(lr=0.0), total_updates=1)
    optimizer.zero_grad()

    def loss(scores: Scores) -> tuple[Tensor, None]:
        if before_loss is not None:
            before_loss()
        return -scores.logprobs.sum(), None

    model.accumulate_gradients(streams, [loss] * len(streams), sum(s.real for s in streams), replay)
    return {name: p.main_grad.clone() for chunk in model.bare for name, p in chunk.named_parameters()}


@dataclass(frozen=True)
class Routed:
    """One router's pass over one stream: selection scores [T, E] (live logits, or what is made of them), gates [T, E]."""

    logits: Tensor
    gates: Tensor


@contextlib.contextmanager
def watched(model: MoEModel) -> Iterator[dict[int, list[Routed]]]:
    """What each layer's router gave, pass by pass, while the block runs. Logits are made anew from its input and weight."""
    seen: dict[int, list[Routed]] = {layer: [] for layer in model.moe_layers}

    def watch(layer: int) -> Any:
        def note(router: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
            hidden = args[0].detach().float().flatten(0, 1)
            seen[layer].append(Routed(hidden @ router.weight.detach().float().t(), output[0].detach().clone()))

        return note

    hooks = [module.mlp.router.register_forward_hook(watch(layer)) for layer, module in moe_modules(model.bare)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
