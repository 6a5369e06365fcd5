"""Attention over the packed stream by torch's scaled-dot-product attention, with and without a cache."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from models.stream import Stream


@dataclass(frozen=True)
class Scheme:
    """How queries meet keys. scale: of the scores, none: 1 / sqrt(size). window: tokens that are seen, oneself included;
    none: all. sinks: [heads], a score a head that takes part in the softmax and brings no value (GPT-OSS)."""

    scale: float | None = None
    window: int | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.window is None and self.sinks is None


class StreamAttention(MegatronModule):
    """Causal attention within each row of the stream; with a cache, over the row's earlier tokens too."""

    softmax_offset: torch.nn.Parameter | None  # Megatron's name for the sinks

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.softmax_scale, self.groups = layer_number, softmax_scale, pg_collection
        slides = config.window_size is not None and config.window_attn_skip_freq[layer_number - 1]  # pyright: ignore[reportOptionalSubscript, reportIndexIssue]
        self.window = config.window_size[0] + 1 if slides and config.window_size is not None else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Stream, **_: Any):
        """query [T, 1, heads, d], key and value [T, 1, groups, d], or all without the 1 -> [T, 1, heads * d]."""
        flat = [t[:, 0] if t.dim() == 4 else t for t in (query, key, value)]
        scheme = Scheme(self.softmax_scale, self.window, self.softmax_offset)
        return attend(packed_seq_params, self.layer_number, flat[0], flat[1], flat[2], scheme)[:, None]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The sinks, split over the tensor ranks as the heads are."""
        if self.softmax_offset is None:
            return {}
        return make_sharded_tensors_for_checkpoint(
            {"softmax_offset": self.softmax_offset},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.groups.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )


def attend(stream: Stream, layer: int, query: Tensor, key: Tensor, value: Tensor, scheme: Scheme) -> Tensor:
    """[T, heads, d] x [T, groups, d] x [T, groups, v] -> [T, heads * v]."""
    if stream.cache is not None:
        real = slice(stream.real)  # filler is never cached: it may be longer than the cache
        keys, values = stream.cache.write(layer, stream.row[real], stream.position[real], key[real], value[real])
        if len(stream.lengths) == stream.real:  # one token a sequence: decode
            out = _decode(stream.position[real], query[real], keys, values, scheme)
            return F.pad(out, (0, 0, 0, stream.filler))
    rows = len(stream.lengths) + (stream.filler > 0)
    longest = max(*stream.lengths, stream.filler, 1)
    if rows * longest == stream.size:  # equal lengths: a view will do
        q, k, v = (t.view(rows, longest, *t.shape[1:]).transpose(1, 2) for t in (query, key, value))
    else:
        where = (stream.row, stream.position)
        q, k, v = (t.new_zeros(rows, longest, *t.shape[1:]).index_put(where, t).transpose(1, 2) for t in (query, key, value))
    shared = q.shape[1] != k.shape[1]
    if scheme.plain:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scheme.scale, enable_gqa=shared)
    else:
        place = torch.arange(longest, device=q.device)
        ago = place[:, None] - place
        seen = (ago >= 0) & (ago < (scheme.window or longest))
        out = _with_sinks(q, k, v, seen[None, None], scheme, q.shape[1], shared)
    out = out.transpose(1, 2)
    out = out.reshape(stream.size, -1, out.shape[-1]) if rows * longest == stream.size else out[stream.row, stream.position]
    return out.reshape(stream.size, -1)


def _decode(position: Tensor, query: Tensor, keys: Tensor, values: Tensor, scheme: Scheme) -> Tensor:
    """Token i is of cache row i, at position[i]."""
    tokens, heads, size = query.shape
    if tokens == 0:
        return query.new_zeros(0, heads * values.shape[-1])
    groups, longest = keys.shape[1], int(position.max()) + 1
    place = torch.arange(longest, device=query.device)
    seen = place <= position[:, None]
    if scheme.window is not None:
        seen &= place > position[:, None] - scheme.window
    k, v = keys[:tokens, :, :longest], values[:tokens, :, :longest]
    if scheme.sinks is not None:  # a sink is a query head's own, so the heads cannot share the length dimension
        out = _with_sinks(query[:, :, None], k, v, seen[:, None, None], scheme, heads, heads != groups)
        return out.reshape(tokens, heads * values.shape[-1])
    # the heads that share a key/value head stand in the query's length dimension
    q = query.view(tokens, groups, heads // groups, size)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None], scale=scheme.scale)
    return out.reshape(tokens, heads * values.shape[-1])


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scheme: Scheme, heads: int, shared: bool) -> Tensor:
    """Attention where `seen` (Bool, broadcast to [rows, heads, queries, keys]) holds.

    A sink is one more key, of zeros, whose score is the sink itself, with a value of zeros.
    """
    if scheme.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scheme.scale, enable_gqa=shared)
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, float("-inf"))
    bias = bias.expand(-1, heads, q.shape[2], -1)
    sinks = scheme.sinks.to(q.dtype)[None, :, None, None].expand(bias.shape[0], -1, q.shape[2], 1)
    k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    mask = torch.cat((bias, sinks), dim=-1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scheme.scale, enable_gqa=shared)
