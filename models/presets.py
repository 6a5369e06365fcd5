"""Models with known shapes, by name: what lies beneath the keys of the model section."""

from typing import Any

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
}
