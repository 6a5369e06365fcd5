"""Expert choices as plain tensors [T, L, K]: how they are stored, what a valid one is, and what stands in for a missing one.

Pure: neither megatron nor torch.distributed. T tokens, L MoE layers, K experts a token, E routed experts (shared experts are
no part of a route).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

UNKNOWN = -1


class Fault(NamedTuple):
    """The first wrong entry of routes: `layer` is its position among the L."""

    row: int
    layer: int
    text: str


def compact(routes: Tensor, experts: int) -> Tensor:
    """The same numbers in the smallest type that holds them: uint8, or int16 for many experts or where some are UNKNOWN."""
    if experts > 2**15:
        raise ValueError(f"model.experts={experts}: routes are kept in 16 bits; must be at most {2**15}")
    if experts <= 2**8 and not (routes.dtype != torch.uint8 and bool((routes < 0).any())):
        return routes.to(torch.uint8)
    return routes.to(torch.int16)


def filler_routes(rows: int, topk: int, experts: int, first: int = 0) -> Integer[Tensor, "rows K"]:
    """K distinct experts in every row, ascending; over consecutive rows (`first` is the number of the first) all experts
    equally often, so that no expert-parallel rank is overloaded by filler."""
    slots = torch.arange(first * topk, (first + rows) * topk) % experts
    return slots.view(rows, topk).sort(dim=-1).values


def first_fault(routes: Integer[Tensor, "T L K"], experts: int, *, unknown: bool = False) -> Fault | None:
    """The first row with an expert outside [0, experts) or twice; None where all is well. unknown: UNKNOWN is allowed."""
    slots = routes.to(torch.int64)
    outside = (slots >= experts) | (slots < (UNKNOWN if unknown else 0))
    ordered = slots.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if not bool(outside.any() | twice.any()):
        return None
    row, layer = (outside.any(-1) | twice.any(-1)).nonzero()[0].tolist()
    at = slots[row, layer]
    wrong = at[outside[row, layer]]
    if len(wrong):
        return Fault(row, layer, f"expert {int(wrong[0])} is outside [0, {experts})")
    again = ordered[row, layer, 1:][twice[row, layer]]
    return Fault(row, layer, f"expert {int(again[0])} stands there twice")


def live_enough(
    scores: Float[Tensor, "T E"], live: Integer[Tensor, "T K"], forced: Integer[Tensor, "T K"], share: float, log_scale: bool
) -> Bool[Tensor, "T K"]:
    """Which forced experts' live scores are at least `share` of the live k-th best (the worst of the live choice).

    log_scale: scores are logits, and the share is one of exp(score). A k-th best below 0 (a sigmoid with a negative bias) is
    undercut by the same distance: s >= s_k - (1 - share) |s_k|.
    """
    kth = scores.gather(1, live).amin(dim=1, keepdim=True)
    mine = scores.gather(1, forced.clamp(min=0))
    if log_scale:
        return (mine - kth).exp() >= share
    return mine >= kth - (1 - share) * kth.abs()


def refill(
    scores: Float[Tensor, "T E"], live: Integer[Tensor, "T K"], forced: Integer[Tensor, "T K"], keep: Bool[Tensor, "T K"]
) -> Integer[Tensor, "T K"]:
    """The kept forced experts, and in place of the others the best of the live choice that are not among them; ascending."""
    experts = scores.shape[1]
    place = torch.where(keep, forced, experts)  # what is not kept lands in a column of its own
    kept = torch.zeros(len(scores), experts + 1, dtype=torch.bool, device=scores.device).scatter(1, place, True)[:, :experts]
    rank = torch.full_like(scores, float("-inf")).scatter(1, live, scores.gather(1, live))
    return rank.masked_fill(kept, float("inf")).topk(forced.shape[1], dim=1).indices.sort(dim=-1).values


def within_groups(scores: Float[Tensor, "T E"], groups: int, group_topk: int, best: int) -> Float[Tensor, "T E"]:
    """Scores with -inf outside of each token's group_topk best groups; a group's score is the sum of its `best` best experts'.

    best = 1: DeepSeek-V2 (arXiv 2405.04434, section 2.2.2); best = 2: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
    """
    grouped = scores.view(len(scores), groups, -1)
    strength = grouped.topk(best, dim=-1).values.sum(-1)
    chosen = torch.zeros_like(strength, dtype=torch.bool).scatter(1, strength.topk(group_topk, dim=-1).indices, True)
    return grouped.masked_fill(~chosen[:, :, None], float("-inf")).view_as(scores)
