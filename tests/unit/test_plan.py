"""The planner: which layouts it finds, what it counts, how it ranks; with numbers worked out by hand."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from models.config import ModelConfig
from models.presets import PRESETS
from moe_rl.config import RunConfig
from moe_rl.plan import activations, cost, placement, planner
from moe_rl.plan.cluster import GIB, Cluster
from moe_rl.plan.layouts import divisors, layouts
from moe_rl.plan.memory import Memory, MemoryModel
from moe_rl.plan.stages import different, in_flight, stages
from moe_rl.plan.states import States, groups
from moe_rl.plan.workload import workload
from parallel.config import ParallelConfig
from parallel.errors import UsageError

SMALL: dict[str, Any] = dict(PRESETS["tiny_moe"], max_positions=256)


def run(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": SMALL, **sections})


def split(**sizes: Any) -> ParallelConfig:
    return ParallelConfig.model_validate(sizes)


def key(layout: ParallelConfig) -> tuple[Any, ...]:
    ends = (layout.first_stage_layers, layout.last_stage_layers)
    return layout.tensor, layout.pipeline, layout.virtual_pipeline, *ends, layout.expert, layout.expert_tensor


@pytest.mark.parametrize("nodes, gpus", [(1, 1), (1, 4), (2, 3), (3, 4), (2, 8)])
@pytest.mark.parametrize(
    "changes", [{}, dict(experts=0, topk=0, moe_ffn=0), dict(kv_heads=4, shared_ffn=64), dict(bias=True)], ids=str
)
def test_every_legal_layout_is_found_and_no_other(nodes: int, gpus: int, changes: dict[str, Any]) -> None:
    """By trying all combinations of sizes on all checks, one by one. 4 layers: where they divide, they divide evenly."""
    model, cluster = ModelConfig.model_validate(SMALL | changes), Cluster(nodes, gpus)
    legal = set()
    sizes = range(1, cluster.world + 1)
    for tensor, pipeline, virtual in itertools.product(sizes, (1, 2, 4), (1, 2, 4)):
        for expert, expert_tensor in itertools.product(sizes, sizes):
            try:
                layout = split(
                    tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual, expert=expert, expert_tensor=expert_tensor
                )
                model.check_layout(layout)
                layout.check_world(cluster.world)
            except (UsageError, ValidationError):
                continue
            dense = expert_tensor > 1 and not model.experts  # there is nothing that it would split
            if gpus % tensor == gpus % expert_tensor == 0 and not dense:
                legal.add(key(layout))
    found = [key(layout) for layout in layouts(model, cluster, ParallelConfig()) if layout.first_stage_layers is None]
    assert len(found) == len(set(found))
    assert set(found) == legal


def test_layers_that_do_not_divide_get_other_ends() -> None:
    """61 layers over 16 stages: 14 stages of 4 leave 5, of 3 leave 19; over 2: 30 and 31. 13 over 4: 2 of 3 leave 7, of 4 5."""
    deep = ModelConfig.model_validate(SMALL | dict(layers=61))
    cluster = Cluster(4, 8)
    ends = {key(layout)[1:5] for layout in layouts(deep, cluster, ParallelConfig())}
    wanted = {(16, 1, 2, 3), (16, 1, 3, 2), (16, 1, 9, 10), (16, 1, 10, 9), (2, 1, 30, 31), (2, 1, 31, 30)}
    assert wanted <= ends and {e for e in ends if e[0] in (2, 16)} == wanted
    for layout in layouts(deep, cluster, ParallelConfig()):
        deep.check_layout(ParallelConfig.model_validate(layout.model_dump()))
        layout.check_world(cluster.world)


def test_divisors() -> None:
    assert (divisors(1), divisors(12), divisors(49)) == ([1], [1, 2, 3, 4, 6, 12], [1, 7, 49])


def test_passes_in_flight() -> None:
    """1F1B: the first of 4 stages has 4, the last 1. Interleaved, 2 stages of 2 chunks: Megatron's warm-up is
    2 (2 - rank - 1) + 2 and one pass more; never more than there are."""
    model = ModelConfig.model_validate(SMALL)
    four, twice = split(pipeline=4), split(pipeline=2, virtual_pipeline=2)
    assert [in_flight(stage, four, 8) for stage in stages(model, four)] == [4, 3, 2, 1]
    assert [in_flight(stage, four, 2) for stage in stages(model, four)] == [2, 2, 2, 1]
    assert [in_flight(stage, twice, 8) for stage in stages(model, twice)] == [5, 3]
    assert in_flight(stages(model, split())[0], split(), 8) == 1


def test_of_stages_that_hold_the_same_the_first_counts() -> None:
    model = ModelConfig.model_validate(SMALL | dict(layers=8, dense_layers=[0, 4]))
    found = stages(model, split(pipeline=8))
    assert [stage.index for stage in different(found)] == [0, 1, 4, 7]


def test_data_parallel_groups() -> None:
    """16 GPUs, 2 stages: 8 a stage; a dense weight of tensor=2 is there 4 times, an expert of 4 x 1 twice."""
    assert groups(split(tensor=2, pipeline=2, expert=4), 16) == (4, 2)


def test_states_by_hand() -> None:
    """Embedding, 2 layers, head of a dense bfloat16 model: hidden 64, 1 head of 64, MLP 64, 64 rows; no query norm.

    A layer: norms 2 x 64, qkv 64 x 192, projection 64 x 64, MLP 64 x 128 + 64 x 64 = 28,800; with embedding and output
    4,096 each and the last norm: 65,856 elements, up to a multiple of 128: 65,920. Weights 2 bytes, gradients 4, and of the
    12 of the optimizer a quarter on each of 4 ranks.
    """
    shape: dict[str, Any] = dict(layers=2, hidden=64, heads=1, kv_heads=1, head_dim=64, ffn=64, experts=0, vocab_size=64)
    config = run(model=dict(shape, qk_norm=False, dtype="bfloat16"))
    model = MemoryModel(config, Cluster(1, 4))
    stage = stages(config.model, split())[0]
    assert model.policy.of(split(), stage, 4) == States(131_840, 263_680, 197_760)


def test_what_a_configuration_asks_of_a_rank() -> None:
    """64 sequences, 4 data-parallel ranks: 16 each, 4 in each of 4 updates; 100 + 28 tokens each, 2 in a microbatch."""
    config = run(
        rollout=dict(prompts=16, responses=4, max_response_tokens=28, max_batch=12),
        algorithm=dict(minibatches=4, epochs=2, microbatch_tokens=300),
    )
    work = workload(config, split(tensor=2), 8, 100)
    assert (work.longest, work.rows, work.batches, work.sequences) == (128, 12, 2, 4)
    assert (work.microbatch, work.microbatches, work.updates) == (256, 2, 8)
    # more prompt than model.max_positions leaves; a sequence longer than the budget is a microbatch by itself
    work = workload(config.model_copy(update={"parallel": split()}), split(), 8, 1000)
    assert (work.prompt, work.longest, work.microbatch) == (228, 256, 256)
    interleaved = workload(config, split(pipeline=4, virtual_pipeline=1), 4, 100)
    assert interleaved.microbatches == 8
    assert workload(config, split(pipeline=2, virtual_pipeline=2), 8, 100).microbatches == 2


def test_the_bubble() -> None:
    """4 stages, 12 microbatches: 3 of 15; with 2 chunks a stage 3 of 27."""
    assert cost.bubble(split(pipeline=4), 12) == pytest.approx(0.2)
    assert cost.bubble(split(pipeline=4, virtual_pipeline=2), 12) == pytest.approx(3 / 27)
    assert cost.bubble(split(), 1) == 0


def test_bytes_that_a_token_sends_to_experts() -> None:
    """Hidden 128 in float32, top-2: 1,024 bytes out, 1,024 back. Over 4 ranks 3/4 of it leaves; 2 of them on each node: half
    crosses. With expert_tensor=2 each copy goes to 2 ranks, and 2 x 2 fit a node of 4."""
    model = ModelConfig.model_validate(SMALL)
    assert cost.dispatch(model, split(expert=4), 2) == (1536, 1024)
    assert cost.dispatch(model, split(expert=4), 8) == (1536, 0)
    assert cost.dispatch(model, split(expert=2, expert_tensor=2), 4) == (3072, 0)
    assert cost.dispatch(model, split(expert=2, expert_tensor=2), 2) == (3072, 2048)
    assert cost.dispatch(model, split(), 8) == (0, 0)
    # allgather: every token to 3 other ranks, and a partial result of each back
    assert cost.dispatch(model, split(expert=4, dispatcher="allgather"), 2) == (3072, 2048)


def test_placement() -> None:
    model = ModelConfig.model_validate(SMALL)
    layout = split(tensor=2, pipeline=2, expert=4)
    assert [placement.stage_of(rank, layout, 16) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert [list(placement.experts_of(rank, model, layout, 16)) for rank in (0, 3, 4, 11)] == [[0, 1], [6, 7], [0, 1], [6, 7]]
    parts = split(expert=4, expert_tensor=2)
    assert [placement.experts_of(rank, model, parts, 8).start for rank in range(8)] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert list(placement.lines(model, layout, 16, 8)) == [
        "stage 0: ranks 0-7, layers 0-1 + embedding",
        "stage 1: ranks 8-15, layers 2-3 + output layer",
        "experts: groups of 4 consecutive ranks (in one node), 2 a stage; of the first group",
        "  rank 0: experts 0-1 of every MoE layer",
        "  rank 1: experts 2-3 of every MoE layer",
        "  rank 2: experts 4-5 of every MoE layer",
        "  rank 3: experts 6-7 of every MoE layer",
    ]


def test_a_gpu_needs_what_stays_and_the_larger_of_training_and_generation() -> None:
    memory = Memory(0, 1, 2, 3, 4, 5, 6, 10, 20, 7, 8)
    assert (memory.stays, memory.training, memory.rollout, memory.total) == (21, 30, 15, 51)


def test_what_an_algorithm_adds() -> None:
    """A KL term: the reference's weights, unless they lie in host memory. PPO: a critic without the policy's output layer."""
    cluster = Cluster(1, 1)

    def memory(**sections: Any) -> Memory:
        config = run(**sections)
        return planner.Planner(config, cluster).plan(split()).memory

    plain = memory(algorithm=dict(name="grpo"))
    kl = memory(algorithm=dict(name="grpo", kl_coefficient=0.1))
    assert (plain.reference, kl.reference, plain.critic) == (0, plain.weights, 0)
    assert memory(algorithm=dict(name="grpo", kl_coefficient=0.1, reference_on_cpu=True)).reference == 0
    critic = memory(algorithm=dict(name="ppo")).critic
    assert critic == plain.weights + plain.gradients + plain.optimizer - (4 + 4 + 8) * (320 * 128 - 128)


def test_activations_of_the_microbatches_in_flight() -> None:
    """2 stages of 2 layers, 2 microbatches on the first: without recompute 2 x 2 layers; with it 2 x 2 inputs, and what is
    left of one layer. Interleaved, 5 passes in flight over two chunks of a layer each: 3 + 2."""
    config, cluster = run(algorithm=dict(microbatch_tokens=256, minibatches=1)), Cluster(1, 2, imbalance=1)
    model = MemoryModel(config, cluster)

    def first(layout: ParallelConfig, recompute: str) -> float:
        work = workload(config, layout, 2, 1000)
        assert work.microbatch == 256 and work.microbatches > 4
        return model.activations(layout, stages(config.model, layout)[0], work, recompute)

    layer = activations.layer(config.model, True, 256, split(), model.kernels)
    kept = activations.layer_input(config.model, 256, split())
    assert first(split(pipeline=2), "none") == 4 * layer
    assert first(split(pipeline=2), "full") == 4 * kept + layer - kept
    assert first(split(pipeline=2, virtual_pipeline=2), "none") == 5 * layer


def test_what_fits_comes_first_by_cost_and_then_what_lacks_least() -> None:
    config = run(rollout=dict(max_response_tokens=64))
    roomy = planner.make(config, Cluster(1, 4))
    assert roomy.best is roomy.plans[0] and all(plan.fits for plan in roomy.plans)
    seconds = [plan.cost.seconds for plan in roomy.plans]
    assert seconds == sorted(seconds)
    tight = planner.make(config, Cluster(1, 4, memory=6 * GIB))
    totals = [plan.memory.total for plan in tight.plans]
    assert tight.best is None and totals == sorted(totals)


def test_the_file_s_own_layout() -> None:
    planned = planner.make(run(parallel=dict(expert=4, tensor=2)), Cluster(1, 8))
    assert isinstance(planned.yours, planner.Plan) and key(planned.yours.parallel) == (2, 1, 1, None, None, 4, 1)
    wrong = planner.make(run(parallel=dict(expert=3)), Cluster(1, 8))
    assert wrong.yours == "parallel.expert=3: must divide model.experts=8; choose a divisor of 8"
    context = planner.make(run(parallel=dict(context=2)), Cluster(1, 8))
    assert isinstance(context.yours, str) and "context=2" in context.yours


def test_the_fewest_nodes_that_would_do() -> None:
    """DeepSeek-V3: 671e9 x 6 bytes of weights and gradients and 12 of the optimizer are 11,249 GiB: no 150 GPUs of 80 hold it,
    and 48 nodes do."""
    large: dict[str, Any] = dict(PRESETS["deepseek_v3"], recompute="full")
    config = RunConfig.model_validate(
        {"model": large, "rollout": dict(max_response_tokens=1024, max_batch=16), "algorithm": dict(microbatch_tokens=2048)}
    )
    assert planner.make(config, Cluster(16, 8)).best is None
    found = planner.fewest_nodes(config, Cluster(16, 8))
    assert found is not None and 18 < found[0] <= 48 and found[1].fits
    assert planner.fewest_nodes(config, Cluster(1, 1, memory=7 * GIB), most=2) is None


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("cluster", [Cluster(1, 8), Cluster(3, 4), Cluster(8, 8), Cluster(5, 7)], ids=str)
def test_any_model_on_any_cluster(name: str, cluster: Cluster) -> None:
    """Every plan is one that the checks of a run accept; nothing in it is negative, and weights and gradients lie somewhere."""
    model: dict[str, Any] = PRESETS[name]
    config = RunConfig.model_validate({"model": model, "rollout": dict(max_response_tokens=64)})
    planned = planner.make(config, cluster)
    assert planned.plans
    for plan in planned.plans:
        layout = ParallelConfig.model_validate(plan.parallel.model_dump())
        config.model.check_layout(layout)
        layout.check_world(cluster.world)
        assert all(size >= 0 for size in plan.memory.parts().values()) and plan.memory.weights > 0
        assert plan.cost.seconds > 0 and 0 <= plan.cost.bubble < 1
        assert plan.cost.dispatch_between <= plan.cost.dispatch_bytes


def test_a_vocabulary_that_does_not_divide_is_padded_and_its_rows_are_counted() -> None:
    """50,257 rows become 50,304; over 3 tensor ranks they would go, over 5 they do not."""
    model: dict[str, Any] = SMALL | dict(vocab_size=50_257, heads=30, kv_heads=30, head_dim=4, ffn=60, moe_ffn=60)
    config = run(model=model)
    sizes = {layout.tensor for layout in layouts(config.model, Cluster(1, 30), ParallelConfig())}
    assert sizes == {1, 2, 3, 6}
    one, three = (
        MemoryModel(config, Cluster(1, 30)).policy.of(split(tensor=n), stages(config.model, split(tensor=n))[0], 30)
        for n in (1, 3)
    )
    assert one.weights - three.weights > 2 * (50_304 - 50_304 // 3) * 128 * 4


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import sys; from moe_rl.cli import main\n"
        "code = main(['plan', 'configs/quickstart.yaml', '--nodes', '2', '--gpus-per-node', '8'])\n"
        "print(code, sorted({'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
