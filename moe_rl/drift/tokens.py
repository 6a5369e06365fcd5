"""A few sequences with all that is known of their tokens, gathered from all ranks on the main one: what attribution is
computed from and traces are written from."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from models.model import MoEModel
from models.stream import Stream
from moe_rl.drift import traces
from moe_rl.drift.observe import PassRecord
from moe_rl.microbatches import Prepared
from parallel.groups import Groups

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class TokenTable:
    """N tokens that entered the model in one update, by sample and position.

    token: the id that entered; target: the one that follows. response: the target is a response token; log-probabilities are
    of it, NaN elsewhere. other_logprob: under the weights of this update, of the pass that the update did not make: free where
    it replays, along the old routes where it does not; NaN where that pass was not made. clipped: the loss cut its gradient.
    *_routes: [N, L, K]; rollout: -1 where unknown; new: the routers' own choice in the update's forward. *_gates: p of the
    chosen [N, L, K], *_margin [N, L], NaN where not observed. free_routes: of the other pass, where it was free, else -1.
    """

    sample: Array
    position: Array
    token: Array
    target: Array
    response: Array
    advantage: Array
    reward: Array
    clipped: Array
    rollout_logprob: Array
    old_logprob: Array
    train_logprob: Array
    other_logprob: Array
    rollout_routes: Array
    old_routes: Array
    new_routes: Array
    free_routes: Array
    old_gates: Array
    new_gates: Array
    old_margin: Array
    new_margin: Array

    def of(self, samples: Sequence[int]) -> "TokenTable":
        """The rows of these samples."""
        rows = np.isin(self.sample, list(samples))
        return TokenTable(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


# Columns that hold a layer axis: each pipeline stage brings its own layers
_BY_LAYER = (
    "rollout_routes",
    "old_routes",
    "new_routes",
    "free_routes",
    "old_gates",
    "new_gates",
    "old_margin",
    "new_margin",
)

# Sample -> column -> this rank's values, tokens first
Pieces = dict[int, dict[str, Array]]


def by_sequence(stream: Stream, groups: Groups, values: Tensor) -> list[Tensor]:
    """[T / tensor, ...] of this rank's part -> each sequence's [n, ...], on every tensor rank (collective over them)."""
    if not values.numel():  # a stage without a layer that routes
        values = values.new_zeros(stream.size, *values.shape[1:])
    elif groups.tensor.size > 1:
        mine = values.contiguous().view(torch.uint8) if values.dim() > 1 else values[:, None].contiguous().view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(groups.tensor.size)]
        dist.all_gather(parts, mine, group=groups.tensor.group)  # as bytes: gloo does not know every type
        values = torch.cat(parts).view(values.dtype).view(-1, *values.shape[1:])
    return list(values[: stream.real].split(stream.lengths))


def routing_pieces(model: MoEModel, part: Prepared, wanted: Collection[int]) -> Pieces:
    """What the routers of this rank's layers did with the wanted samples (collective over the tensor group)."""
    stream, members = part.microbatch.stream, part.microbatch.members
    assert part.old is not None and part.new is not None
    columns = {
        "old_routes": part.old.choice.to(torch.int16),
        "new_routes": part.new.live.to(torch.int16),
        "old_gates": _chosen_gates(stream, part.old, part.old.choice),
        "new_gates": _chosen_gates(stream, part.new, part.new.live),
        "old_margin": _margins(stream, part.old),
        "new_margin": _margins(stream, part.new),
    }
    columns["rollout_routes"] = (
        torch.full_like(columns["old_routes"], -1) if part.rollout_routes is None else part.rollout_routes.to(torch.int16)
    )
    pieces: Pieces = {i: {} for i in members if i in wanted}
    for name, values in columns.items():
        for i, rows in zip(members, by_sequence(stream, model.groups, values), strict=True):
            if i in pieces:
                pieces[i][name] = rows.cpu().numpy()
    return pieces


