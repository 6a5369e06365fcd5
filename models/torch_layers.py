"""The layers where Transformer Engine is absent: Megatron's, with norms, experts and attention of torch alone."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from models.attention import StreamAttention
from models.config import ModelConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight takes part in sequence parallelism (Megatron's wrapper of it refuses that)."""

    epsilon: float | None = None  # none: the model's

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=self.epsilon or config.layernorm_epsilon, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


Norm = RMSNorm


class SpanRMSNorm(MegatronModule):
    """RMSNorm of queries (or keys) over all heads together, as OLMoE has it: its mean goes over the tensor ranks.

    Every tensor rank holds the whole weight and uses the part of its heads: Megatron sums the gradients of whatever is
    called q_layernorm or k_layernorm over the tensor ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, heads: int, **_: Any) -> None:
        super().__init__(config=config)
        self.group: Any = get_tensor_model_parallel_group()
        self.weight = torch.nn.Parameter(torch.empty(heads * hidden_size, dtype=config.params_dtype))

    def forward(self, heads: Tensor) -> Tensor:
        """[T, 1, heads here, d] -> the same."""
        flat = heads.flatten(-2).float()
        squares = reduce_from_tensor_model_parallel_region(flat.square().sum(-1, keepdim=True), group=self.group)
        squares = copy_to_tensor_model_parallel_region(squares, group=self.group)  # its gradient is every rank's, summed
        normed = flat * torch.rsqrt(squares / len(self.weight) + self.config.layernorm_epsilon)
        weight = self.weight.view(self.group.size(), -1)[self.group.rank()]
        return (weight * normed.to(heads.dtype)).view_as(heads)


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention, with what 0.19.2 lacks of it."""

    def __init__(self, config: Any, submodules: Any, **settings: Any) -> None:
        full = config.q_lora_rank is None
        super().__init__(config, replace(submodules, kv_layernorm=IdentityOp) if full else submodules, **settings)
        if full:  # queries without a norm (DeepSeek-V2-Lite): Megatron then has none for keys and values either
            self.kv_layernorm = submodules.kv_layernorm(
                hidden_size=self.config.kv_lora_rank, config=self.config, eps=self.config.layernorm_epsilon
            )

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """With a projection that is split over the tensor ranks Megatron would take the gradient of the keys' rotary part
        from this rank's heads alone. Gathered here, that part takes the way that it has with a projection that is not split."""
        queries, keys = super()._qkv_down_projection(hidden_states)
        if self.pg_collection.tp.size() > 1 and keys.shape[-1] != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            keys = scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(keys))
            keys = keys.clone()  # else the backward pass would keep what was gathered, of which this is a part
        return queries, keys


class StreamRouter(TopKRouter):
    """Megatron's router, which says itself whether gates of sigmoid scores are divided by their sum."""

    normalizes = True

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [T, 1, E] -> (gates, chosen), both [T, E]."""
        probs, routing_map = super().routing(logits, padding_mask=padding_mask)
        divided = self.topk > 1  # Megatron does so whatever it is told, but not for a single expert
        if self.score_function == "sigmoid" and divided != self.normalizes:
            chosen = torch.sigmoid(logits.view_as(probs).float()) * routing_map
            total = chosen.sum(-1, keepdim=True) + 1e-20
            probs = (probs * total if divided else probs / total).to(probs.dtype)
        return probs, routing_map


class ExpertOutput(RowParallelLinear):
    """An expert's second layer, with a bias that can be trained.

    Megatron 0.19.2 adds the bias in place to what, with one process, is a view made by an autograd function. And it takes the
    bias for one of sequence parallelism, whose gradients it sums over the tensor ranks, where those are summed already.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.bias is not None:
            self.bias.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, input_: Tensor) -> Any:
        output, bias = super().forward(input_)
        return (output if bias is None else output.clone()), bias


