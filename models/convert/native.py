"""config.json for models that were not made from a Hugging Face directory: those that are Qwen3 in shape, dense or MoE."""

from typing import Any

from models.config import ModelConfig


def qwen3_config(model: ModelConfig) -> dict[str, Any]:
    """What transformers' Qwen3 (MoE) would be with these sizes. Whether that is this model is for who reads it back to check:
    settings that Qwen3 does not have are not in it."""
    moe = {
        "num_experts": model.experts,
        "num_experts_per_tok": model.topk,
        "moe_intermediate_size": model.moe_ffn,
        "norm_topk_prob": not model.router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": model.dense_layers,
    }
    kind = "qwen3_moe" if model.experts else "qwen3"
    windows = {"use_sliding_window": True, "sliding_window": model.window} if model.window else {}
    return {
        "architectures": ["Qwen3MoeForCausalLM" if model.experts else "Qwen3ForCausalLM"],
        "model_type": kind,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": model.dtype,
        "rope_parameters": {"rope_type": "default", **(model.rope_scaling or {}), "rope_theta": model.rope_base},
        **windows,
        **(moe if model.experts else {}),
    }
