"""Tiny random Hugging Face checkpoints, made by transformers itself, of every family that converts."""

from pathlib import Path
from typing import Any

import torch

# What makes each family itself, at sizes that a test can afford. Uneven widths, so that a swapped dimension cannot pass.
_SMALL: dict[str, Any] = dict(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=256,
)
_MLA: dict[str, Any] = dict(
    kv_lora_rank=24,
    q_lora_rank=40,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=20,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=48,
    first_k_dense_replace=1,
    n_shared_experts=2,
)
_YARN = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0, rope_theta=10000.0
)

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": dict(num_key_value_heads=2, head_dim=32, tie_word_embeddings=True),
    "qwen3_moe": dict(
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "qwen2_moe": dict(
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
        norm_topk_prob=False,
    ),
    "mixtral": dict(num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2),
    "olmoe": dict(num_key_value_heads=2, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False),
    "deepseek_v2": dict(
        **_MLA,
        num_key_value_heads=4,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_parameters=dict(_YARN, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek_v3": dict(
        **_MLA,
        num_key_value_heads=4,
        n_group=4,
        topk_group=2,
        rope_parameters=dict(_YARN, mscale=1.0, mscale_all_dim=1.0),
    ),
    "glm4_moe": dict(
        num_key_value_heads=2,
        head_dim=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        attention_bias=True,
        use_qk_norm=True,
        num_mtp_layers=0,
    ),
    "gpt_oss": dict(
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=7,
        rope_parameters=dict(_YARN, truncate=False),
    ),
}


def make(family: str, directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Writes a random checkpoint of `family` into `directory` and returns the model, as transformers reads it back."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    shards = changes.pop("max_shard_size", "5GB")
    config = AutoConfig.for_model(family, **{**_SMALL, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.normal_(1.0, 0.2)
            elif "inv_freq" not in name:  # biases and sinks too: what is zero would hide that it is lost
                tensor.normal_(0.0, 0.25 if tensor.dim() == 1 else 1.5 / tensor.shape[-1] ** 0.5)
    model.save_pretrained(directory, max_shard_size=shards)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
