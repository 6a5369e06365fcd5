"""`moe-rl plan` against tensors that really lie on each rank: several models in several layouts over gloo.

Weights and gradients: to the byte. Optimizer state: summed over the ranks of a layout to the byte; on the rank that has most,
the plan is at most one buffer's padding above it.
"""

from typing import Any

import pytest

from models import parameters
from models.parameters import Split
from moe_rl.plan import activations, placement
from moe_rl.plan.activations import Kernels
from moe_rl.plan.memory import kv_cache
from moe_rl.plan.stages import stages
from moe_rl.plan.states import StateMemory, optimizer_bytes
from moe_rl.plan.workload import Workload
from tests.distributed.held import cached_by_each, held_by_critic, held_by_each, saved
from tests.distributed.passes import Case
from tests.distributed.ranks import run_on_ranks

pytestmark = pytest.mark.distributed

# Of these models of 0.1M to 0.4M parameters; what is padded does not grow with a model.
PADDING = 1.01

LATENT: dict[str, Any] = dict(kv_heads=4, kv_lora_rank=24, rope_head_dim=8, v_head_dim=16, qk_norm=False)
MODELS: dict[str, dict[str, Any]] = {
    "bfloat16": dict(dtype="bfloat16"),
    "latent, shared, dense": LATENT | dict(q_lora_rank=20, shared_ffn=40, dense_layers=[0]),
    "latent, full queries, bfloat16": LATENT | dict(dtype="bfloat16"),
    "tied, norm over all heads": dict(tie_embeddings=True, qk_norm_span="all"),
    "biases and sinks": dict(bias=True, attention_sinks=True, window=4, window_layers=[0, 2], qk_norm=False),
    "no experts": dict(experts=0, topk=0, moe_ffn=0),
}
LAYOUTS: list[tuple[int, dict[str, Any], list[str]]] = [
    (1, {}, list(MODELS)),
    (2, dict(tensor=2), list(MODELS)),
    (2, dict(pipeline=2), list(MODELS)),
    (2, {}, ["bfloat16", "latent, shared, dense"]),
    (2, dict(expert=2), ["bfloat16", "latent, shared, dense", "biases and sinks"]),
    (2, dict(pipeline=2, virtual_pipeline=2), ["bfloat16", "tied, norm over all heads"]),
    (2, dict(pipeline=2, first_stage_layers=1, last_stage_layers=3), ["latent, shared, dense"]),
    (2, dict(tensor=2, expert=2), ["bfloat16", "latent, shared, dense"]),
    (4, dict(tensor=2, pipeline=2, expert=2), ["bfloat16", "tied, norm over all heads"]),
    (4, dict(expert=2, expert_tensor=2, dispatcher="allgather"), ["bfloat16"]),
]


@pytest.mark.parametrize(("size", "layout", "names"), LAYOUTS, ids=[f"{size}-{layout}" for size, layout, _ in LAYOUTS])
def test_what_a_rank_holds_is_what_the_plan_says(size: int, layout: dict[str, Any], names: list[str]) -> None:
    cases = [Case(layout=layout, model=MODELS[name]) for name in names]
    on_ranks = run_on_ranks(held_by_each, size, cases)
    for case, name, ranks in zip(cases, names, zip(*on_ranks, strict=True), strict=True):
        _compare(case, list(ranks), size, name)


def _compare(case: Case, ranks: list[dict[str, Any]], size: int, name: str) -> None:
    model, parallel, found = case.config, case.parallel, stages(case.config, case.parallel)
    predicted = StateMemory(model, down_projections=True)
    for rank, real in enumerate(ranks):
        stage = found[placement.stage_of(rank, parallel, size)]
        assert stage.index == real["stage"] and real["embedding"] == stage.chunks[0].first, name
        assert real["layers"] == sorted(i for chunk in parallel.stage_layers(model.layers)[stage.index] for i in chunk), name
        if stage.moe:
            assert real["experts"] == list(placement.experts_of(rank, model, parallel, size)), name
        ours, (weights, gradients, optimizer) = predicted.of(parallel, stage, size), real["states"]
        assert (ours.weights, ours.gradients) == (weights, gradients), name
        assert optimizer <= ours.optimizer, name
    for stage in found:
        most = max(real["states"][2] for real in ranks if real["stage"] == stage.index)
        assert predicted.of(parallel, stage, size).optimizer <= most * PADDING, name
    everywhere = sum(real["states"][2] for real in ranks)
    assert everywhere == _elements_on_all_ranks(model, parallel) * optimizer_bytes(model.dtype), name