def token_pieces(part: Prepared, wanted: Collection[int], clipped: Tensor, columns: Mapping[str, Tensor]) -> Pieces:
    """What the last stage knows of the wanted samples. clipped and columns: [response tokens of the microbatch]."""
    stream, members = part.microbatch.stream, part.microbatch.members
    response = torch.zeros(stream.size, dtype=torch.bool)
    response[stream.score_at.cpu()] = True
    rows: dict[str, Tensor] = {
        "token": stream.tokens.cpu(),
        "target": stream.tokens.cpu().roll(-1),
        "position": stream.position.cpu(),
        "response": response,
        "clipped": torch.zeros(stream.size, dtype=torch.bool),
    }
    assert stream.targets is not None
    rows["target"][response] = stream.targets.cpu()
    rows["clipped"][response] = clipped.cpu()
    for name, values in columns.items():
        rows[name] = torch.full((stream.size,), float("nan"))
        rows[name][response] = values.detach().float().cpu()
    pieces: Pieces = {i: {} for i in members if i in wanted}
    for name, values in rows.items():
        for i, found in zip(members, values[: stream.real].split(stream.lengths), strict=True):
            if i in pieces:
                pieces[i][name] = found.numpy()
                pieces[i]["sample"] = np.full(len(found), i, dtype=np.int32)
    for columns_of in pieces.values():  # a prompt's tokens stand with the first of the response
        advantage, answers = columns_of["advantage"], columns_of["response"]
        columns_of["advantage"] = np.where(answers, advantage, advantage[answers][0]).astype(np.float32)
    return pieces


def gather_tables(mine: Pieces, model: MoEModel, rewards: Mapping[int, float]) -> TokenTable | None:
    """All ranks' pieces as one table on the main rank, None on the others (collective)."""
    everything: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    sent = (mine, model.moe_layers) if model.groups.tensor.rank == 0 else ({}, [])
    dist.gather_object(sent, everything)
    if everything is None:
        return None
    whole: dict[int, dict[str, Array]] = {}
    for pieces, layers in everything:
        places = [model.config.moe_layers.index(layer) for layer in layers]
        for i, columns in pieces.items():
            _merge(whole.setdefault(i, {}), columns, places, len(model.config.moe_layers))
    order = sorted(whole)
    for i in order:
        whole[i]["reward"] = np.full(len(whole[i]["sample"]), rewards[i], dtype=np.float32)
    names = [field.name for field in fields(TokenTable)]
    return TokenTable(**{name: np.concatenate([whole[i][name] for i in order]) for name in names})


def trace_columns(table: TokenTable, step: int, update: int, policy_version: int) -> dict[str, Array]:
    """The table as columns of a trace file."""
    count = len(table.sample)
    numbers = {"step": (step, np.int32), "update": (update, np.int16), "policy_version": (policy_version, np.int32)}
    columns: dict[str, Array] = {name: np.full(count, value, dtype=dtype) for name, (value, dtype) in numbers.items()}
    for field in fields(TokenTable):
        if field.name in traces.COLUMNS:
            columns[field.name] = getattr(table, field.name)
    return columns


def _merge(into: dict[str, Array], columns: Mapping[str, Array], places: Sequence[int], layers: int) -> None:
    for name, values in columns.items():
        if name not in _BY_LAYER:
            into[name] = values
            continue
        if name not in into:
            into[name] = np.zeros((len(values), layers, *values.shape[2:]), dtype=values.dtype)
        into[name][:, places] = values


def _chosen_gates(stream: Stream, record: PassRecord, routes: Tensor) -> Tensor:
    """[T / tensor, L, K]: p of each chosen expert, NaN in rows that are not observed."""
    out = torch.full(routes.shape, float("nan"), device=routes.device)
    if stream.observe is not None and record.gates is not None:
        out[stream.observe] = record.gates.gather(-1, routes[stream.observe].long()).exp()
    return out


def _margins(stream: Stream, record: PassRecord) -> Tensor:
    out = torch.full(record.choice.shape[:2], float("nan"), device=record.choice.device)
    if stream.observe is not None and record.margins is not None:
        out[stream.observe] = record.margins
    return out
