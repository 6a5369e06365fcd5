"""Models with known shapes, by name: what lies beneath the keys of the model section.

The released models are as the config.json of their Hugging Face repository says, which the comment above each names. Where it
names a router's auxiliary loss or bias update, that belongs to pre-training: load_balancing stays `none`.
"""

from typing import Any

# every layer the same, top-k first and softmax over those chosen
_QWEN3_MOE: dict[str, Any] = dict(
    kv_heads=4,
    head_dim=128,
    experts=128,
    topk=8,
    vocab_size=151936,
    max_positions=40960,
    rope_base=1e6,
    dtype="bfloat16",
)

_DEEPSEEK: dict[str, Any] = dict(
    head_dim=128,
    v_head_dim=128,
    kv_lora_rank=512,
    rope_head_dim=64,
    qk_norm=False,  # the latent vectors are normalised in any case
    max_positions=163840,
    dtype="bfloat16",
)


def _deepseek_yarn(mscale: float) -> dict[str, Any]:
    return dict(
        rope_type="yarn",
        factor=40.0,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=mscale,
        mscale_all_dim=mscale,
        original_max_position_embeddings=4096,
    )


_GPT_OSS: dict[str, Any] = dict(
    hidden=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    ffn=2880,
    moe_ffn=2880,
    topk=4,
    vocab_size=201088,
    max_positions=131072,
    norm_epsilon=1e-5,
    rope_base=150000.0,
    rope_scaling=dict(
        rope_type="yarn",
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=4096,
    ),
    qk_norm=False,
    bias=True,
    attention_sinks=True,
    window=128,
    activation="quick_gelu",
    glu_clamp=7.0,
    glu_offset=1.0,
    dtype="bfloat16",
)

PRESETS: dict[str, dict[str, Any]] = {
    # 1.9M parameters: learns two-digit addition on a laptop in minutes
    "tiny_moe": dict(
        layers=4,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=32,
        ffn=256,
        moe_ffn=128,
        experts=8,
        topk=2,
        max_positions=128,
        init_std=0.1,
    ),
    # 20M and 123M parameters: the same shape, grown
    "small_moe": dict(
        layers=6, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=768, moe_ffn=256, experts=16, topk=2, max_positions=1024
    ),
    "medium_moe": dict(
        layers=12, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=1536, moe_ffn=384, experts=16, topk=4, max_positions=2048
    ),
    # Qwen/Qwen3-30B-A3B
    "qwen3_30b_a3b": dict(_QWEN3_MOE, layers=48, hidden=2048, heads=32, ffn=6144, moe_ffn=768),
    # Qwen/Qwen3-235B-A22B
    "qwen3_235b_a22b": dict(_QWEN3_MOE, layers=94, hidden=4096, heads=64, ffn=12288, moe_ffn=1536),
    # mistralai/Mixtral-8x7B-v0.1
    "mixtral_8x7b": dict(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        moe_ffn=14336,
        experts=8,
        topk=2,
        vocab_size=32000,
        max_positions=32768,
        norm_epsilon=1e-5,
        rope_base=1e6,
        qk_norm=False,
        dtype="bfloat16",
    ),
    # allenai/OLMoE-1B-7B-0924
    "olmoe_1b_7b": dict(
        layers=16,
        hidden=2048,
        heads=16,
        kv_heads=16,
        head_dim=128,
        ffn=1024,
        moe_ffn=1024,
        experts=64,
        topk=8,
        vocab_size=50304,
        max_positions=4096,
        norm_epsilon=1e-5,
        qk_norm_span="all",
        router_pre_softmax=True,
        dtype="bfloat16",
    ),
    # deepseek-ai/DeepSeek-V2-Lite
    "deepseek_v2_lite": dict(
        _DEEPSEEK,
        layers=27,
        dense_layers=[0],
        hidden=2048,
        heads=16,
        kv_heads=16,
        ffn=10944,
        moe_ffn=1408,
        shared_ffn=2 * 1408,
        experts=64,
        topk=6,
        vocab_size=102400,
        rope_scaling=_deepseek_yarn(mscale=0.707),
        router_pre_softmax=True,
    ),
    # deepseek-ai/DeepSeek-V3, without its head for multi-token prediction
    "deepseek_v3": dict(
        _DEEPSEEK,
        layers=61,
        dense_layers=[0, 1, 2],
        hidden=7168,
        heads=128,
        kv_heads=128,
        q_lora_rank=1536,
        ffn=18432,
        moe_ffn=2048,
        shared_ffn=2048,
        experts=256,
        topk=8,
        vocab_size=129280,
        rope_scaling=_deepseek_yarn(mscale=1.0),
        router_score="sigmoid",
        router_scale=2.5,
        router_groups=8,
        router_group_topk=4,
        router_group_best=2,
        expert_bias=True,
    ),
    # openai/gpt-oss-20b and openai/gpt-oss-120b
    "gpt_oss_20b": dict(_GPT_OSS, layers=24, experts=32, window_layers=list(range(0, 24, 2))),
    "gpt_oss_120b": dict(_GPT_OSS, layers=36, experts=128, window_layers=list(range(0, 36, 2))),
}
