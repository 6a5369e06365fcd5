"""What routers did in a pass, kept small, and two passes over the same streams compared."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from models.model import MoEModel
from models.routes import compact
from models.stream import Stream
from moe_rl.drift.metrics import ScoreKind, flipped, gate_log_distribution, margin
from moe_rl.drift.sums import DriftSums, ScoredRows


@dataclass(frozen=True)
class PassRecord:
    """One pass of one stream on this rank. choice, live: [T / tensor, L here, K], ids ascending, as used and as the router
    itself would choose. gates [n, L here, E] (log p) and margins [n, L here], those of `live`, are of the rows that the stream
    observes."""

    choice: Tensor
    live: Tensor
    gates: Tensor | None = None
    margins: Tensor | None = None


@dataclass(frozen=True)
class Compared:
    """A stream with two passes over it."""

    stream: Stream
    old: PassRecord
    new: PassRecord


class RouteObserver:
    """Records and compares passes of one model."""

    def __init__(self, model: MoEModel, scores_share: float) -> None:
        config = model.config
        self.model, self.layers, self.scores_share = model, config.moe_layers, scores_share
        self.places = [config.moe_layers.index(layer) for layer in model.moe_layers]
        self.kind: ScoreKind = (
            "sigmoid" if config.router_score == "sigmoid" else "probabilities" if config.router_pre_softmax else "logits"
        )

    def mark(self, stream: Stream, step: int, full: frozenset[int] = frozenset()) -> None:
        """Chooses the rows whose scores the passes over this stream keep: by step, sample and position, and all of `full`."""
        here = [name in full for name in stream.samples]
        if not (self.scores_share or any(here)) or not self.model.moe_layers:
            stream.observe = None
            return
        rows = torch.arange(stream.first, stream.first + stream.size_here, device=stream.tokens.device)
        samples = stream.samples or range(len(stream.lengths))
        names = torch.tensor([*samples, 0], device=rows.device)  # one more for filler
        key = (names[stream.row[rows]] + 1) * 1_000_003 + stream.position[rows] * 31 + step * 7919
        wanted = _mixed(key) >= round((1 - self.scores_share) * 2**32)
        wanted |= torch.tensor([*here, False], device=rows.device)[stream.row[rows]]
        stream.observe = (wanted & (rows < stream.real)).nonzero()[:, 0]

    def record(self, stream: Stream) -> PassRecord:
        """Of the pass that the stream went through last."""
        log, layers, config = stream.routes, self.model.moe_layers, self.model.config
        assert log is not None
        if not layers:
            nothing = torch.zeros(stream.size_here, 0, config.topk, dtype=torch.uint8, device=self.model.device)
            return PassRecord(nothing, nothing)
        choice = compact(log.stacked(layers), config.experts)
        live = choice if log.replay is None else compact(log.stacked(layers, "live"), config.experts)
        if stream.observe is None:
            return PassRecord(choice, live)
        scores = torch.stack([log.scores[layer] for layer in layers], dim=1)
        bias = torch.stack([log.bias[layer] for layer in layers]) if log.bias else None
        gates = gate_log_distribution(scores, self.kind, bias)
        limits = config.router_groups, config.router_group_topk, config.router_group_best
        margins = margin(scores, live[stream.observe], *limits)
        return PassRecord(choice, live, gates, margins)

    def compare(self, pairs: Sequence[Compared], view: str | None = None) -> DriftSums:
        """Sums over the response tokens of all pairs, of this rank's tokens and layers (collective over the pipeline).

        A response token is counted where its log-probability is decided: at the position before it. view: "prompt" for the
        other positions, "local" for the routers' own choices instead of the used ones.
        """
        routes = [[r.live if view == "local" else r.choice for r in (pair.old, pair.new)] for pair in pairs]
        masks = [_mask(pair.stream, prompt=view == "prompt") for pair in pairs]
        here = [
            torch.stack([flipped(old, new).any(dim=1), (old < 0).flatten(1).any(dim=1)])[:, mask]
            for (old, new), mask in zip(routes, masks, strict=True)
        ]
        flips, unknown = self.on_any_stage(torch.cat(here, dim=1))
        total = DriftSums.zeros(len(self.layers), self.model.config.experts, self.model.device)
        for pair, (old, new), mask, unseen in zip(
            pairs, routes, masks, unknown.split([int(mask.sum()) for mask in masks]), strict=True
        ):
            mask[mask.clone()] = ~unseen  # a token that an engine did not know on some layer cannot be compared
            if self.places:
                sums = DriftSums.measure(old, new, mask, self.model.config.experts, _scored(pair, old, mask))
                total = total + sums.placed(self.places, len(self.layers))
        return total.with_any(self.once(flips[~unknown]))

    def on_any_stage(self, marks: Tensor) -> Tensor:
        """Bool of any shape that all pipeline stages bring: True where it is True on any of them (collective over them)."""
        pipeline = self.model.groups.pipeline
        if pipeline.size == 1:
            return marks
        whole = marks.to(torch.uint8)
        dist.all_reduce(whole, dist.ReduceOp.MAX, group=pipeline.group)
        return whole.bool()

    def once(self, tokens: Tensor) -> Tensor:
        """What is known on every pipeline stage, on the first alone, so that it is counted once; nothing on the others."""
        return tokens if self.model.groups.is_first_stage else tokens[:0]


def _mixed(key: Tensor) -> Tensor:
    """Numbers in [0, 2^32) that look random, so that the rows kept depend on what they are and not on the layout: the last
    step of MurmurHash3. (A single multiplication leaves a lattice, of which 1 % can be 2 %.)"""
    low = 2**32 - 1
    key = (((key & low) ^ ((key & low) >> 16)) * 0x85EBCA6B) & low
    key = ((key ^ (key >> 13)) * 0xC2B2AE35) & low
    return key ^ (key >> 16)


def _mask(stream: Stream, *, prompt: bool) -> Tensor:
    """[T / tensor] of this tensor rank's part."""
    whole = torch.zeros(stream.size, dtype=torch.bool, device=stream.tokens.device)
    whole[stream.score_at] = True
    if prompt:
        whole = ~whole
        whole[stream.real :] = False
    return whole[stream.first : stream.first + stream.size_here]


def _scored(pair: Compared, old_routes: Tensor, mask: Tensor) -> ScoredRows | None:
    rows = pair.stream.observe
    if rows is None or pair.old.gates is None or pair.new.gates is None or pair.old.margins is None:
        return None
    seen = mask[rows]
    return ScoredRows(pair.old.gates[seen], pair.new.gates[seen], old_routes[rows[seen]], pair.old.margins[seen])
