"""What a model's weights are, tensor by tensor, from its shape alone: how many elements, and how they are split over ranks.

Pure arithmetic: a laptop without torch can ask about a model of 671 billion parameters.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from models.config import ModelConfig
from parallel.config import ParallelConfig

Group = Literal["embedding", "attention", "norms", "dense MLP", "router", "routed experts", "shared experts", "output"]
GROUPS: tuple[Group, ...] = (
    "embedding",
    "attention",
    "norms",
    "dense MLP",
    "router",
    "routed experts",
    "shared experts",
    "output",
)


@dataclass(frozen=True)
class Weight:
    """`count` tensors of `elements` each, on one rank."""

    group: Group
    elements: int
    count: int = 1

    @property
    def total(self) -> int:
        return self.elements * self.count

    @property
    def is_expert(self) -> bool:
        """Whether the expert-parallel ranks hold it in parts (their gradients have a data-parallel group of their own)."""
        return self.group == "routed experts"


@dataclass(frozen=True)
class Split:
    """Ranks that share a layer's weights. down_projections: whether those of latent attention are split, too (torch's layers
    do, Transformer Engine's hold them whole on every tensor rank)."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    down_projections: bool = True

    @classmethod
    def of(cls, parallel: ParallelConfig, down_projections: bool) -> "Split":
        return cls(parallel.tensor, parallel.expert, parallel.expert_tensor, down_projections)


WHOLE = Split()


def layer(model: ModelConfig, is_moe: bool, split: Split = WHOLE) -> list[Weight]:
    """One transformer layer's weights on one rank."""
    norms = [Weight("norms", model.hidden, 2)]
    attention = list(_latent_attention(model, split) if model.latent else _attention(model, split))
    if not is_moe:
        return [*norms, *attention, *_mlp("dense MLP", model, model.ffn // split.tensor, 1)]
    experts = _mlp("routed experts", model, model.moe_ffn // split.expert_tensor, model.experts // split.expert)
    return [*norms, *attention, *_router(model), *experts, *_shared(model, split)]


def embedding(model: ModelConfig, split: Split = WHOLE) -> list[Weight]:
    return [Weight("embedding", model.padded_vocab_size // split.tensor * model.hidden)]


def head(model: ModelConfig, split: Split = WHOLE, *, embeds: bool = True, values: bool = False) -> list[Weight]:
    """Final norm and output layer. embeds: the embedding lies on the same rank, where a tied output layer needs no second
    one. values: of a value model, whose output layer is a vector."""
    norm = Weight("norms", model.hidden)
    if values:
        return [norm, Weight("output", model.hidden)]
    if model.tie_embeddings and embeds:
        return [norm]
    return [norm, Weight("output", model.padded_vocab_size // split.tensor * model.hidden)]


def everything(model: ModelConfig) -> list[Weight]:
    """All weights of the model, unsplit."""
    moe = set(model.moe_layers)
    layers = [weight for i in range(model.layers) for weight in layer(model, i in moe)]
    return [*embedding(model), *layers, *head(model)]


@dataclass(frozen=True)
class Counts:
    """Parameters by group. active: those that take part in the computation of one token; of the embedding, all rows count or
    none, by who reports: see `active_without_embedding`."""

    total: dict[Group, int]
    active: dict[Group, int]

    @property
    def all(self) -> int:
        return sum(self.total.values())

    @property
    def active_all(self) -> int:
        return sum(self.active.values())

    @property
    def active_without_embedding(self) -> int:
        """The embedding is a look-up of one row; a tied output layer is a computation over all of them, and stays."""
        return self.active_all - (self.active["embedding"] if self.total["output"] else 0)


def count(model: ModelConfig) -> Counts:
    """Of the whole model, with the vocabulary as it is padded here, without buffers such as the expert bias."""
    total = by_group(everything(model))
    active = dict(total)
    if model.experts:
        active["routed experts"] = total["routed experts"] // model.experts * model.topk
    return Counts(total, active)


def by_group(weights: Iterable[Weight]) -> dict[Group, int]:
    found: dict[Group, int] = dict.fromkeys(GROUPS, 0)
    for weight in weights:
        found[weight.group] += weight.total
    return found


def _attention(model: ModelConfig, split: Split) -> Iterator[Weight]:
    heads, kv_heads = model.heads // split.tensor, model.kv_heads // split.tensor
    width = (heads + 2 * kv_heads) * model.head_dim
    yield Weight("attention", model.hidden * width)
    yield Weight("attention", heads * model.head_dim * model.hidden)
    if model.bias or model.qkv_bias:
        yield Weight("attention", width)
    if model.bias:
        yield Weight("attention", model.hidden)  # added after the sum over tensor ranks: whole on each
    if model.qk_norm:
        spans = model.qk_norm_span == "all"
        # one over all heads is whole on every tensor rank
        yield Weight("norms", model.head_dim * (model.heads if spans else 1))
        yield Weight("norms", model.head_dim * (model.kv_heads if spans else 1))
    if model.attention_sinks:
        yield Weight("attention", heads)


def _latent_attention(model: ModelConfig, split: Split) -> Iterator[Weight]:
    rank, value = model.kv_lora_rank or 0, model.v_head_dim or 0
    heads, down = model.heads // split.tensor, split.tensor if split.down_projections else 1
    query = heads * (model.head_dim + model.rope_head_dim)
    if model.q_lora_rank is None:
        yield Weight("attention", model.hidden * query)
    else:
        yield Weight("attention", model.hidden * model.q_lora_rank // down)
        yield Weight("attention", model.q_lora_rank * query)
        yield Weight("norms", model.q_lora_rank)
    yield Weight("attention", model.hidden * (rank + model.rope_head_dim) // down)
    yield Weight("norms", rank)
    yield Weight("attention", rank * heads * (model.head_dim + value))
    yield Weight("attention", heads * value * model.hidden)


def _router(model: ModelConfig) -> Iterator[Weight]:
    yield Weight("router", model.experts * model.hidden)
    if model.bias:
        yield Weight("router", model.experts)


def _mlp(group: Group, model: ModelConfig, width: int, count: int) -> Iterator[Weight]:
    yield Weight(group, 2 * model.hidden * width, count)
    yield Weight(group, width * model.hidden, count)
    if model.bias:
        yield Weight(group, 2 * width, count)
        yield Weight(group, model.hidden, count)


def _shared(model: ModelConfig, split: Split) -> Iterator[Weight]:
    if not model.shared_ffn:
        return
    width = model.shared_ffn // split.tensor
    yield Weight("shared experts", 2 * model.hidden * width)
    yield Weight("shared experts", width * model.hidden)
    if model.shared_gate:
        yield Weight("shared experts", model.hidden)
