"""Counts of parameters: against models really built, feature by feature, and against what their makers published."""

from collections.abc import Iterator
from typing import Any

import pytest

from models.config import ModelConfig
from models.parameters import count
from models.presets import PRESETS
from parallel.runtime import Runtime, started
from tests.distributed.passes import Case, built

LATENT: dict[str, Any] = dict(kv_heads=4, kv_lora_rank=24, rope_head_dim=8, v_head_dim=12, qk_norm=False)
GPT_OSS: dict[str, Any] = dict(
    bias=True, attention_sinks=True, window=4, window_layers=[0, 2], qk_norm=False, activation="quick_gelu", glu_clamp=7.0
)
FEATURES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "norm over all heads": dict(qk_norm_span="all"),
    "no query norm": dict(qk_norm=False),
    "query biases": dict(qkv_bias=True),
    "biases, sinks, windows": GPT_OSS,
    "latent": dict(LATENT),
    "latent queries": LATENT | dict(q_lora_rank=20),
    "shared expert": dict(shared_ffn=40),
    "gated shared expert": dict(shared_ffn=40, shared_gate=True),
    "dense layers": dict(dense_layers=[0, 3]),
    "dense layers with biases": GPT_OSS | dict(dense_layers=[1]),
    "no experts": dict(experts=0, topk=0, moe_ffn=0),
    "tied embeddings": dict(tie_embeddings=True),
    "a vocabulary that is padded": dict(vocab_size=130),
    "expert bias": dict(router_score="sigmoid", expert_bias=True),
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with started(seed=0, threads=1, timeout_seconds=60) as here:
        yield here


@pytest.mark.parametrize("name", FEATURES)
def test_every_parameter_of_a_built_model_is_counted(runtime: Runtime, name: str) -> None:
    case = Case(model=FEATURES[name])
    with built(case, runtime) as model:
        real = {part: sum(p.numel() for p in module.parameters()) for part, module in _parts(model)}
        whole = sum(p.numel() for chunk in model.bare for p in chunk.parameters())
    counts = count(case.config)
    assert counts.all == whole
    assert counts.total["embedding"] == real["embedding"]
    assert counts.total["router"] == real["router"]
    assert counts.total["routed experts"] == real["experts"]
    assert counts.total["shared experts"] == real["shared"]


def _parts(model: Any) -> Iterator[tuple[str, Any]]:
    import torch

    (chunk,) = model.bare
    layers = [layer.mlp for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
    yield "embedding", chunk.embedding
    yield "router", torch.nn.ModuleList(mlp.router for mlp in layers)
    yield "experts", torch.nn.ModuleList(mlp.experts for mlp in layers)
    yield "shared", torch.nn.ModuleList(mlp.shared_experts for mlp in layers if mlp.shared_experts is not None)


# (all, active, digits after the point, whether the embedding is among the active), billions.
# Qwen3: model cards of Qwen/Qwen3-30B-A3B and -235B-A22B. Mixtral: arXiv 2401.04088 and its announcement (46.7B, 12.9B).
# OLMoE: arXiv 2409.02060, table 2 (6.9B, 1.3B). DeepSeek-V2-Lite: arXiv 2405.04434, appendix B (15.7B, 2.4B).
# DeepSeek-V3: README_WEIGHTS.md of its repository (671B without the multi-token-prediction module; 36.6B with the head and
# without the embedding). GPT-OSS: its model card, table 1 ("unembedding parameters are counted, embedding parameters not").
PUBLISHED: dict[str, tuple[float, float, int, bool]] = {
    "qwen3_30b_a3b": (30.5, 3.3, 1, True),
    "qwen3_235b_a22b": (235, 22, 0, True),
    "mixtral_8x7b": (46.7, 12.9, 1, True),
    "olmoe_1b_7b": (6.9, 1.3, 1, True),
    "deepseek_v2_lite": (15.7, 2.4, 1, False),
    "deepseek_v3": (671, 36.6, 1, False),
    "gpt_oss_20b": (20.91, 3.61, 2, False),
    "gpt_oss_120b": (116.83, 5.13, 2, False),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_are_the_published_ones(name: str) -> None:
    """To the last digit given. Two were cut off rather than rounded: 3.35 became 3.3 (Qwen3-30B-A3B) and 2.45 became 2.4
    (DeepSeek-V2-Lite)."""
    whole, active, digits, embeds = PUBLISHED[name]
    counts = count(ModelConfig(**PRESETS[name]))
    ours = counts.active_all if embeds else counts.active_without_embedding
    unit = 10**-digits
    assert counts.all / 1e9 == pytest.approx(whole, abs=0.5 * max(unit, 0.1 if whole < 100 else unit))
    cut_off = name in ("qwen3_30b_a3b", "deepseek_v2_lite")
    assert 0 <= ours / 1e9 - active < unit if cut_off else abs(ours / 1e9 - active) <= 0.5 * unit


def test_gpt_oss_by_part() -> None:
    """Its model card, table 1: MLP, attention, embedding with unembedding, in billions."""
    for name, (mlp, attention, embeddings) in {
        "gpt_oss_120b": (114.71, 0.96, 1.16),
        "gpt_oss_20b": (19.12, 0.64, 1.16),
    }.items():
        total = count(ModelConfig(**PRESETS[name])).total
        assert (total["routed experts"] + total["router"]) / 1e9 == pytest.approx(mlp, abs=0.006)
        assert (total["attention"] + total["norms"]) / 1e9 == pytest.approx(attention, abs=0.006)
        assert (total["embedding"] + total["output"]) / 1e9 == pytest.approx(embeddings, abs=0.006)


def test_an_output_layer_that_is_tied_stays_active() -> None:
    """By hand: 2 layers of a dense model, hidden 4, one head of 2, ffn 6, 64 rows of vocabulary; no query norm.

    Embedding 256; a layer: norms 8, qkv 4 x 6 = 24, projection 8, MLP 48 + 24; final norm 4. 256 + 2 * 112 + 4 = 484.
    """
    shape: dict[str, Any] = dict(layers=2, hidden=4, heads=1, kv_heads=1, head_dim=2, ffn=6, experts=0, vocab_size=64)
    tied = count(ModelConfig(**shape, qk_norm=False, tie_embeddings=True))
    assert (tied.all, tied.active_all, tied.active_without_embedding) == (484, 484, 484)
    untied = count(ModelConfig(**shape, qk_norm=False))
    assert (untied.all, untied.active_without_embedding) == (740, 484)
