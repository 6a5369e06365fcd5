"""Checkpoints of every family as it may also be configured: (family, changes to tests/hf_checkpoints.py) by a name.

Those with a seed have two experts that score alike with the default one, where float32 cannot tell which is better.
"""

from typing import Any

from tests.hf_checkpoints import FAMILIES

Variant = tuple[str, dict[str, Any]]


def _yarn(**more: Any) -> dict[str, Any]:
    return dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=1e4) | more


_PLAIN = dict(rope_type="default", rope_theta=1e4)
_LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
    rope_theta=5e5,
)
_ONE_GROUP = dict(n_group=1, topk_group=1)

VARIANTS: dict[str, Variant] = {
    **{family: (family, {}) for family in FAMILIES},
    "qwen3, untied, linear": (
        "qwen3",
        dict(tie_word_embeddings=False, rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4)),
    ),
    "qwen3, window": ("qwen3", dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)),
    "qwen3_moe, not normalised": ("qwen3_moe", dict(norm_topk_prob=False)),
    "qwen3_moe, yarn": ("qwen3_moe", dict(rope_parameters=_yarn(rope_theta=1e6), seed=1)),
    "qwen3_moe, yarn, own factor": ("qwen3_moe", dict(rope_parameters=_yarn(attention_factor=1.3, beta_fast=16.0))),
    "qwen3_moe, yarn, mscale": ("qwen3_moe", dict(rope_parameters=_yarn(mscale=0.8, mscale_all_dim=0.5))),
    "qwen3_moe, llama3": ("qwen3_moe", dict(rope_parameters=_LLAMA3)),
    "qwen3_moe, linear": ("qwen3_moe", dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4))),
    "qwen3_moe, window": ("qwen3_moe", dict(use_sliding_window=True, sliding_window=5)),
    "qwen3_moe, every second layer": ("qwen3_moe", dict(decoder_sparse_step=2, mlp_only_layers=[])),
    "qwen3_moe, one key head": ("qwen3_moe", dict(num_key_value_heads=1, head_dim=24)),
    "qwen3_moe, 64 words, tied": (
        "qwen3_moe",
        dict(num_key_value_heads=4, head_dim=16, tie_word_embeddings=True, vocab_size=64),
    ),
    "qwen3_moe, 65 words, all experts": ("qwen3_moe", dict(vocab_size=65, num_experts_per_tok=8)),
    "qwen3_moe, 1000 words, tied": ("qwen3_moe", dict(vocab_size=1000, tie_word_embeddings=True)),
    "qwen2_moe, normalised, no bias": ("qwen2_moe", dict(norm_topk_prob=True, qkv_bias=False)),
    "qwen2_moe, window": (
        "qwen2_moe",
        dict(use_sliding_window=True, sliding_window=5, max_window_layers=3, decoder_sparse_step=2),
    ),
    "qwen2_moe, dense layers, tied": ("qwen2_moe", dict(mlp_only_layers=[0, 3], tie_word_embeddings=True)),
    "mixtral, window": ("mixtral", dict(sliding_window=6, head_dim=24)),
    "mixtral, one key head, tied": (
        "mixtral",
        dict(num_key_value_heads=1, tie_word_embeddings=True, num_experts_per_tok=3),
    ),
    "olmoe, normalised, key heads as heads": ("olmoe", dict(norm_topk_prob=True, num_key_value_heads=4)),
    "olmoe, one key head": ("olmoe", dict(num_key_value_heads=1)),
    "deepseek_v2, lite": (
        "deepseek_v2",
        dict(q_lora_rank=None, topk_method="greedy", **_ONE_GROUP, routed_scaling_factor=1.0, rope_parameters=_PLAIN),
    ),
    "deepseek_v2, yarn": ("deepseek_v2", dict(first_k_dense_replace=0, rope_parameters=_yarn())),
    "deepseek_v2, yarn, mscale": (
        "deepseek_v2",
        dict(first_k_dense_replace=2, n_group=2, topk_group=1, rope_parameters=_yarn(mscale=1.0, mscale_all_dim=0.6)),
    ),
    "deepseek_v3, halves": ("deepseek_v3", dict(rope_interleave=False)),
    "deepseek_v3, halves, full queries": (
        "deepseek_v3",
        dict(rope_interleave=False, q_lora_rank=None, norm_topk_prob=False, routed_scaling_factor=1.0),
    ),
    "deepseek_v3, one group, tied": (
        "deepseek_v3",
        dict(**_ONE_GROUP, first_k_dense_replace=0, tie_word_embeddings=True, rope_parameters=_PLAIN),
    ),
    "deepseek_v3, all groups": ("deepseek_v3", dict(n_group=2, topk_group=2, norm_topk_prob=False, seed=2)),
    "deepseek_v3, yarn, mscale": (
        "deepseek_v3",
        dict(first_k_dense_replace=2, n_shared_experts=1, rope_parameters=_yarn(mscale=1.0, mscale_all_dim=0.6)),
    ),
    "deepseek_v3, yarn": ("deepseek_v3", dict(rope_parameters=_yarn())),
    "glm4_moe, plain": (
        "glm4_moe",
        dict(use_qk_norm=False, attention_bias=False, **_ONE_GROUP, norm_topk_prob=False),
    ),
    "glm4_moe, yarn, tied": (
        "glm4_moe",
        dict(first_k_dense_replace=0, tie_word_embeddings=True, rope_parameters=_yarn(partial_rotary_factor=0.5)),
    ),
    "glm4_moe, a quarter turned": (
        "glm4_moe",
        dict(head_dim=32, n_group=2, topk_group=1, rope_parameters=_PLAIN | dict(partial_rotary_factor=0.25)),
    ),
    "gpt_oss, plain": ("gpt_oss", dict(rope_parameters=_PLAIN, sliding_window=3, num_key_value_heads=1)),
    "gpt_oss, truncated, no window": (
        "gpt_oss",
        dict(rope_parameters=_yarn(truncate=True), layer_types=["full_attention"] * 4, num_key_value_heads=4),
    ),
    "gpt_oss, tied": (
        "gpt_oss",
        dict(
            tie_word_embeddings=True, layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"], head_dim=24
        ),
    ),
}
