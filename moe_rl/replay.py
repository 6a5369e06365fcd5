"""Whose routes are replayed where: off, r2, r3, filtered. And how rollout routes reach the ranks that replay them.

r2: the update replays what the trainer's own old-log-probability pass chose. r3: that pass and the update replay what the
rollout engine chose (arXiv 2510.11370). filtered: either, but a replayed expert is kept only while its live score is at least
`keep_share` of the live k-th best. Only the policy's passes replay: never a reference's.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float64
from torch import Tensor

from models.routes import UNKNOWN, compact, filler_routes, first_fault
from models.routing import Replay
from models.stream import Stream
from moe_rl.collectives import gather_over_data
from moe_rl.config import AlgorithmSection, ReplaySection
from parallel.groups import Groups

# Rollout index -> [prompt + response - 1, L of this pipeline stage, K] expert ids; -1 where unknown
Routes = Mapping[int, Tensor]


def replay_note(section: ReplaySection, algorithm: AlgorithmSection) -> str | None:
    """One line where replay is on for an algorithm that does without it; None elsewhere."""
    if section.mode == "off" or algorithm.name != "gspo":
        return None
    return (
        f"replay.mode={section.mode} with algorithm.name=gspo: GSPO's sequence ratio is meant to be stable without replay "
        "(arXiv 2507.18071, section 5.3); the routes are pinned all the same"
    )


class ReplayPolicy:
    """What `replay:` says, asked by the passes of a step."""

    def __init__(self, section: ReplaySection) -> None:
        self.source = section.source if section.mode == "filtered" else section.mode
        self.keep_share = section.keep_share if section.mode == "filtered" else None

    @property
    def replays_rollout(self) -> bool:
        """r3: the old-log-probability pass and the update take the engine's routes."""
        return self.source == "r3"

    @property
    def replays_old(self) -> bool:
        """r2: the update takes the routes of the old-log-probability pass."""
        return self.source == "r2"

    def of_stream(self, stream: Stream, routes: Tensor, layers: Sequence[int], experts: int, microbatch: int) -> Replay:
        """routes: [T / tensor, L here, K] of this rank's part, filler included (stream_routes, spread_filler). microbatch: the
        stream's number, for an error. Raises ValueError, with layer, microbatch and sample, for what is no valid choice."""
        unknown = routes.dtype != torch.uint8 and bool((routes < 0).any())
        if fault := first_fault(routes, experts, unknown=True):
            where = f"layer {layers[fault.layer]}, microbatch {microbatch}, {stream.describe(fault.row)}"
            raise ValueError(f"replayed routes, {where}: {fault.text}")
        return Replay(routes, unknown=unknown, keep_share=self.keep_share)


def check_rollout_routes(
    routes: Tensor | None, sample: int, tokens: int, layers: Sequence[int], topk: int, experts: int
) -> Tensor:
    """The routes that an engine returned for one sample, sorted and small. Raises ValueError, with the sample, for a missing
    route, a wrong count or shape, an id out of range or twice (among them, for K > 1, the zeros of an engine that records
    nothing)."""
    where = f"rollout routes, sample {sample}"
    if routes is None:
        raise ValueError(
            f"{where}: the engine returned none; replay.mode=r3 needs them, and so do the instruments: set replay.mode=off or "
            "r2, drift.probe_every=0 and drift.trace_every=0"
        )
    wanted = (tokens, len(layers), topk)
    if tuple(routes.shape) != wanted:
        raise ValueError(
            f"{where}: shape {tuple(routes.shape)}, must be {wanted}: prompt + response - 1 tokens, layers, experts"
        )
    if fault := first_fault(routes, experts, unknown=True):
        raise ValueError(f"{where}, token {fault.row}, layer {layers[fault.layer]}: {fault.text}")
    known = routes.to(torch.int16).sort(dim=-1).values
    return compact(torch.where((known < 0).any(dim=-1, keepdim=True), UNKNOWN, known), experts)  # a row is known or not


