"""Which experts each token chose: recorded in the forward pass, held to in its recomputation.

A tap sits in each live router, where Megatron looks for a replay object, and is told by its layer which stream is passing.
What it sees it writes into that stream's log, so a microbatch's routes can never be taken for another's: there is no queue
and no registry. Layers are known by their place in the module tree; MTP heads are outside of it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.layer_map import moe_modules
from models.stream import Stream


class RouteLog:
    """The choices of one forward pass of one stream on this rank: its tensor rank's part of the tokens, its own layers.

    `choice[layer]`: Int[T / tensor, K] expert ids, by 0-based model layer, ascending.
    """

    def __init__(self) -> None:
        self.choice: dict[int, Tensor] = {}

    def stacked(self, layers: list[int]) -> Tensor:
        """[T / tensor, len(layers), K]."""
        if missing := [layer for layer in layers if layer not in self.choice]:
            raise RuntimeError(f"no routes were recorded on layers {missing}: the forward pass did not reach their routers")
        return torch.stack([self.choice[layer] for layer in layers], dim=1)


class RouteTap:
    """One router's tap. Megatron calls `get_replay_topk` in place of its own top-k."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.layer_number: int | None = None  # Megatron writes its own number here
        self.stream: Stream | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """scores [T / tensor, E] -> (scores of the chosen [., K], expert ids [., K])."""
        log = self.stream.routes if self.stream is not None else None
        if log is None:
            return default(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.layer in log.choice:  # the same stream again: recomputation, which must repeat its forward's choice
            chosen = log.choice[self.layer]
            return scores.gather(1, chosen), chosen
        _, chosen = default(scores, topk, num_groups=num_groups, group_topk=group_topk)
        # in order of expert number: top-k comes in another order without gradients, and gates would round differently
        chosen = chosen.detach().sort(dim=-1).values
        log.choice[self.layer] = chosen
        return scores.gather(1, chosen), chosen


def install_taps(chunks: list[Any]) -> list[RouteTap]:
    """Puts a tap into every router of `chunks` (unwrapped models), in order of layers."""
    taps = []
    for layer, module in moe_modules(chunks):
        tap = RouteTap(layer)
        router = module.mlp.router
        router.router_replay = tap
        router._apply_expert_bias = partial(_count_load, router)
        router.attach_and_log_load_balancing_loss = partial(_attach, router, tap, router.attach_and_log_load_balancing_loss)
        module.register_forward_pre_hook(_notice_stream(tap), with_kwargs=True)
        taps.append(tap)
    return taps


def _count_load(router: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    """Counts [T / tensor, E] routes of real tokens for the expert bias. In place of Megatron 0.19.2's, which masks [T, E]
    by a [T] (an error, or where T == E a wrong count) and compiles itself at the first step."""
    if router.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            real = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            router.local_tokens_per_expert += real.sum(dim=0)


def _attach(
    router: Any,
    tap: RouteTap,
    attach: Callable[..., Tensor],
    activation: Tensor,
    coefficient: float,
    loss: Tensor,
    name: str,
    group: Any,
    **settings: Any,
) -> Tensor:
    """Weighs an auxiliary loss by the real tokens that it is about: the microbatch's, or all ranks' for the global one.

    Megatron 0.19.2 weighs it wrongly. Where there is filler its all-reduce has written over the rank's own count, so that
    tensor parallelism doubles the loss; the global one it weighs by the rank's count, so that data parallelism halves it.
    """
    assert tap.stream is not None
    tokens = torch.tensor(float(tap.stream.real), device=activation.device)
    if name == "global_load_balancing_loss":
        dist.all_reduce(tokens, group=group)
        tokens /= router.tp_cp_group.size()  # whose ranks have one stream
    settings["valid_token_count"] = tokens / router.tp_cp_group.size()  # it is multiplied by that again
    return attach(activation, coefficient, loss, name, group, **settings)


def _notice_stream(tap: RouteTap) -> Callable[..., None]:
    def notice(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        stream = tap.stream = kwargs.get("packed_seq_params")
        # Megatron divides an auxiliary loss by the tokens of the microbatch: none, where a rank only keeps others company.
        # Out of training the router has no such loss. (The global one asks all ranks together, so all must stay.)
        router = module.mlp.router
        if router.routing_type in ("aux_loss", "seq_aux_loss"):
            router.train(module.training and (stream is None or stream.real > 0))

    return notice
