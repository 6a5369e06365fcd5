"""Checkpoints of random shapes: every size that a configuration may have, within what transformers itself can run."""

import random
from typing import Any

from tests.hf_checkpoints import FAMILIES

_ROPES: list[dict[str, Any]] = [
    dict(rope_type="default", rope_theta=1e6),
    dict(rope_type="linear", factor=3.0, rope_theta=5000.0),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=1e4),
    dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
        rope_theta=5e5,
    ),
]


def draw(seed: int) -> tuple[str, dict[str, Any]]:
    """(family, changes to tests/hf_checkpoints.py)."""
    rng = random.Random(seed)
    family = rng.choice(list(FAMILIES))
    heads = rng.choice([1, 2, 4, 6, 8])
    changes = dict(
        vocab_size=rng.choice([64, 65, 97, 128, 257, 1000]),
        hidden_size=heads * rng.choice([8, 12, 16]),
        intermediate_size=rng.choice([17, 32, 96]),
        num_hidden_layers=rng.choice([1, 2, 3, 5]),
        num_attention_heads=heads,
        num_key_value_heads=rng.choice([k for k in (1, 2, 3, 4, 6, 8) if heads % k == 0]),
        tie_word_embeddings=rng.random() < 0.4,
        rms_norm_eps=rng.choice([1e-5, 1e-6]),
        rope_parameters=dict(rng.choice(_ROPES)),  # transformers writes into it
    )
    return family, changes | _PARTS[family](rng, heads)


def _head(rng: random.Random) -> dict[str, Any]:
    return dict(head_dim=rng.choice([4, 8, 16, 22, 32]))


def _experts(rng: random.Random, key: str = "num_experts") -> dict[str, Any]:
    experts = rng.choice([2, 3, 5, 8, 16])
    return {key: experts, "num_experts_per_tok": rng.randint(2, experts)}


def _qwen_experts(rng: random.Random) -> dict[str, Any]:
    widths = dict(moe_intermediate_size=rng.choice([7, 16, 48]), norm_topk_prob=rng.random() < 0.5)
    return _experts(rng) | widths | dict(decoder_sparse_step=rng.choice([1, 1, 2]), mlp_only_layers=rng.choice([[], [0]]))


def _grouped_experts(rng: random.Random) -> dict[str, Any]:
    groups, chosen = rng.choice([1, 2, 4]), 1
    each, chosen = rng.choice([2, 3, 4]), rng.randint(1, groups)
    return dict(
        n_routed_experts=groups * each,
        num_experts_per_tok=rng.randint(1, chosen * each),
        n_group=groups,
        topk_group=chosen,
        first_k_dense_replace=rng.choice([0, 1]),
        n_shared_experts=rng.choice([1, 2]),
        moe_intermediate_size=rng.choice([7, 16]),
        norm_topk_prob=rng.random() < 0.6,
        routed_scaling_factor=rng.choice([1.0, 2.5]),
    )


def _latent(rng: random.Random, heads: int) -> dict[str, Any]:
    return _grouped_experts(rng) | dict(
        num_key_value_heads=heads,
        q_lora_rank=rng.choice([None, 24]),
        kv_lora_rank=rng.choice([10, 16]),
        qk_nope_head_dim=rng.choice([8, 10]),
        qk_rope_head_dim=rng.choice([4, 8]),
        v_head_dim=rng.choice([6, 20]),
    )


_PARTS: dict[str, Any] = {
    "qwen3": lambda rng, heads: _head(rng),
    "qwen3_moe": lambda rng, heads: _head(rng) | _qwen_experts(rng),
    "qwen2_moe": lambda rng, heads: (
        _qwen_experts(rng) | dict(shared_expert_intermediate_size=rng.choice([9, 40]), qkv_bias=rng.random() < 0.7)
    ),
    "mixtral": lambda rng, heads: _head(rng) | _experts(rng, "num_local_experts") | dict(sliding_window=rng.choice([None, 5])),
    "olmoe": lambda rng, heads: _experts(rng) | dict(norm_topk_prob=rng.random() < 0.5),
    "deepseek_v2": lambda rng, heads: _latent(rng, heads) | dict(topk_method=rng.choice(["greedy", "group_limited_greedy"])),
    "deepseek_v3": lambda rng, heads: _latent(rng, heads) | dict(rope_interleave=rng.random() < 0.5),
    "glm4_moe": lambda rng, heads: (
        _head(rng) | _grouped_experts(rng) | dict(attention_bias=rng.random() < 0.5, use_qk_norm=rng.random() < 0.5)
    ),
    "gpt_oss": lambda rng, heads: _head(rng) | _experts(rng, "num_local_experts") | dict(sliding_window=rng.choice([1, 3, 9])),
}
