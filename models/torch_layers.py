"""The layers where Transformer Engine is absent: torch attention over the packed stream, RMSNorm, stacked experts."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from models.stream import Stream


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight takes part in sequence parallelism (Megatron's wrapper of it refuses that)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=config.layernorm_epsilon, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


Norm = RMSNorm


class TokenRotary(RotaryEmbedding):
    """Rotary embedding by each token's own position, on every pipeline stage. Replaces RotaryEmbedding's class in place.

    Megatron asks for a length and then for the angles of that length; here the stream itself is handed through as the
    "length", so that nothing has to be remembered between the two calls.
    """

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        return next(a for a in (*args, *kwargs.values()) if isinstance(a, Stream))

    def forward(self, max_seq_len: Any, *args: Any, **kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        stream: Stream = max_seq_len
        angles = stream.position.to(self.inv_freq.dtype)[:, None] * self.inv_freq.to(stream.position.device)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]  # [T, 1, 1, head size]


class StreamAttention(MegatronModule):
    """Causal scaled-dot-product attention within each row of the stream; with a cache, over the row's earlier tokens too."""

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number, self.softmax_scale = layer_number, softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Stream, **_: Any):
        """query [T, 1, heads, d], key and value [T, 1, groups, d] -> [T, 1, heads * d]."""
        return attend(packed_seq_params, self.layer_number, query[:, 0], key[:, 0], value[:, 0], self.softmax_scale)[:, None]


def attend(stream: Stream, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """[T, heads, d] x [T, groups, d] -> [T, heads * d]."""
    if stream.cache is not None:
        real = slice(stream.real)  # filler is never cached: it may be longer than the cache
        keys, values = stream.cache.write(layer, stream.row[real], stream.position[real], key[real], value[real])
        if len(stream.lengths) == stream.real:  # one token a sequence: decode
            out = _decode(stream.position[real], query[real], keys, values, scale)
            return F.pad(out, (0, 0, 0, stream.filler))
    rows = len(stream.lengths) + (stream.filler > 0)
    longest = max(*stream.lengths, stream.filler, 1)
    if rows * longest == stream.size:  # equal lengths: a view will do
        q, k, v = (t.view(rows, longest, *t.shape[1:]).transpose(1, 2) for t in (query, key, value))
    else:
        where = (stream.row, stream.position)
        q, k, v = (t.new_zeros(rows, longest, *t.shape[1:]).index_put(where, t).transpose(1, 2) for t in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    out = out.transpose(1, 2)
    out = out.reshape(stream.size, -1, out.shape[-1]) if rows * longest == stream.size else out[stream.row, stream.position]
    return out.reshape(stream.size, -1)


def _decode(position: Tensor, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """Token i is of cache row i, at position[i]."""
    tokens, heads, size = query.shape
    if tokens == 0:
        return query.reshape(0, heads * size)
    groups, longest = keys.shape[1], int(position.max()) + 1
    # the heads that share a key/value head stand in the query's length dimension
    q = query.view(tokens, groups, heads // groups, size)
    seen = torch.arange(longest, device=query.device) <= position[:, None]
    out = F.scaled_dot_product_attention(
        q, keys[:tokens, :, :longest], values[:tokens, :, :longest], attn_mask=seen[:, None, None], scale=scale
    )
    return out.reshape(tokens, heads * size)


class StackedExperts(SequentialMLP):
    """Megatron's experts, computed by one grouped matrix product over stacked weights where that is faster.

    Measured on one CPU thread (8 experts, 128 -> 128): the grouped product wins for the few tokens of a decoding step and
    draws with the loop over experts for the thousands of a training step, where stacking the weights must be paid each
    time. So generation stacks once (`stack`) and training loops; on a GPU both use the grouped product.
    """

    stacked: tuple[Tensor, Tensor] | None = None

    def stack(self) -> None:
        """Copies the weights into stacks for the forwards that follow, until `unstack`. The weights must not change."""
        self.stacked = self._stack()

    def unstack(self) -> None:
        self.stacked = None

    def _stack(self) -> tuple[Tensor, Tensor]:
        experts: Any = self.local_experts
        fc1, fc2 = (torch.stack([getattr(e, name).weight for e in experts]) for name in ("linear_fc1", "linear_fc2"))
        return fc1.transpose(1, 2), fc2.transpose(1, 2)

    def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor):
        if self.stacked is None and not permuted_local_hidden_states.is_cuda:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        fc1, fc2 = self.stacked or self._stack()
        ends = tokens_per_expert.to(permuted_local_hidden_states.device).cumsum(0).int()
        gate, up = F.grouped_mm(permuted_local_hidden_states, fc1, offs=ends).chunk(2, dim=-1)
        middle = (F.silu(gate) * up * permuted_probs[:, None]).to(gate.dtype)
        return F.grouped_mm(middle, fc2, offs=ends), None


class TorchBackend(LocalSpecProvider):
    """Megatron's own linear layers with the norms, attention and experts above."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return RMSNorm

    def core_attention(self) -> type:
        return StreamAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        linear = MLPSubmodules(
            linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=self.activation_func()
        )
        return partial(StackedExperts, submodules=linear)


def layer_spec(config: TransformerConfig, is_moe: bool) -> ModuleSpec:
    """One transformer layer. Checkpoint names are those of Transformer Engine's layers, so that either loads the other."""
    backend: Any = TorchBackend()
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not is_moe:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    attention: Any = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
            pre_mlp_layernorm=RMSNorm,
            mlp=get_mlp_module_spec_for_backend(backend=backend, num_experts=config.num_moe_experts if is_moe else None),
            mlp_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
            sharded_state_dict_keys_map=names,
        ),
    )
