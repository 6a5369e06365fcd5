"""The presets of released models, against transformers' own defaults where those are the released shape; the others, and all
settings, against their configurations in test_published_models.py."""

from typing import Any

import pytest
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, OlmoeConfig, PreTrainedConfig

from models.config import ModelConfig
from models.presets import PRESETS
from parallel.config import ParallelConfig
from tests.unit.test_published_models import PUBLISHED

# where the released models differ from transformers' defaults for their family
CHANGES: dict[str, dict[str, Any]] = {
    "olmoe_1b_7b": dict(intermediate_size=1024, rope_theta=10000.0),
    "mixtral_8x7b": dict(max_position_embeddings=32768, rope_theta=1e6, head_dim=128),
    "deepseek_v3": dict(max_position_embeddings=163840, rope_theta=10000.0),
    "gpt_oss_120b": dict(rope_theta=150000.0),
    "gpt_oss_20b": dict(rope_theta=150000.0, num_hidden_layers=24, num_local_experts=32),
}
DEFAULTS: dict[str, type[PreTrainedConfig]] = {
    "olmoe_1b_7b": OlmoeConfig,
    "mixtral_8x7b": MixtralConfig,
    "deepseek_v3": DeepseekV3Config,
    "gpt_oss_120b": GptOssConfig,
    "gpt_oss_20b": GptOssConfig,
}
# our key -> theirs, by any of the names that the families give it
SAME: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("qk_nope_head_dim", "head_dim"),
    "ffn": ("intermediate_size",),
    "moe_ffn": ("moe_intermediate_size", "intermediate_size"),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "topk": ("num_experts_per_tok",),
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings",),
    "rope_base": ("rope_theta",),
    "norm_epsilon": ("rms_norm_eps",),
    "tie_embeddings": ("tie_word_embeddings",),
    "kv_lora_rank": ("kv_lora_rank",),
    "q_lora_rank": ("q_lora_rank",),
    "v_head_dim": ("v_head_dim",),
}


def released(name: str) -> dict[str, Any]:
    """The published configuration; a null head_dim is hidden / heads."""
    values = DEFAULTS[name](**CHANGES[name]).to_dict() | CHANGES[name]
    if values.get("head_dim") is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    return values


@pytest.mark.parametrize("name", CHANGES)
def test_a_preset_has_the_released_shape(name: str) -> None:
    model, theirs = ModelConfig(**PRESETS[name]), released(name)
    for key, names in SAME.items():
        found = next((theirs[n] for n in names if n in theirs), None)
        assert getattr(model, key) == found, key
    assert model.dense_layers == list(range(theirs.get("first_k_dense_replace", 0)))
    shared = theirs.get("n_shared_experts", 0) * theirs.get("moe_intermediate_size", 0)
    assert (model.shared_ffn, model.rope_head_dim) == (shared, theirs.get("qk_rope_head_dim", 0))
    assert model.dtype == "bfloat16" and model.load_balancing == "none"


def test_the_presets_are_all_the_released_models_beside_the_small_ones() -> None:
    assert set(PRESETS) == {*PUBLISHED, "tiny_moe", "small_moe", "medium_moe"}


def test_routers() -> None:
    """norm_topk_prob: the softmax over the chosen alone, which is Megatron's order; without it, over all experts first."""
    models = {name: ModelConfig(**PRESETS[name]) for name in PUBLISHED}
    first = {name for name, model in models.items() if model.router_pre_softmax}
    assert first == {"olmoe_1b_7b", "deepseek_v2_lite"}
    assert not OlmoeConfig().norm_topk_prob
    v3, theirs = models["deepseek_v3"], DeepseekV3Config()
    assert v3.router_score == "sigmoid" and v3.has_expert_bias and v3.router_normalize == theirs.norm_topk_prob
    # the group score: sum of the two best of each group (modeling_deepseek.py of the repository; arXiv 2412.19437, 2.1.2)
    assert (v3.router_groups, v3.router_group_topk, v3.router_group_best) == (theirs.n_group, theirs.topk_group, 2)
    assert v3.router_scale == theirs.routed_scaling_factor
    others = [model for name, model in models.items() if name != "deepseek_v3"]
    assert all(m.router_score == "softmax" and m.router_groups is None and m.router_scale is None for m in others)


@pytest.mark.parametrize("name", ["gpt_oss_20b", "gpt_oss_120b"])
def test_what_only_gpt_oss_has(name: str) -> None:
    model, theirs = ModelConfig(**PRESETS[name]), GptOssConfig(**CHANGES[name])
    assert theirs.layer_types is not None and theirs.rope_parameters is not None
    windows = [i for i, kind in enumerate(theirs.layer_types) if kind == "sliding_attention"]
    assert (model.window, model.window_layers) == (theirs.sliding_window, windows)
    assert model.bias == theirs.attention_bias and model.attention_sinks and not model.qk_norm
    assert model.rope_scaling == {k: v for k, v in theirs.rope_parameters.items() if k != "rope_theta"}
    # transformers' GptOssExperts: gate * sigmoid(alpha gate), clamped, times (up + 1); quick_gelu's alpha is 1.702, too
    assert (model.activation, model.glu_clamp, model.glu_offset) == ("quick_gelu", theirs.swiglu_limit, 1.0)
    assert theirs.swiglu_alpha == 1.702


def test_positions_of_deepseek() -> None:
    """rope_scaling of both repositories: factor 40 over 4,096 positions; mscale 0.707 (V2-Lite), 1.0 (V3)."""
    for name, mscale in {"deepseek_v2_lite": 0.707, "deepseek_v3": 1.0}.items():
        scaling = ModelConfig(**PRESETS[name]).rope_scaling
        assert scaling == dict(
            rope_type="yarn",
            factor=40,
            beta_fast=32,
            beta_slow=1,
            mscale=mscale,
            mscale_all_dim=mscale,
            original_max_position_embeddings=4096,
        )


def test_norms_of_queries_and_keys() -> None:
    spans = {name: PRESETS[name].get("qk_norm_span", "head") for name in PUBLISHED if PRESETS[name].get("qk_norm", True)}
    assert spans == {"qwen3_30b_a3b": "head", "qwen3_235b_a22b": "head", "olmoe_1b_7b": "all"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_splits_over_two_tensor_ranks_and_all_its_experts(name: str) -> None:
    model = ModelConfig(**PRESETS[name])
    layout = ParallelConfig.model_validate(dict(tensor=2, expert=model.experts))
    model.check_layout(layout)
