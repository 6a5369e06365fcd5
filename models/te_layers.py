"""The layers where Transformer Engine is present: its linear layers, norms and grouped experts, and its attention as THD.

Not tried here: it needs a GPU. Only this file imports Transformer Engine (through Megatron).
"""

import copy
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from models.attention import Scheme, attend
from models.config import ModelConfig
from models.stream import Stream
from models.torch_layers import LatentAttention, SpanRMSNorm, router
from parallel.errors import UsageError

Norm: Any = TENorm


class StreamTEAttention(TEDotProductAttention):  # pyright: ignore[reportGeneralTypeIssues]
    """Transformer Engine's attention over the stream as THD; torch's while a cache is in use (generation)."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Stream, **kwargs: Any
    ) -> Tensor:
        """query [T, 1, heads, d], key and value [T, 1, groups, d], or all without the 1 -> [T, 1, heads * d]."""
        stream, flat = packed_seq_params, [t[:, 0] if t.dim() == 4 else t for t in (query, key, value)]
        if stream.cache is not None:
            return attend(stream, self.layer_number, flat[0], flat[1], flat[2], self._scheme)[:, None]
        out = super().forward(flat[0], flat[1], flat[2], attention_mask, packed_seq_params=_as_thd(stream), **kwargs)
        return out.reshape(stream.size, 1, -1)

    def __init__(self, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, softmax_scale=softmax_scale, **kwargs)
        self._scale = softmax_scale

    @property
    def _scheme(self) -> Scheme:
        window = self.config.window_size
        slides = window is not None and self.config.window_attn_skip_freq[self.layer_number - 1]  # pyright: ignore
        return Scheme(self._scale, window[0] + 1 if slides and window else None, getattr(self, "softmax_offset", None))


def _as_thd(stream: Stream) -> PackedSeqParams:
    lengths = [*stream.lengths, *([stream.filler] if stream.filler else [])]
    ends = torch.tensor([0, *lengths], device=stream.tokens.device).cumsum(0).int()
    longest = max(lengths)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest)


def layer_spec(model: ModelConfig, config: TransformerConfig, is_moe: bool) -> ModuleSpec:
    """One transformer layer."""
    if model.latent and model.latent_norm_epsilon != model.norm_epsilon:  # its fused norms know one epsilon
        raise UsageError(
            f"model.latent_norm_epsilon={model.latent_norm_epsilon}: must be model.norm_epsilon={model.norm_epsilon} with "
            "Transformer Engine"
        )
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if is_moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=model.latent,
    )
    spec = copy.deepcopy(spec)
    submodules: Any = spec.submodules
    attention = submodules.self_attention.submodules
    attention.core_attention = StreamTEAttention
    if model.latent:
        submodules.self_attention.module = LatentAttention
    if model.qk_norm_span == "all" and model.qk_norm:
        attention.q_layernorm = partial(SpanRMSNorm, heads=model.heads)
        attention.k_layernorm = partial(SpanRMSNorm, heads=model.kv_heads)
    if model.latent and model.q_lora_rank is None:
        attention.kv_layernorm = TENorm
        submodules.sharded_state_dict_keys_map = {
            "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_"
        }
    if is_moe:
        submodules.mlp.keywords["submodules"].router = router(model)
    return spec
