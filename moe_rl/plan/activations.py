"""What a pass leaves in memory for its backward pass, and what exists only for a moment. Bytes on one rank.

The terms are what autograd was seen to save (tests/unit/test_plan_activations.py reads them off the real model). `fused` says
which kernels: Transformer Engine's norms save input and output in the model's type; torch's save two float32 copies beside
the output. Everything else is the same code in both.
"""

from dataclasses import dataclass

from models.config import ModelConfig
from moe_rl.plan.states import SIZES
from parallel.config import ParallelConfig

_FLOAT, _LONG = 4, 8


@dataclass(frozen=True)
class Kernels:
    """fused: Transformer Engine's. imbalance: tokens of the rank whose experts get most, over the mean."""

    fused: bool = True
    imbalance: float = 1.0


def layer(model: ModelConfig, is_moe: bool, tokens: int, parallel: ParallelConfig, kernels: Kernels) -> float:
    """Of one layer, for a microbatch of `tokens`. Outside attention and MLP a tensor rank has its part of them."""
    here = tokens / parallel.tensor
    attention = _latent(model, kernels) if model.latent else _grouped(model, kernels)
    rotated = model.rope_head_dim if model.latent else int(model.head_dim * model.rope_fraction)
    angles = 4 * rotated * _size(model) * tokens  # cosine and sine of queries and of keys, on every tensor rank
    norms = 2 * _norm(model, model.hidden, kernels)
    if not is_moe:
        return here * (norms + attention + _mlp(model, model.ffn)) + angles
    return (
        here * (norms + attention + _router(model, kernels) + _mlp(model, model.shared_ffn))
        + angles
        + _experts(model, here, parallel, kernels)
    )


def layer_input(model: ModelConfig, tokens: int, parallel: ParallelConfig) -> float:
    """All that recompute=full keeps of a layer."""
    return tokens / parallel.tensor * model.hidden * _size(model)


def head(model: ModelConfig, tokens: int, parallel: ParallelConfig, kernels: Kernels) -> float:
    """Final norm, and the rows that are scored: all tokens, on every tensor rank."""
    rows = model.hidden * _size(model) + 2 * _LONG + 2 * _FLOAT
    return tokens / parallel.tensor * _norm(model, model.hidden, kernels) + tokens * rows


def logits(model: ModelConfig, tokens: int, parallel: ParallelConfig) -> float:
    """While the output layer's backward pass runs: float32 tensors of a chunk's logits, and the weight's gradient, once summed
    in float32, once as a product of the model's type and once that product in float32."""
    columns = model.padded_vocab_size / parallel.tensor
    chunk = min(tokens, model.logprob_chunk)
    return chunk * columns * 5 * _FLOAT + columns * model.hidden * (2 * _FLOAT + _size(model))


def _size(model: ModelConfig) -> int:
    return SIZES[model.dtype]


def _norm(model: ModelConfig, width: int, kernels: Kernels) -> float:
    """Input, what it was scaled to, output; and the scale."""
    return width * (2 * _size(model) if kernels.fused else 2 * _FLOAT + _size(model)) + _FLOAT


def _grouped(model: ModelConfig, kernels: Kernels) -> float:
    """A token: the projection's output, queries and keys as they are rotated, the result, the softmax's sums."""
    size, query, key = _size(model), model.heads * model.head_dim, model.kv_heads * model.head_dim
    bytes_ = (query + 2 * key + query + key + query) * size + model.heads * _FLOAT
    if model.qk_norm and kernels.fused:
        bytes_ += (query + key) * size
    elif model.qk_norm:  # in float32, keys are first saved as part of the projection's output
        bytes_ += 2 * query * _FLOAT + key * _FLOAT * (1 if size == _FLOAT else 2)
        bytes_ += (model.heads + model.kv_heads) * _FLOAT
    return bytes_


def _latent(model: ModelConfig, kernels: Kernels) -> float:
    """A token: latent vectors, queries, keys and values of every head, the result, the softmax's sums."""
    size, rank = _size(model), model.kv_lora_rank or 0
    key, value = model.heads * (model.head_dim + model.rope_head_dim), model.heads * (model.v_head_dim or 0)
    bytes_ = (2 * key + 2 * value) * size + model.heads * _FLOAT
    bytes_ += _norm(model, rank, kernels)
    if kernels.fused or size == _FLOAT:
        bytes_ += model.rope_head_dim * size  # part of the tensor that the norm saves
    return bytes_ + (_norm(model, model.q_lora_rank, kernels) if model.q_lora_rank else 0)


def _router(model: ModelConfig, kernels: Kernels) -> float:
    """A token: scores of all experts in float32, choice, gates, order."""
    order = model.topk * _LONG
    if not kernels.fused:
        order += model.topk * _LONG
    return model.experts * _FLOAT + model.topk * (_LONG + _FLOAT) + order


def _mlp(model: ModelConfig, width: int) -> float:
    """A token: gate and up, activation, up with its offset, product."""
    return 5 * width * _size(model)


def _experts(model: ModelConfig, here: float, parallel: ParallelConfig, kernels: Kernels) -> float:
    """What the ranks that exchange tokens send to this one: each token `topk` times, spread by the routers."""
    size, width = _size(model), model.moe_ffn / parallel.expert_tensor
    clamps = 2 if model.glu_clamp is not None else 0
    token = (6 + clamps) * width * size + model.hidden * size * (2 if model.bias else 1) + _FLOAT
    arriving = here * model.topk * parallel.expert_tensor * kernels.imbalance
    if parallel.dispatcher == "allgather":  # every rank holds all tokens of its group, and keeps those of its experts
        gathered = here * parallel.expert * parallel.expert_tensor
        return arriving * token + gathered * (model.hidden * size + model.experts * _FLOAT)
    return arriving * token
