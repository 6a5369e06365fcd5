"""The layers where Transformer Engine is present: its linear layers, norms and grouped experts, and its attention as THD.

Not tried here: it needs a GPU. Only this file imports Transformer Engine (through Megatron).
"""

import copy
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from models.stream import Stream
from models.torch_layers import attend

Norm: Any = TENorm


class StreamTEAttention(TEDotProductAttention):  # pyright: ignore[reportGeneralTypeIssues]
    """Transformer Engine's attention over the stream as THD; torch's while a cache is in use (generation)."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Stream, **kwargs: Any
    ) -> Tensor:
        """query [T, 1, heads, d], key and value [T, 1, groups, d] -> [T, 1, heads * d]."""
        stream, flat = packed_seq_params, (query[:, 0], key[:, 0], value[:, 0])
        if stream.cache is not None:
            return attend(stream, self.layer_number, *flat, None)[:, None]
        out = super().forward(*flat, attention_mask, packed_seq_params=_as_thd(stream), **kwargs)
        return out.reshape(stream.size, 1, -1)


def _as_thd(stream: Stream) -> PackedSeqParams:
    lengths = [*stream.lengths, *([stream.filler] if stream.filler else [])]
    ends = torch.tensor([0, *lengths], device=stream.tokens.device).cumsum(0).int()
    longest = max(lengths)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest)


def layer_spec(config: TransformerConfig, is_moe: bool) -> ModuleSpec:
    """One transformer layer."""
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if is_moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    spec = copy.deepcopy(spec)
    submodules: Any = spec.submodules
    submodules.self_attention.submodules.core_attention = StreamTEAttention
    return spec
