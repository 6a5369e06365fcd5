"""Log-probabilities, expert choices and gradients that transformers gives, kept beside a checkpoint; and a live model, in any
layout, compared with them. Each rank compares what it has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.convert import huggingface
from models.convert.live import box_of
from models.initialise import global_shards
from models.model import MoEModel, Scores
from models.transformer import Transformer
from tests.distributed.passes import _gradients, _routes, streams_here
from tests.hf_checkpoints import make
from tests.parity import sequences, transformers_says

LENGTHS = (90, 41, 7, 30, 12, 55)
REFERENCE, GRADIENTS = "reference.pt", "gradients"


def prepare(directory: Path, family: str, **changes: Any) -> None:
    """A checkpoint, what transformers computes with it, and the gradients of a weighted sum of all log-probabilities, which
    transformers writes as if they were weights."""
    theirs = make(family, directory, **changes)
    theirs.get_input_embeddings().padding_idx = None  # else the word has no gradient
    rows = sequences(theirs.config.vocab_size, LENGTHS)
    said = transformers_says(theirs, rows)
    weights = torch.randn(len(rows), generator=torch.Generator().manual_seed(5)).tolist()
    logprobs = [_logprobs(theirs, row) for row in rows]
    sum(weight * each.sum() for weight, each in zip(weights, logprobs, strict=True)).backward()  # pyright: ignore
    kept = {"rows": rows, "weights": weights, "logprobs": [each.detach() for each in logprobs], "routes": said.routes}
    torch.save(kept | {"margin": said.margin}, directory / REFERENCE)
    for p in theirs.parameters():
        p.data = p.grad
    theirs.save_pretrained(directory / GRADIENTS)


def _logprobs(theirs: Any, row: list[int]) -> Tensor:
    ids = torch.tensor([row])
    return theirs(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def compared(model: MoEModel, directory: Path, budget: int = 100) -> dict[str, Any]:
    """logprobs: largest difference. scored: how many were compared. wrong_routes: tokens, by layer, with other experts, of
    `routes`. gradients: by Megatron's name, the norm of the difference over the norm of what it should be."""
    kept = torch.load(directory / REFERENCE, weights_only=False)
    rows, weights = kept["rows"], kept["weights"]
    streams, packs = streams_here(model, rows, [1] * len(rows), budget)
    gap, scored = 0.0, 0
    for scores, members in zip(model.score(streams), packs, strict=False):
        wanted = torch.cat([kept["logprobs"][i] for i in members] or [torch.zeros(0)])
        scored += len(wanted)
        gap = max([gap, *(scores.logprobs - wanted).abs().tolist()])
    wrong, routes = 0, 0
    for (i, layer), chosen in _routes(model, streams, packs).items():
        seen = chosen[:, 0] >= 0
        wrong += int((chosen != kept["routes"][i][layer][:-1]).any(-1)[seen].sum())
        routes += int(seen.sum())
    for chunk in model.chunks:
        chunk.zero_grad_buffer()

    def loss_of(members: list[int]) -> Any:
        each = torch.cat([torch.full((len(rows[i]) - 1,), weights[i]) for i in members] or [torch.zeros(0)])

        def loss(scores: Scores) -> tuple[Tensor, None]:
            return (each * scores.logprobs).sum(), None

        return loss

    model.accumulate_gradients(streams, [loss_of(members) for members in packs], sum(len(row) - 1 for row in rows))
    return {"logprobs": gap, "scored": scored, "wrong_routes": wrong, "routes": routes, "gradients": _errors(model, directory)}


def _errors(model: Transformer, directory: Path) -> dict[str, float]:
    """The weights are gone afterwards: gradients stand in their place."""
    gradients = _gradients(model)
    with torch.no_grad():
        for chunk in model.bare:
            for p in chunk.parameters():
                p.copy_(gradients[p.data_ptr()])
    description = huggingface.describe(directory / GRADIENTS)
    pieces, read = huggingface.piece_map(description, model.config), huggingface.open_tensors(description).read
    errors = {}
    for shard in global_shards(model.bare, model.groups, each_expert=False):
        wanted = torch.empty((1,) * shard.prepend_axis_num + shard.data.shape)
        pieces.to_megatron(shard.key, box_of(shard), read, wanted)
        off = (shard.data.detach().reshape(wanted.shape) - wanted).norm() / wanted.norm().clamp(min=1e-6)
        errors[shard.key] = max(errors.get(shard.key, 0.0), off.item())
    return errors


def families(directory: Path, names: dict[str, tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, Path]]:
    """Prepares each, and gives its name and where it is."""
    for name, (family, changes) in names.items():
        prepare(directory / name, family, **changes)
        yield name, directory / name
