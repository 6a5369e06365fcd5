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
    rows, norm = model.hidden * _size(model) + 2 * _LONG + 2 * _FLOAT, _norm(model, model.hidden, kernels)
    return tokens / parallel.tensor * (norm - model.hidden * _size(model)) + tokens * rows  # its output is not saved


def logits(model: ModelConfig, tokens: int, parallel: ParallelConfig) -> float:
    """The most of the output layer's backward pass: while a chunk's logits become their gradient, as five float32 tensors of
    their size beside the weight's gradient in float32; or while the chunk's product is added to that."""
    columns, size = model.padded_vocab_size / parallel.tensor, _size(model)
    chunk, converts = min(tokens, model.logprob_chunk), size != _FLOAT
    product = size + converts * _FLOAT
    turning = 5 * _FLOAT * chunk
    adding = (2 * _FLOAT + size) * chunk + product * model.hidden
    return columns * (max(turning, adding) + _FLOAT * model.hidden)


def _size(model: ModelConfig) -> int:
    return SIZES[model.dtype]


def _norm(model: ModelConfig, width: int, kernels: Kernels) -> float:
    """Input, what it was scaled to, output; and the scale."""
    return width * (2 * _size(model) if kernels.fused else 2 * _FLOAT + _size(model)) + _FLOAT


def _grouped(model: ModelConfig, kernels: Kernels) -> float:
    """A token: the projection's output, queries and keys as they are rotated, the result, the softmax's sums."""
    size, query, key = _size(model), model.heads * model.head_dim, model.kv_heads * model.head_dim
    bytes_ = (query + 2 * key + query + key + query) * size + model.heads * _FLOAT
    if model.qk_norm and model.qk_norm_span == "all":  # models/torch_layers.py's own, whatever the kernels
        bytes_ += (query + key) * (_FLOAT + size) + 2 * _FLOAT
    elif model.qk_norm and kernels.fused:
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
    if not kernels.fused:  # on a CPU masked_select keeps memory for as many as it looks through
        order += model.experts * _LONG
    scores = 2 * model.experts * _FLOAT + _FLOAT if model.router_score == "sigmoid" else model.experts * _FLOAT
    gates = 0 if model.router_pre_softmax and model.router_score == "softmax" else model.topk * _FLOAT
    return scores + gates + model.topk * _LONG + order


def _mlp(model: ModelConfig, width: int) -> float:
    """A token: gate and up, activation, up with its offset, product."""
    return 5 * width * _size(model)


def _experts(model: ModelConfig, here: float, parallel: ParallelConfig, kernels: Kernels) -> float:
    """What the ranks that exchange tokens send to this one: each token `topk` times, spread by the routers."""
    size, width = _size(model), model.moe_ffn / parallel.expert_tensor
    clamps = 2 if model.glu_clamp is not None else 0
    token = (6 + clamps) * width * size + model.hidden * size * (2 if model.bias else 1) + _FLOAT
    arriving = here * model.topk * parallel.expert_tensor * kernels.imbalance
    return arriving * token