def check_engine_records(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """With one expert a token, zeros are valid routes: they are refused where the trainer's own choice is not 0 everywhere.

    pairs: the engine's and the trainer's routes with the same weights, stream by stream, without filler. Raises ValueError.
    """
    if not any(bool(rollout.any()) for rollout, _ in pairs) and any(bool(live.any()) for _, live in pairs):
        raise ValueError(
            "rollout routes: expert 0 for every token and layer, which is not what the routers choose: the engine records none"
        )


def exchange_routes(held: Routes, wanted: Sequence[int], groups: Groups, device: torch.device) -> dict[int, Tensor]:
    """From the data-parallel ranks that sampled to those that train on the sample: each gets the samples that it wants, of its
    own layers (collective over the data axis, among ranks of the same stage). Travels as uint8, or int16 with unknown ones."""
    small = all(routes.dtype == torch.uint8 for routes in held.values())
    plans = gather_over_data([({i: tuple(r.shape) for i, r in held.items()}, list(wanted), small)], groups)
    if groups.data.size == 1:
        return {i: held[i].to(device) for i in wanted if i in held}
    dtype = torch.uint8 if all(plan[2] for plan in plans) else torch.int16
    shapes = {i: shape for plan in plans for i, shape in plan[0].items()}
    asked = [[i for i in plan[1] if i in held] for plan in plans]
    given = [[i for i in wanted if i in plan[0]] for plan in plans]
    send = [_bytes([held[i] for i in part], dtype, device) for part in asked]
    lengths = [sum(math.prod(shapes[i]) for i in part) * dtype.itemsize for part in given]
    out = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
    dist.all_to_all_single(out, torch.cat(send), lengths, [len(part) for part in send], group=groups.data.group)
    found, at = {}, 0
    for i in (i for part in given for i in part):
        size = math.prod(shapes[i]) * dtype.itemsize
        found[i] = out[at : at + size].clone().view(dtype).view(shapes[i])
        at += size
    return found


def stream_routes(stream: Stream, members: Sequence[int], routes: Routes, topk: int, experts: int, layers: int) -> Tensor:
    """The members' routes laid out like the stream's tokens, filler spread over all experts: this tensor rank's part,
    [T / tensor, L, K]."""
    filler = filler_routes(stream.filler, topk, experts)[:, None].expand(-1, layers, -1).to(stream.tokens.device)
    parts = [routes[i] for i in members]
    dtype = next((part.dtype for part in parts if part.dtype != torch.uint8), compact(filler, experts).dtype)
    whole = torch.cat([part.to(dtype) for part in (*parts, filler)])
    return whole[stream.first : stream.first + stream.size_here]


def spread_filler(stream: Stream, routes: Tensor, experts: int) -> Tensor:
    """Recorded routes with what filler chose replaced: evenly over all experts, distinct in each row."""
    real = stream.real_here
    if real < len(routes):
        routes = routes.clone()
        rows = filler_routes(len(routes) - real, routes.shape[2], experts, stream.first + real)
        routes[real:] = rows[:, None].to(routes)
    return routes


# What is counted of a replayed pass, in this order: of all slots, those that the engine did not know, those refused by the
# threshold, and those kept that the live router would not have chosen
_COUNTS = ("slots", "unknown", "refused", "stale")


def count_replayed(stream: Stream, layers: Sequence[int]) -> Float64[Tensor, "4 L"]:
    """Of the real tokens of the replayed pass that the stream went through last, by MoE layer of this rank."""
    log = stream.routes
    assert log is not None and log.replay is not None
    real = stream.real_here
    counts = torch.zeros(len(_COUNTS), len(layers), dtype=torch.float64, device=stream.tokens.device)
    for place, layer in enumerate(layers):
        forced = log.replay.routes[:real, place].to(torch.int64)
        kept, live = log.kept[layer][:real], log.live[layer][:real]
        stale = kept & ~(forced[:, :, None] == live[:, None, :]).any(dim=-1)
        unknown = forced < 0
        counts[:, place] = torch.stack(
            [unknown.new_tensor(forced.numel(), dtype=torch.int64), unknown.sum(), (~kept & ~unknown).sum(), stale.sum()]
        )
    return counts


def replay_metrics(updates: Sequence[Float64[Tensor, "4 L"]], layers: Sequence[int]) -> dict[str, float]:
    """Reduced counts of a step's updates -> `replay/...`. Update i is i optimizer steps away from the weights that sampled."""
    total = torch.stack(list(updates)).sum(0)
    slots = total[0].clamp(min=1)
    metrics = {}
    for name in ("unknown", "refused"):
        shares = (total[_COUNTS.index(name)] / slots).tolist()
        metrics |= {f"replay/{name}_fraction/layer_{layer:02d}": share for layer, share in zip(layers, shares, strict=True)}
        metrics[f"replay/{name}_fraction/mean"] = sum(shares) / max(len(shares), 1)
    for age, counts in enumerate(updates):
        kept = counts[0] - counts[1] - counts[2]
        metrics[f"replay/stale_fraction/age_{age}"] = float(counts[3].sum() / kept.sum().clamp(min=1))
    return metrics


def _bytes(routes: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    parts = [part.to(device, dtype).contiguous().view(-1).view(torch.uint8) for part in routes]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)
