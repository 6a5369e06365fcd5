"""How expert choice differs between two passes over the same tokens, and how evenly experts are used.

Routes are [T, L, K]: the K distinct experts, in any order, of T tokens at L MoE layers. Scores are [T, L, E]: what routers
select by (logits, probabilities, or sigmoids with the expert bias). Everything is summed or given a token, never a mean: that
is taken where microbatches, ranks and pipeline stages have added up (sums.py).
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64, Integer, Real
from torch import Tensor

ScoreKind = Literal["logits", "probabilities", "sigmoid"]


class ChangeSums(NamedTuple):
    """Sums over the unmasked tokens. change: of 1 - |S_old & S_new| / K. flips: of S_old != S_new. jaccard: of
    |S_old & S_new| / |S_old | S_new|. tokens: their number."""

    change: Float64[Tensor, " L"]
    flips: Float64[Tensor, " L"]
    jaccard: Float64[Tensor, " L"]
    tokens: int


def change_sums(
    old: Integer[Tensor, "T L K"], new: Integer[Tensor, "T L K"], mask: Bool[Tensor, " T"], experts: int
) -> ChangeSums:
    """Raises ValueError at an unmasked row with an expert twice or outside [0, experts)."""
    return slot_change(checked_slots(old, mask, experts, "old"), checked_slots(new, mask, experts, "new"))


def expert_load(routes: Integer[Tensor, "T L K"], experts: int, mask: Bool[Tensor, " T"]) -> Int64[Tensor, "L E"]:
    """Unmasked tokens that each layer sends to each expert. Raises ValueError as `change_sums` does."""
    return slot_load(checked_slots(routes, mask, experts, "routes"), experts)


def load_entropy(counts: Real[Tensor, "L E"]) -> Float64[Tensor, " L"]:
    """Entropy of the shares of load, over log E: 1 = even, 0 = all to one expert. [L, E] -> [L].

    It does not correct for K: a token's K experts are distinct, so the least that K experts a token can reach is
    log K / log E. A single expert counts as even. A layer without tokens gives NaN.
    """
    share = counts.double() / counts.double().sum(-1, keepdim=True)
    if counts.shape[-1] == 1:
        return share[:, 0]  # 1, or NaN without tokens
    return torch.special.entr(share).sum(-1) / math.log(counts.shape[-1])


def max_violation(counts: Real[Tensor, "L E"]) -> Float64[Tensor, " L"]:
    """Largest load / mean load - 1: 0 = even. A layer without tokens gives NaN. [L, E] -> [L]."""
    return counts.double().amax(-1) / counts.double().mean(-1) - 1


def dead_experts(counts: Real[Tensor, "L E"]) -> Int64[Tensor, " L"]:
    """Experts that no counted token chose: with few tokens many are, without being dead for good. [L, E] -> [L]."""
    return (counts == 0).sum(-1)


def flipped(old: Integer[Tensor, "T L K"], new: Integer[Tensor, "T L K"]) -> Bool[Tensor, "T L"]:
    """Where S_old != S_new. Both ascending in K (as the routers' logs are); entries need not be valid."""
    return (old != new).any(dim=-1)


def gate_log_distribution(
    scores: Float[Tensor, "T L E"], kind: ScoreKind, bias: Float[Tensor, "L E"] | None = None
) -> Float[Tensor, "T L E"]:
    """log p: the gate distribution over all experts before top-k. Selection scores include the expert bias, gates do not."""
    if kind == "logits":
        return scores.log_softmax(dim=-1)
    plain = scores if bias is None else scores - bias
    plain = plain.clamp(min=torch.finfo(plain.dtype).tiny)  # a sigmoid that underflowed
    return plain.log() - plain.sum(dim=-1, keepdim=True).log()


def router_kl(old: Float[Tensor, "T L E"], new: Float[Tensor, "T L E"]) -> Float[Tensor, "T L"]:
    """KL(p_old || p_new) in nats, from log-probabilities.

    Summed as p_old (exp(d) - 1 - d) with d = log p_new - log p_old, which is the same since both p sum to 1, and which unlike
    p_old (-d) has no negative terms to cancel: the rounding of equal distributions stays near 0.
    """
    d = new - old
    return (old.exp() * (d.expm1() - d).clamp(min=0)).sum(dim=-1)


def gate_shift(
    old: Float[Tensor, "T L E"], new: Float[Tensor, "T L E"], routes: Integer[Tensor, "T L K"]
) -> Float[Tensor, "T L"]:
    """Mean over the old choice of |log p_new - log p_old|."""
    return (new - old).gather(-1, routes.long()).abs().mean(dim=-1)


def margin(
    scores: Float[Tensor, "T L E"],
    routes: Integer[Tensor, "T L K"],
    groups: int | None = None,
    group_topk: int | None = None,
    group_best: int | None = None,
) -> Float[Tensor, "T L"]:
    """k-th minus (k+1)-th selection score: how far the choice is from a tie. Infinite where K = E.

    groups, group_topk, group_best: of group-limited routing, as in ModelConfig; the (k+1)-th is then the best of the rest of
    the groups in reach, which need not all hold a chosen expert.
    """
    places = routes.long()
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, places, True)
    rest = scores.masked_fill(chosen, -math.inf)
    if groups is not None and group_topk is not None:
        # one that holds a chosen expert was in reach (ties)
        by_group = scores.unflatten(-1, (groups, -1))
        strength = by_group.topk(group_best or places.shape[-1] // group_topk, dim=-1).values.sum(-1)
        strength = strength.masked_fill(chosen.unflatten(-1, (groups, -1)).any(-1), math.inf)
        within = strength.topk(group_topk, dim=-1).indices
        reach = torch.zeros_like(strength, dtype=torch.bool).scatter(-1, within, True)
        rest = rest.unflatten(-1, (groups, -1)).masked_fill(~reach[..., None], -math.inf).flatten(-2)
    return scores.gather(-1, places).amin(-1) - rest.amax(-1)


def slot_change(old: Integer[Tensor, "K T L"], new: Integer[Tensor, "K T L"]) -> ChangeSums:
    """`change_sums` of what `checked_slots` gave."""
    topk, tokens = old.shape[0], old.shape[1]
    kept = torch.zeros_like(old, dtype=torch.bool)
    for slot in range(topk):  # K passes over [K, T, L] instead of one over [K, K, T, L]
        kept |= old == new[slot]
    shared = kept.sum(0)  # [T, L]
    # integers until one division, so that equal routes give exactly 0
    change = (tokens * topk - shared.sum(0)).double() / topk
    jaccard = (shared.double() / (2 * topk - shared)).sum(0)
    return ChangeSums(change, (shared < topk).sum(0).double(), jaccard, tokens)


def slot_load(slots: Integer[Tensor, "K T L"], experts: int) -> Int64[Tensor, "L E"]:
    """`expert_load` of what `checked_slots` gave."""
    layers = slots.shape[2]
    flat = slots.long() + torch.arange(layers, device=slots.device) * experts
    return torch.bincount(flat.flatten(), minlength=layers * experts).view(layers, experts)


def checked_slots(
    routes: Integer[Tensor, "T L K"], mask: Bool[Tensor, " T"], experts: int, name: str
) -> Integer[Tensor, "K N L"]:
    """The unmasked rows as [K, T, L], narrow and contiguous: comparisons of slots then run over whole planes."""
    slots = routes[mask].permute(2, 0, 1)
    if slots.dtype.itemsize < 4:
        slots = slots.to(torch.int32)  # a uint8 compared with 256 is compared with 0
    outside = (slots < 0) | (slots >= experts)
    if outside.any():
        _refuse(outside, slots, mask, name, f"outside [0, {experts})")
    slots = slots.to(torch.int16 if experts <= 2**15 else torch.int64).contiguous()
    twice = torch.zeros_like(slots, dtype=torch.bool)
    for shift in range(1, slots.shape[0]):
        twice[shift:] |= slots[shift:] == slots[:-shift]
    if twice.any():
        _refuse(twice, slots, mask, name, "a second time")
    return slots


def _refuse(wrong: Tensor, slots: Tensor, mask: Tensor, name: str, fault: str) -> None:
    slot, token, layer = wrong.nonzero()[0].tolist()
    row = int(mask.nonzero()[token])
    raise ValueError(
        f"{name} routes, row {row}, layer {layer} (position among the MoE layers): "
        f"expert {int(slots[slot, token, layer])} {fault}"
    )
