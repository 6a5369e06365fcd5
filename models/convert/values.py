"""What transformers' configuration of a model says, as keys of the model section: the parts that families share."""

from typing import Any

from parallel.errors import UsageError

Values = dict[str, Any]

_ROPE_TYPES = ("default", "linear", "yarn", "llama3")  # dynamic and longrope change with the length of what is read
_PARTLY_TURNED = ("glm4_moe",)  # families whose attention turns a part of a head


def refuse(hf: Any, key: str, wrong: bool, reason: str) -> None:
    """Raises UsageError where a setting of config.json is one that this project's model does not have."""
    if wrong:
        raise UsageError(f"{hf.name_or_path}/config.json: {key}={getattr(hf, key)}: cannot be converted: {reason}")


def common(hf: Any) -> Values:
    """What every family says in the same words."""
    refuse(hf, "hidden_act", hf.hidden_act != "silu", "gates are silu")
    heads = hf.num_attention_heads
    return {
        "layers": hf.num_hidden_layers,
        "hidden": hf.hidden_size,
        "heads": heads,
        "kv_heads": hf.num_key_value_heads,
        "head_dim": getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        "ffn": hf.intermediate_size,
        "experts": 0,
        "vocab_size": hf.vocab_size,
        "max_positions": hf.max_position_embeddings,
        "norm_epsilon": hf.rms_norm_eps,
        "tie_embeddings": bool(hf.tie_word_embeddings),
        "init_std": hf.initializer_range,
        "qk_norm": False,
        "dtype": "bfloat16" if str(hf.dtype).removeprefix("torch.") == "bfloat16" else "float32",
        **_rope(hf),
    }


def _rope(hf: Any) -> Values:
    parameters = {key: value for key, value in (hf.rope_parameters or {}).items() if key != "type"}  # its older name
    kind = parameters.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        choices = ", ".join(_ROPE_TYPES)
        raise UsageError(f"{hf.name_or_path}/config.json: rope_type={kind}: cannot be converted; must be one of {choices}")
    values: Values = {"rope_base": parameters.pop("rope_theta")}
    values["rope_fraction"] = fraction = parameters.pop("partial_rotary_factor", None) or 1.0
    if fraction != 1.0 and hf.model_type not in _PARTLY_TURNED:
        reason = f"attention of {hf.model_type} turns whole heads"
        raise UsageError(f"{hf.name_or_path}/config.json: partial_rotary_factor={fraction}: cannot be converted: {reason}")
    if kind != "default":
        if parameters.get("factor") is None:  # as transformers reads it
            parameters["factor"] = hf.max_position_embeddings / parameters["original_max_position_embeddings"]
        values["rope_scaling"] = parameters
    return values


def windows(hf: Any) -> Values:
    """Sliding-window attention, on the layers that are said to have it, or on all."""
    if not hf.sliding_window:
        return {}
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    layers = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    return {"window": hf.sliding_window, "window_layers": layers} if layers else {}


def softmax_router(normalised: bool) -> Values:
    """Softmax over all experts: divided by the sum of the top-k (which is the softmax over them), or not."""
    return {"router_score": "softmax", "router_pre_softmax": not normalised}


def sigmoid_router(hf: Any) -> Values:
    """DeepSeek-V3's: a bias chooses, groups of experts compete by their two best (arXiv 2412.19437, section 2.1.2)."""
    values: Values = {"router_score": "sigmoid", "expert_bias": True, "router_normalize": bool(hf.norm_topk_prob)}
    if (hf.n_group or 1) > 1:
        values |= {"router_groups": hf.n_group, "router_group_topk": hf.topk_group, "router_group_best": 2}
    return values


def qwen_experts(hf: Any) -> Values:
    """Experts of Qwen2 and Qwen3, and the layers that have none."""
    step, dense = hf.decoder_sparse_step, set(hf.mlp_only_layers)
    return {
        "experts": hf.num_experts,
        "topk": hf.num_experts_per_tok,
        "moe_ffn": hf.moe_intermediate_size,
        "dense_layers": [i for i in range(hf.num_hidden_layers) if i in dense or (i + 1) % step],
        **softmax_router(hf.norm_topk_prob),
    }


def deepseek_experts(hf: Any) -> Values:
    """Experts of DeepSeek: the first layers dense, shared experts beside the routed ones."""
    refuse(hf, "moe_layer_freq", getattr(hf, "moe_layer_freq", 1) != 1, "every layer after the first dense ones has experts")
    refuse(hf, "n_shared_experts", not hf.n_shared_experts, "transformers' model has at least one")
    refuse(hf, "mlp_bias", bool(getattr(hf, "mlp_bias", False)), "biases in dense layers but not in the experts are not built")
    return {
        "experts": hf.n_routed_experts,
        "topk": hf.num_experts_per_tok,
        "moe_ffn": hf.moe_intermediate_size,
        "dense_layers": list(range(hf.first_k_dense_replace)),
        "shared_ffn": hf.moe_intermediate_size * hf.n_shared_experts,
        "router_scale": None if hf.routed_scaling_factor == 1.0 else hf.routed_scaling_factor,
    }


def latent_attention(hf: Any) -> Values:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1)."""
    refuse(hf, "attention_bias", bool(hf.attention_bias), "latent attention with biases is not built")
    return {
        "kv_heads": hf.num_attention_heads,
        "head_dim": hf.qk_nope_head_dim,
        "kv_lora_rank": hf.kv_lora_rank,
        "q_lora_rank": hf.q_lora_rank,
        "rope_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
    }


def mtp_layers(hf: Any) -> list[str]:
    """Layers for multi-token prediction, which stand behind the last one and are not trained here."""
    return [rf"model\.layers\.{hf.num_hidden_layers + i}\..*" for i in range(getattr(hf, "num_mtp_layers", None) or 0)]
