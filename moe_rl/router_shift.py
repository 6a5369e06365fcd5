"""RSPO's router-shift factor: how far the routers moved since the old policy, as a factor on each token's ratio.

arXiv 2510.23027 (second version): gamma = exp(-mean over layers of the mean over the old top-k experts of
|log p_new - log p_old|), p the router's probabilities over all experts; floored, without gradient, on the ratio before it is
clipped and aggregated.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from models.routing import Replay
from moe_rl.drift.metrics import gate_shift
from moe_rl.drift.observe import RouteObserver
from moe_rl.microbatches import Prepared


def log_factor(shift: Float[Tensor, "T L"], floor: float) -> Float[Tensor, " T"]:
    """log max(gamma, floor) from each layer's gate shift: between log(floor) and 0."""
    return (-shift.mean(dim=-1)).clamp(min=math.log(floor))


def measure_router_shift(
    observer: RouteObserver, parts: Sequence[Prepared], replay: Sequence[Replay] | None, floor: float
) -> None:
    """Sets the parts' log_router_shift (collective): a pass with the present weights, along the routes of the update.

    With several pipeline stages that is how the last one knows of the others' layers before its loss; with one, the update's
    own forward will do (`note_router_shift`).
    """
    observer.model.score([part.microbatch.stream for part in parts], replay)
    for part in parts:
        note_router_shift(observer, part, floor)


def note_router_shift(observer: RouteObserver, part: Prepared, floor: float) -> None:
    """Sets log_router_shift from the pass that the part's stream went through last (collective over the model's ranks). A
    response token's factor is that of the position that decides it."""
    model, stream, old = observer.model, part.microbatch.stream, part.old
    sums = torch.zeros(stream.size, dtype=torch.float64, device=model.device)
    if model.moe_layers:
        new, rows = observer.record(stream), stream.observe
        assert old is not None and old.gates is not None and new.gates is not None and rows is not None
        sums[stream.first + rows] = gate_shift(old.gates, new.gates, old.choice[rows]).double().sum(dim=-1)
    if model.groups.model.size > 1:  # tensor ranks hold other tokens, pipeline stages other layers
        dist.all_reduce(sums, group=model.groups.model.group)
    whole = sums[stream.score_at] / len(model.config.moe_layers)
    part.log_router_shift = log_factor(whole[:, None], floor).float()
