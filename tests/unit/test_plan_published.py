"""The memory model against figures that others published for models too large to build here."""

from typing import Any

import pytest

from models.config import ModelConfig
from models.parameters import Split, layer
from models.presets import PRESETS
from moe_rl.plan import activations
from moe_rl.plan.activations import Kernels
from moe_rl.plan.stages import stages
from moe_rl.plan.states import StateMemory
from parallel.config import ParallelConfig

GIB = 1024**3

# README of ISEEKYAN/mbridge, memory_estimator: a Mixtral of 4 layers on 8 GPUs, sequences of 4,096, Transformer Engine, no
# recompute; what was measured on the GPUs. (tensor, sequences, GB of model states, GB of activations)
MEASURED = [(2, 1, 5.3, 1.3), (2, 2, 5.3, 2.7), (1, 1, 8.8, 2.4), (1, 2, 8.8, 5.0)]


@pytest.mark.parametrize(("tensor", "sequences", "states", "saved"), MEASURED)
def test_a_small_mixtral_on_gpus(tensor: int, sequences: int, states: float, saved: float) -> None:
    """States within 1.1%. Activations 5% to 13% above: the activation of its experts was fused, and here it is not."""
    shape: dict[str, Any] = dict(hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=5440, moe_ffn=5440, experts=8, topk=2)
    model = ModelConfig(layers=4, vocab_size=32000, qk_norm=False, dtype="bfloat16", **shape)
    parallel = ParallelConfig.model_validate(dict(tensor=tensor, expert_tensor=tensor))
    stage = stages(model, parallel)[0]
    ours = StateMemory(model, down_projections=False).of(parallel, stage, 8)
    assert ours.total / GIB == pytest.approx(states, rel=0.015)
    tokens = 4096 * sequences
    kept = 4 * activations.layer(model, True, tokens, parallel, Kernels()) + activations.head(
        model, tokens, parallel, Kernels()
    )
    assert 1.0 < kept / GIB / saved < 1.14


def test_a_stage_of_deepseek_v3() -> None:
    """arXiv 2502.07846: 4 MoE layers with tensor 2, expert 8 are 11.64 GB of bfloat16 weights a GPU. Counted: 1.8% less."""
    weights = layer(ModelConfig(**PRESETS["deepseek_v3"]), True, Split(2, 8, 1, down_projections=False))
    assert 4 * sum(w.total for w in weights) * 2 / GIB == pytest.approx(11.64, rel=0.02)
