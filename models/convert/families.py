"""The families of Hugging Face models that convert: for each, its model section and the rules of its tensors.

To add one: the values of its configuration that are not those of every family, its rules (most are shared), a line in
FAMILIES, and a line in tests/hf_checkpoints.py, on which every test of conversion then runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from models.convert.rules import (
    Rule,
    all_experts,
    each_expert,
    interleaved,
    qkv,
    rotary_halves,
    same,
    stacked,
    transposed,
    vocabulary,
)
from models.convert.values import (
    deepseek_experts,
    latent_attention,
    mtp_layers,
    qwen_experts,
    refuse,
    sigmoid_router,
    softmax_router,
    windows,
)

Values = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """values: what transformers' configuration says of the model, beyond `values.common`, as keys of the model section.
    rules: of the tensors outside and inside of the layers. ignored: names (patterns) of tensors that are not converted, and
    dropped with a word: those of parts that this project does not train."""

    values: Callable[[Any], Values]
    rules: Callable[[Any], Sequence[Rule]]
    ignored: Callable[[Any], Sequence[str]] = lambda hf: ()


TRUNK = (
    vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    same("decoder.final_layernorm.weight", "model.norm.weight"),
    vocabulary("output_layer.weight", "lm_head.weight"),
)
ATTENTION = (
    same("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    *(qkv(f"self_attention.linear_qkv.{kind}", *(f"self_attn.{p}_proj.{kind}" for p in "qkv")) for kind in ("weight", "bias")),
    same("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    same("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    same("self_attention.core_attention.softmax_offset", "self_attn.sinks"),
    same("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    same("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
)
NORMS = (  # before a dense MLP, and before experts
    same("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    same("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)


def mlp(ours: str, theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Rule, ...]:
    """A gated MLP."""
    return (
        stacked(f"{ours}.linear_fc1.weight", f"{theirs}.{gate}.weight", f"{theirs}.{up}.weight"),
        same(f"{ours}.linear_fc2.weight", f"{theirs}.{down}.weight"),
    )


DENSE = mlp("mlp", "mlp")
EXPERTS = (
    same("mlp.router.weight", "mlp.gate.weight"),
    same("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    *each_expert(*mlp("mlp.experts.experts", "mlp.experts.{e}")),
)
SHARED = mlp("mlp.shared_experts", "mlp.shared_experts")
GATED_SHARED = (
    *mlp("mlp.shared_experts", "mlp.shared_expert"),
    same("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
)
MIXTRAL_EXPERTS = (
    same("mlp.router.weight", "block_sparse_moe.gate.weight"),
    *each_expert(*mlp("mlp.experts.experts", "block_sparse_moe.experts.{e}", gate="w1", up="w3", down="w2")),
)
GPT_OSS_EXPERTS = (
    same("mlp.router.weight", "mlp.router.weight"),
    same("mlp.router.bias", "mlp.router.bias"),
    *all_experts(
        transposed(interleaved("mlp.experts.experts.linear_fc1.weight", "mlp.experts.gate_up_proj")),
        interleaved("mlp.experts.experts.linear_fc1.bias", "mlp.experts.gate_up_proj_bias"),
        transposed(same("mlp.experts.experts.linear_fc2.weight", "mlp.experts.down_proj")),
        same("mlp.experts.experts.linear_fc2.bias", "mlp.experts.down_proj_bias"),
    ),
)


def latent(hf: Any) -> tuple[Rule, ...]:
    """DeepSeek's attention. Where its rotary embedding turns halves and not pairs, those rows change places."""
    pairs = getattr(hf, "rope_interleave", True)
    queries = ("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight")
    low_rank = ("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight")
    keys = ("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
    return (
        same("input_layernorm.weight", "input_layernorm.weight"),
        *(
            same(*pair) if pairs else rotary_halves(*pair, lambda m: m.heads, lambda m: m.head_dim)
            for pair in (queries, low_rank)
        ),
        same("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
        same("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
        same(*keys) if pairs else rotary_halves(*keys, lambda m: 1, lambda m: m.kv_lora_rank or 0),
        same("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
        same("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
        same("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    )


def _qwen3(hf: Any) -> Values:
    refuse(hf, "attention_bias", bool(hf.attention_bias), "biases in attention but not in the experts are not built")
    return {"qk_norm": True, **windows(hf)}


def _qwen2_moe(hf: Any) -> Values:
    shared = {"shared_ffn": hf.shared_expert_intermediate_size, "shared_gate": True}
    return {"qkv_bias": hf.qkv_bias, **qwen_experts(hf), **shared, **windows(hf)}


def _mixtral(hf: Any) -> Values:
    experts = {"experts": hf.num_local_experts, "topk": hf.num_experts_per_tok, "moe_ffn": hf.intermediate_size}
    return {**experts, **softmax_router(normalised=True), **windows(hf)}


def _olmoe(hf: Any) -> Values:
    refuse(hf, "clip_qkv", hf.clip_qkv is not None, "clipped queries, keys and values are not built")
    refuse(hf, "attention_bias", bool(hf.attention_bias), "biases in attention but not in the experts are not built")
    experts = {"experts": hf.num_experts, "topk": hf.num_experts_per_tok, "moe_ffn": hf.intermediate_size}
    return {**experts, **softmax_router(normalised=hf.norm_topk_prob), "qk_norm": True, "qk_norm_span": "all"}


def _deepseek_v2(hf: Any) -> Values:
    # transformers' model reads neither norm_topk_prob nor, outside of group_limited_greedy, the groups
    router = softmax_router(normalised=False)
    if hf.topk_method == "group_limited_greedy":
        router |= {"router_groups": hf.n_group, "router_group_topk": hf.topk_group, "router_group_best": 1}
    return {**latent_attention(hf), **deepseek_experts(hf), **router}


def _deepseek_v3(hf: Any) -> Values:
    return {**latent_attention(hf), **deepseek_experts(hf), **sigmoid_router(hf)}


def _glm4_moe(hf: Any) -> Values:
    attention = {"qkv_bias": bool(hf.attention_bias), "qk_norm": bool(hf.use_qk_norm)}
    return {**attention, **deepseek_experts(hf), **sigmoid_router(hf)}


def _gpt_oss(hf: Any) -> Values:
    refuse(hf, "swiglu_alpha", getattr(hf, "swiglu_alpha", 1.702) != 1.702, "Megatron-Core's quick GELU has 1.702")
    refuse(hf, "attention_bias", not hf.attention_bias, "Megatron-Core has biases in attention and experts, or in neither")
    return {
        **{"experts": hf.num_local_experts, "topk": hf.num_experts_per_tok, "moe_ffn": hf.intermediate_size},
        **softmax_router(normalised=True),
        **{"bias": True, "attention_sinks": True},
        **{"activation": "quick_gelu", "glu_clamp": getattr(hf, "swiglu_limit", 7.0), "glu_offset": 1.0},
        **windows(hf),
    }


def _always(*rules: Rule) -> Callable[[Any], Sequence[Rule]]:
    return lambda hf: rules


LLAMA = (*TRUNK, *ATTENTION, *NORMS, *DENSE)  # the names that most families share

FAMILIES: dict[str, Family] = {
    "qwen3": Family(_qwen3, _always(*LLAMA)),
    "qwen3_moe": Family(lambda hf: {**_qwen3(hf), **qwen_experts(hf)}, _always(*LLAMA, *EXPERTS)),
    "qwen2_moe": Family(_qwen2_moe, _always(*LLAMA, *EXPERTS, *GATED_SHARED)),
    "mixtral": Family(_mixtral, _always(*TRUNK, *ATTENTION, *NORMS, *MIXTRAL_EXPERTS)),
    "olmoe": Family(_olmoe, _always(*LLAMA, *EXPERTS)),
    "deepseek_v2": Family(_deepseek_v2, lambda hf: (*TRUNK, *latent(hf), *NORMS, *DENSE, *EXPERTS, *SHARED)),
    "deepseek_v3": Family(_deepseek_v3, lambda hf: (*TRUNK, *latent(hf), *NORMS, *DENSE, *EXPERTS, *SHARED), mtp_layers),
    "glm4_moe": Family(_glm4_moe, _always(*LLAMA, *EXPERTS, *SHARED), mtp_layers),
    "gpt_oss": Family(_gpt_oss, _always(*TRUNK, *ATTENTION, *NORMS, *GPT_OSS_EXPERTS)),
}
