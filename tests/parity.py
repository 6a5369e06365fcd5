"""What transformers says of a checkpoint and what the live model says: logits, expert choices, margins between experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from models.convert import huggingface, live
from models.model import MoEModel
from models.stream import Stream, pack_sequences
from parallel.groups import Groups

Sequences = list[list[int]]


@dataclass(frozen=True)
class Said:
    """Of each sequence: logits [T, vocabulary], and by layer the experts of every token [T, K], ascending.

    margin: the least distance, over tokens and layers, between the selection scores of the last expert that was chosen and
    the first that was not (of groups likewise): what noise must stay below for the choices to be comparable.
    """

    logits: list[Tensor]
    routes: list[dict[int, Tensor]]
    margin: float


def sequences(vocabulary: int, lengths: Sequence[int] = (90, 41, 7), seed: int = 0) -> Sequences:
    """Random ones; the longest goes beyond the original context of the stretched positions in tests/hf_checkpoints.py."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def transformers_says(theirs: Any, rows: Sequences) -> Said:
    """Eager attention, one sequence at a time."""
    theirs.set_attn_implementation("eager")
    logits, routes, margins = [], [], [float("inf")]
    for row in rows:
        seen: dict[int, Tensor] = {}
        hooks = [
            router.register_forward_hook(_note(layer, router, seen, margins)) for layer, router in transformers_routers(theirs)
        ]
        logits.append(theirs(torch.tensor([row])).logits[0].float())
        routes.append(seen)
        for hook in hooks:
            hook.remove()
    return Said(logits, routes, min(margins))


def transformers_routers(theirs: Any) -> list[tuple[int, Any]]:
    """(layer, router)."""
    return [
        (layer, module)
        for layer, decoder in enumerate(theirs.model.layers)
        for module in decoder.modules()
        if type(module).__name__.lower().endswith("topkrouter")
    ]


def _note(layer: int, router: Any, seen: dict[int, Tensor], margins: list[float]) -> Any:
    def hook(module: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, _, chosen = output
        seen[layer] = chosen.sort(-1).values
        margins.append(_margin(router, logits.float(), chosen.shape[-1]))

    return hook


def _margin(router: Any, logits: Tensor, topk: int) -> float:
    """In logits, for a softmax router; else in its scores."""
    scores, best = logits, 1
    if hasattr(router, "e_score_correction_bias"):
        scores, best = logits.sigmoid() + router.e_score_correction_bias, 2
    least = float("inf")
    limited = best == 2 or getattr(router, "topk_method", "greedy") != "greedy"
    if limited and router.num_group > router.topk_group:
        grouped = scores.unflatten(-1, (router.num_group, -1))
        strength = grouped.topk(best, dim=-1).values.sum(-1)
        kept = strength.topk(router.topk_group + 1, dim=-1).values
        least = float((kept[:, -2] - kept[:, -1]).min())
        scores = grouped.masked_fill((strength < kept[:, -2:-1])[:, :, None], float("-inf")).flatten(-2)
    if scores.shape[-1] == topk:
        return least
    ordered = scores.topk(topk + 1, dim=-1).values
    return min(least, float((ordered[:, -2] - ordered[:, -1]).min()))


def load(directory: Path, groups: Groups, device: torch.device, **changes: Any) -> MoEModel:
    """The model section that the directory gives, with `changes`; its weights."""
    config = ModelConfig.model_validate({**huggingface.describe(directory).values, **changes})
    config.check_layout(groups.parallel)
    model = MoEModel(config, groups, device, seed=1)
    live.load(directory, model)
    return model


def live_says(model: MoEModel, rows: Sequences) -> Said:
    """In one process, all sequences in one stream. Without a margin: it is transformers' that counts."""
    stream = packed(rows, model.device)
    stream.targets, stream.score_at = None, torch.arange(stream.size)
    logits = model.next_token_logits(stream)
    assert logits is not None and stream.routes is not None
    lengths = [len(row) for row in rows]
    split = {layer: chosen.split(lengths) for layer, chosen in stream.routes.choice.items()}
    routes = [{layer: parts[i] for layer, parts in split.items()} for i in range(len(rows))]
    assert logits[:, model.config.vocab_size :].eq(float("-inf")).all()
    return Said(list(logits[:, : model.config.vocab_size].split(lengths)), routes, float("inf"))


def packed(rows: Sequences, device: torch.device) -> Stream:
    """Every token enters: a target is added behind the last."""
    return pack_sequences([[*row, 0] for row in rows], [1] * len(rows), sum(map(len, rows)), device)


def differing_routes(ours: Said, theirs: Said) -> list[tuple[int, int, int]]:
    """(sequence, layer, token) where the experts differ."""
    found = []
    for i, (mine, wanted) in enumerate(zip(ours.routes, theirs.routes, strict=True)):
        assert mine.keys() == wanted.keys()
        for layer, rows in mine.items():
            found += [(i, layer, int(t)) for t in (rows != wanted[layer]).any(-1).nonzero()]
    return found


def error(ours: Said, theirs: Said) -> float:
    """Largest difference of a logit, over the standard deviation of all of transformers' logits."""
    worst = max(float((a - b).abs().max()) for a, b in zip(ours.logits, theirs.logits, strict=True))
    return worst / float(torch.cat([t.flatten() for t in theirs.logits]).std())
