"""Log-probabilities and entropy of a vocabulary-parallel output layer, a chunk of tokens at a time.

Full-vocabulary float32 logits exist for one chunk only, in the forward and again in the backward pass, which recomputes
them: memory is O(chunk * vocabulary / tensor) instead of O(tokens * vocabulary / tensor).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part of the output layer's rows: [first, first + rows), of which those at `size` and above are padding."""

    first: int
    size: int
    group: dist.ProcessGroup | None  # the tensor-parallel group; None: all rows are here


def local_logits(hidden: Tensor, weight: Tensor, temperature: float, vocabulary: Vocabulary) -> Tensor:
    """[N, hidden] x [rows, hidden] -> float32 [N, rows] logits over temperature; -inf where the row is padding."""
    logits = torch.mm(hidden, weight.t()).float()
    if temperature != 1.0:
        logits = logits / temperature
    padding = vocabulary.first + weight.shape[0] - vocabulary.size
    if padding > 0:
        logits[:, -min(padding, weight.shape[0]) :] = float("-inf")
    return logits


def _reduced(tensor: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


class _Logprobs(torch.autograd.Function):
    """With z the logits over temperature and p their softmax: d logp_y / dz = onehot(y) - p; dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        count, rows = len(targets), weight.shape[0]
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        normaliser, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = local_logits(hidden[part], weight, temperature, vocabulary)
            top = _reduced(logits.amax(dim=-1), vocabulary.group, dist.ReduceOp.MAX)
            shares = (logits - top[:, None]).exp_()
            here = targets[part] - vocabulary.first
            inside = (here >= 0) & (here < rows)
            chosen = logits.gather(1, here.clamp(0, rows - 1)[:, None])[:, 0]
            # sum of exp, sum of exp * logit (for the entropy), the target's logit: one all-reduce
            finite = logits.masked_fill_(logits == float("-inf"), 0.0)
            sums = torch.stack([shares.sum(-1), (shares * finite).sum(-1), torch.where(inside, chosen, 0.0)])
            total, weighted, target = _reduced(sums, vocabulary.group)
            normaliser[part] = top + total.log()
            logprobs[part] = target - normaliser[part]
            entropy[part] = normaliser[part] - weighted / total
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.temperature, ctx.chunk, ctx.vocabulary = temperature, chunk, vocabulary
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        rows, vocabulary = weight.shape[0], ctx.vocabulary
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logp = local_logits(hidden[part], weight, ctx.temperature, vocabulary) - normaliser[part][:, None]
            p = logp.exp()
            grad = -p * grad_logprobs[part][:, None]
            if grad_entropy.any():
                grad -= p * (logp.masked_fill(p == 0, 0.0) + entropy[part][:, None]) * grad_entropy[part][:, None]
            here = targets[part] - vocabulary.first
            inside = ((here >= 0) & (here < rows)).float()
            grad.scatter_add_(1, here.clamp(0, rows - 1)[:, None], (inside * grad_logprobs[part])[:, None])
            grad = (grad / ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += (grad.t() @ hidden[part]).float()
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def logprobs_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """log p(target) and entropy, in nats and float32, of softmax(hidden @ weight.T / temperature).

    hidden: [N, hidden], the same on every rank of the tensor group. weight: this rank's [rows, hidden]. targets: Int[N].
    The gradient with respect to `hidden` is this rank's part: the caller sums it over the tensor group.
    """
    return _Logprobs.apply(hidden, weight, targets, temperature, chunk, vocabulary)  # pyright: ignore[reportReturnType]