class StackedExperts(SequentialMLP):
    """Megatron's experts, computed by one grouped matrix product over stacked weights where that is faster.

    Measured on one CPU thread (8 experts, 128 -> 128): the grouped product wins for the few tokens of a decoding step and
    draws with the loop over experts for the thousands of a training step, where stacking the weights must be paid each
    time. So generation stacks once (`stack`) and training loops; on a GPU both use the grouped product.
    """

    stacked: tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None] | None = None

    def stack(self) -> None:
        """Copies the weights into stacks for the forwards that follow, until `unstack`. The weights must not change."""
        self.stacked = self._stack()

    def unstack(self) -> None:
        self.stacked = None

    def _stack(self) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        experts: Any = self.local_experts

        def both(what: str) -> list[Tensor]:
            return [torch.stack([getattr(getattr(e, layer), what) for e in experts]) for layer in ("linear_fc1", "linear_fc2")]

        fc1, fc2 = both("weight")
        biases = both("bias") if self.config.add_bias_linear else None
        return fc1.transpose(1, 2), fc2.transpose(1, 2), (biases[0], biases[1]) if biases else None

    def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor):
        loops = not self.config.add_bias_linear  # Megatron adds biases in place, which autograd refuses here
        if self.stacked is None and loops and not permuted_local_hidden_states.is_cuda:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        fc1, fc2, biases = self.stacked or self._stack()
        ends = tokens_per_expert.to(permuted_local_hidden_states.device).cumsum(0).int()
        scale = permuted_probs[:, None]
        both = grouped_product(permuted_local_hidden_states, fc1, ends)
        if biases is None:
            return grouped_product((self._gated(both) * scale).to(both.dtype), fc2, ends), None
        expert = torch.repeat_interleave(torch.arange(len(ends), device=ends.device), ends.diff(prepend=ends.new_zeros(1)))
        middle = (self._gated(both + biases[0][expert]) * scale).to(both.dtype)
        return (grouped_product(middle, fc2, ends) + biases[1][expert] * scale).to(both.dtype), None

    def _gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        if (bound := self.config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=bound), up.clamp(-bound, bound)
        return self.config.activation_func(gate) * (up + offset if (offset := self.config.glu_linear_offset) else up)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[T, in] x [E, in, out] -> [T, out]: the rows up to ends[e] (Int[E]), from ends[e - 1] on, times weights[e]."""
    if all(size * rows.itemsize % 16 == 0 for size in weights.shape[1:]):
        return F.grouped_mm(rows, weights, offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()  # torch's kernel takes rows of whole 16 bytes alone
    return torch.cat([part @ weight for part, weight in zip(rows.split(counts), weights, strict=True)])


class TorchBackend(LocalSpecProvider):
    """Megatron's own linear layers with the norms, attention and experts above."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return RMSNorm

    def core_attention(self) -> type:
        return StreamAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertOutput, activation_func=self.activation_func())
        return partial(StackedExperts, submodules=linear)


def layer_spec(model: ModelConfig, config: TransformerConfig, is_moe: bool) -> ModuleSpec:
    """One transformer layer. Checkpoint names are those of Transformer Engine's layers, so that either loads the other."""
    backend: Any = TorchBackend()
    names = {"input_layernorm.": "input_layernorm." if model.latent else "self_attention.linear_qkv.layer_norm_"}
    if not is_moe:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    if model.latent:
        names["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
        names["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
    mlp: Any = get_mlp_module_spec_for_backend(backend=backend, num_experts=config.num_moe_experts if is_moe else None)
    if is_moe:
        mlp.keywords["submodules"].router = router(model)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_latent_attention(model, backend) if model.latent else _attention(model, backend),
            self_attn_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,  # pyright: ignore[reportArgumentType]
            sharded_state_dict_keys_map=names,
        ),
    )


def router(model: ModelConfig) -> Any:
    """The router of a MoE layer, for Megatron's MoESubmodules."""
    return type("StreamRouter", (StreamRouter,), {"normalizes": model.router_normalize})


def _attention(model: ModelConfig, backend: Any) -> ModuleSpec:
    def norm(heads: int) -> Any:
        if not model.qk_norm:
            return IdentityOp
        return RMSNorm if model.qk_norm_span == "head" else partial(SpanRMSNorm, heads=heads)

    submodules: Any = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=norm(model.heads),
        k_layernorm=norm(model.kv_heads),
    )
    return ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def _latent_attention(model: ModelConfig, backend: Any) -> ModuleSpec:
    column, full = backend.column_parallel_linear(), model.q_lora_rank is None
    norm = type("LatentNorm", (RMSNorm,), {"epsilon": model.latent_norm_epsilon})
    submodules: Any = MLASelfAttentionSubmodules(
        linear_q_proj=column,
        linear_q_down_proj=column,
        linear_q_up_proj=column,
        linear_kv_down_proj=column,
        linear_kv_up_proj=column,
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=IdentityOp if full else norm,
        kv_layernorm=norm,
    )
    return ModuleSpec(module=LatentAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)
