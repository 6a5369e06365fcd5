"""Which experts each token chose: recorded in the forward pass, held to in its recomputation, replayed where asked.

A tap sits in each live router, where Megatron looks for a replay object, and is told by its layer which stream is passing.
What it sees it writes into that stream's log, and what it replays it takes from there, so a microbatch's routes can never be
taken for another's: there is no queue and no registry. Layers are known by their place in the module tree; MTP heads are
outside of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.layer_map import moe_modules
from models.routes import live_enough, refill, within_groups
from models.stream import Stream


@dataclass(frozen=True)
class Replay:
    """Choices that one stream's pass must take, for this rank's part of the tokens and its MoE layers. Gates stay live.

    routes: [T / tensor, L here, K] ids, ascending, L in the order of the rank's MoE layers, valid
    (models.routes.first_fault); where `unknown`, some entries are UNKNOWN and the live router chooses. keep_share: a forced
    expert is refused where its live score is below this share of the live k-th best. What is unknown or refused is filled up
    from the live choice.
    """

    routes: Tensor
    unknown: bool = False
    keep_share: float | None = None


@dataclass
class RouteLog:
    """What the routers did in one pass of one stream on this rank: its tensor rank's part of the tokens, its own layers.

    By 0-based model layer: `choice` [T / tensor, K] expert ids as used, ascending. `live`: what the router itself would have
    chosen in this pass (`choice` where nothing is replayed). Of a replay, `kept` [T / tensor, K]: the forced ids that were
    used, `agreed` []: whether the router's own output has exactly those. `scores` [n, E] selection scores of the rows that
    the stream observes, float32, and `bias` [E] the expert bias in them.
    """

    replay: Replay | None = None
    choice: dict[int, Tensor] = field(default_factory=dict)
    live: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[int, Tensor] = field(default_factory=dict)
    agreed: dict[int, Tensor] = field(default_factory=dict)
    scores: dict[int, Tensor] = field(default_factory=dict)
    bias: dict[int, Tensor] = field(default_factory=dict)

    def stacked(self, layers: Sequence[int], what: str = "choice") -> Tensor:
        """[T / tensor, len(layers), K] of `choice` or `live`."""
        found = getattr(self, what)
        if missing := [layer for layer in layers if layer not in found]:
            raise RuntimeError(f"no routes were recorded on layers {missing}: the forward pass did not reach their routers")
        return torch.stack([found[layer] for layer in layers], dim=1)


class RouteTap:
    """One router's tap. Megatron calls `get_replay_topk` in place of its own top-k."""

    def __init__(self, layer: int, place: int, router: Any, group_best: int | None = None) -> None:
        self.layer, self.place = layer, place  # place: of the layer in Replay.routes
        self.group_best = group_best  # ModelConfig.router_group_best
        self.layer_number: int | None = None  # Megatron writes its own number here
        self.stream: Stream | None = None
        self._router = router
        # where the softmax comes after top-k, routers select by logits
        self._log_scale = router.score_function == "softmax" and not router.config.moe_router_pre_softmax

    @property
    def log(self) -> RouteLog | None:
        return self.stream.routes if self.stream is not None else None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """scores [T / tensor, E] -> (scores of the chosen [., K], expert ids [., K])."""
        log = self.log
        if log is None:
            return self._select(scores, topk, num_groups, group_topk, default)
        if self.layer in log.choice:  # the same stream again: recomputation, which must repeat its forward's choice
            chosen = log.choice[self.layer]
            return scores.gather(1, chosen), chosen
        with torch.no_grad():
            _, live = self._select(scores, topk, num_groups, group_topk, default)
            # in order of expert number: top-k comes in another order without gradients, and gates would round differently
            live = log.live[self.layer] = live.sort(dim=-1).values
            chosen = log.choice[self.layer] = live if log.replay is None else self._replayed(log, scores, live)
            if self.stream is not None and self.stream.observe is not None:
                self._observe(log, scores, self.stream.observe)
        return scores.gather(1, chosen), chosen

    def _select(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Megatron's own top-k; with a group's score as this model has it."""
        if num_groups is None or group_topk is None or self.group_best is None:
            return default(scores, topk, num_groups=num_groups, group_topk=group_topk)
        return default(within_groups(scores, num_groups, group_topk, self.group_best), topk, num_groups=None, group_topk=None)

    def _replayed(self, log: RouteLog, scores: Tensor, live: Tensor) -> Tensor:
        replay = log.replay
        assert replay is not None
        forced = replay.routes[:, self.place].to(torch.int64)
        if forced.shape != live.shape:
            raise RuntimeError(f"layer {self.layer}: routes for {tuple(forced.shape)} were given, {tuple(live.shape)} choose")
        kept = forced >= 0
        if replay.keep_share is not None:
            kept &= live_enough(scores, live, forced, replay.keep_share, self._log_scale)
        log.kept[self.layer] = kept
        if replay.unknown or replay.keep_share is not None:
            return refill(scores, live, forced, kept)
        return forced

    def _observe(self, log: RouteLog, scores: Tensor, rows: Tensor) -> None:
        log.scores[self.layer] = scores[rows].float()
        if self._router.expert_bias is not None:
            log.bias[self.layer] = self._router.expert_bias.float().clone()

    def check_used(self, module: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        """After the router ran: notes whether its map sends every token to its forced experts, and to K of them."""
        log = self.log
        if log is None or log.replay is None or self.layer not in log.kept:
            return
        routing_map = output[1]
        forced, kept = log.replay.routes[:, self.place].to(torch.int64).clamp(min=0), log.kept[self.layer]
        log.agreed[self.layer] = (routing_map.gather(1, forced) | ~kept).all(dim=1) & (routing_map.sum(1) == forced.shape[1])


def open_logs(streams: Sequence[Stream], replay: Sequence[Replay] | None, layers: Sequence[int]) -> None:
    """Before a pass: an empty log in every stream, with what it must choose. Raises RuntimeError unless that is routes for
    every stream and for as many layers as route here."""
    if replay is not None and len(replay) != len(streams):
        raise RuntimeError(f"replay: routes for {len(replay)} microbatches were given, {len(streams)} run")
    for number, (stream, forced) in enumerate(zip(streams, replay or [None] * len(streams), strict=True)):
        if forced is not None and forced.routes.shape[1] != len(layers):
            raise RuntimeError(
                f"replay, microbatch {number}: routes for {forced.routes.shape[1]} layers were given, {len(layers)} route here"
            )
        stream.routes = RouteLog(forced)


def check_replayed(streams: Sequence[Stream], layers: Sequence[int]) -> None:
    """After a pass: every layer here used what it was given. Raises RuntimeError that names layer, microbatch and sample."""
    for number, stream in enumerate(streams):
        log = stream.routes
        if log is None or log.replay is None:
            continue
        if missing := [layer for layer in layers if layer not in log.agreed]:
            raise RuntimeError(
                f"replay, microbatch {number}: layers {missing} were given routes, but their routers did not run"
            )
        agreed = torch.stack([log.agreed[layer] for layer in layers]) if layers else torch.ones(1, 1, dtype=torch.bool)
        if not bool(agreed.all()):
            place, row = (~agreed).nonzero()[0].tolist()
            raise RuntimeError(
                f"replay, layer {layers[place]}, microbatch {number}, {stream.describe(row)}: the router did not use the "
                "experts that it was given"
            )


def install_taps(chunks: list[Any], group_best: int | None = None) -> list[RouteTap]:
    """Puts a tap into every router of `chunks` (unwrapped models), in order of layers. group_best: as in ModelConfig."""
    taps = []
    for place, (layer, module) in enumerate(moe_modules(chunks)):
        router = module.mlp.router
        tap = RouteTap(layer, place, router, group_best)
        router.router_replay = tap
        router._apply_expert_bias = partial(_count_load, router)
        router.attach_and_log_load_balancing_loss = partial(_attach, router, tap, router.attach_and_log_load_balancing_loss)
        router.register_forward_hook(tap.check_used)
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