def _elements_on_all_ranks(model: Any, parallel: Any) -> int:
    """Each is updated once by the data-parallel ranks that share it: replicas on tensor ranks, and the tied output layer that a
    pipeline keeps a second time, are counted again."""
    split, total = Split.of(parallel, True), 0
    routes, stages = set(model.moe_layers), parallel.pipeline
    parts = [w for i in range(model.layers) for w in parameters.layer(model, i in routes, split)]
    parts += parameters.embedding(model, split) + parameters.head(model, split, embeds=stages == 1)
    for weight in parts:
        total += weight.total * (parallel.expert * parallel.expert_tensor if weight.is_expert else parallel.tensor)
    return total


@pytest.mark.parametrize("layout", [{}, dict(pipeline=2), dict(tensor=2)])
def test_what_a_critic_holds(layout: dict[str, Any]) -> None:
    """A tied policy's critic: an embedding, and a vector in place of the output layer."""
    case = Case(layout=layout, model=dict(tie_embeddings=True))
    size = case.parallel.fewest_processes
    untied = case.config.model_copy(update={"tie_embeddings": False})
    predicted = StateMemory(untied, down_projections=True, values=True)
    for stage, (weights, gradients, optimizer) in zip(
        [s for s in stages(untied, case.parallel) for _ in range(case.parallel.tensor)],
        run_on_ranks(held_by_critic, size, case),
        strict=True,
    ):
        ours = predicted.of(case.parallel, stage, size)
        assert (ours.weights, ours.gradients) == (weights, gradients)
        assert 0 <= ours.optimizer - optimizer <= ours.optimizer // 10


@pytest.mark.parametrize("layout", [{}, dict(tensor=2), dict(pipeline=2), dict(pipeline=2, virtual_pipeline=2)])
def test_keys_and_values_of_a_generation(layout: dict[str, Any]) -> None:
    cases = [Case(layout=layout, model=MODELS[name]) for name in ("bfloat16", "latent, shared, dense", "biases and sinks")]
    parallel, prompts, response = cases[0].parallel, [3, 9, 5], 7
    size = parallel.fewest_processes
    work = Workload(9, response, len(prompts), 1, 1, 1, 1, 1)
    for rank, found in enumerate(run_on_ranks(cached_by_each, size, cases, prompts, response)):
        for case, real in zip(cases, found, strict=True):
            stage = stages(case.config, parallel)[placement.stage_of(rank, parallel, size)]
            assert kv_cache(case.config, stage, parallel, work) == real


@pytest.mark.parametrize(
    ("layout", "model", "close"),
    [
        (dict(expert=2), {}, 0),
        (dict(pipeline=2), {}, 0),
        (dict(tensor=2, expert=2), dict(dtype="bfloat16"), 2e-4),
        (dict(tensor=2), dict(shared_ffn=40, dense_layers=[0]), 0.05),
        (dict(tensor=2), LATENT | dict(q_lora_rank=20, v_head_dim=24), 0.012),
        (dict(expert_tensor=2, dispatcher="allgather"), {}, 0.01),
    ],
    ids=str,
)
def test_what_autograd_saves_on_several_ranks(layout: dict[str, Any], model: dict[str, Any], close: float) -> None:
    """Summed over the ranks, among which the routers spread a microbatch's tokens as they do. Two tensor ranks in float32 keep
    the angles of rotation once where the plan counts them for queries and for keys."""
    case, tokens = Case(layout=layout, model=model), 128
    config, parallel, kernels = case.config, case.parallel, Kernels(fused=False)
    size = parallel.fewest_processes
    ours = 0.0
    for stage in stages(config, parallel):
        (chunk,) = stage.chunks
        rank = chunk.dense * activations.layer(config, False, tokens, parallel, kernels)
        rank += chunk.moe * activations.layer(config, True, tokens, parallel, kernels)
        rank += activations.head(config, tokens, parallel, kernels) if chunk.last else 0
        ours += size // parallel.pipeline * (rank + 8 * tokens * chunk.first)
    assert ours == pytest.approx(sum(run_on_ranks(saved, size, case, tokens)), rel=close, abs=0)
