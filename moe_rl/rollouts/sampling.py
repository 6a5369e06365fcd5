"""Draws tokens from logits with uniforms given beforehand, so that a draw depends on nothing else."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_rl.types import Sampling


def draw(
    logits: Float[Tensor, "N V"], uniforms: Float[Tensor, " N"], sampling: Sampling
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """One token a row by inverse transform sampling, and its log-probability (nats, float32) under the distribution drawn
    from: temperature first, then top-k, then top-p of what is left, renormalised; with sampling.full_logprobs that before
    top-k and top-p. Temperature 0 takes the largest logit (log-probability 0). Ties of the k-th logit all stay; the token that
    reaches top-p stays.
    """
    if sampling.temperature == 0:
        best = logits.argmax(dim=-1)
        return best, torch.zeros(len(best), dtype=torch.float32, device=logits.device)
    logits = logits.float()
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    logprobs = _restrict(logits, sampling).log_softmax(dim=-1)
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    point = uniforms.double()[:, None] * cumulative[:, -1:]
    # right: a uniform of exactly 0 must not land on a leading token of probability 0
    tokens = torch.searchsorted(cumulative, point, right=True).clamp(max=logits.shape[-1] - 1)
    reported = logits.log_softmax(dim=-1) if sampling.full_logprobs else logprobs
    return tokens[:, 0], reported.gather(1, tokens)[:, 0]


def _restrict(logits: Tensor, sampling: Sampling) -> Tensor:
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        mass = ordered.double().softmax(dim=-1)
        beyond = mass.cumsum(dim=-1) - mass >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), float("-inf"))
    return logits
