"""Plans as text: the table of layouts, the memory of one, where its experts lie, and its YAML."""

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from models import parameters
from moe_rl import yaml_text
from moe_rl.plan import placement
from moe_rl.plan.cluster import GIB
from moe_rl.plan.memory import MemoryModel
from moe_rl.plan.planner import Plan, Planned
from moe_rl.plan.stages import stages
from parallel.config import ParallelConfig

_NAMES = {
    "weights": "weights",
    "gradients": "gradients (float32)",
    "optimizer": "optimizer, sharded over data-parallel ranks",
    "reference": "reference model",
    "critic": "critic: weights, gradients, optimizer",
    "overhead": "CUDA, NCCL, allocator (assumed)",
    "activations": "training: activations",
    "logits": "training: logits of a chunk, and their gradients",
    "kv_cache": "generation: keys and values",
    "generation": "generation: prompts' pass, sampling, routes",
}
_COLUMNS = ("", "TP", "PP", "VP", "ends", "EP", "ETP", "DP")
_COLUMNS += ("GiB", "stays", "training", "rollout", "bubble", "KB/token", "to nodes", "cost")
_CAPTION = """\
TP tensor, PP pipeline, VP virtual_pipeline, ends first/last_stage_layers, EP expert, ETP expert_tensor, DP data-parallel size
GiB of the fullest GPU (!: too much): what stays + the larger of training and rollout; bubble: a stage waits, of an update
KB/token: to other GPUs and back, a MoE layer's forward; to nodes: share that leaves the node; cost: estimated time of a step"""


def yaml_block(parallel: ParallelConfig) -> str:
    """`parallel:` with what differs from the defaults."""
    defaults = ParallelConfig()
    values = {key: value for key, value in parallel.model_dump().items() if value != getattr(defaults, key)}
    return yaml_text.dump({"parallel": values})


def one_line(parallel: ParallelConfig) -> str:
    """As overrides."""
    defaults = ParallelConfig()
    found = [f"parallel.{k}={v}" for k, v in parallel.model_dump().items() if v != getattr(defaults, k)]
    return " ".join(found) or "no split"


def as_json(planned: Planned) -> str:
    """Every plan, in bytes and seconds."""
    yours = planned.yours
    return json.dumps(
        {
            "nodes": planned.cluster.nodes,
            "gpus_per_node": planned.cluster.gpus,
            "gpu_memory": planned.cluster.memory,
            "yours": yours if isinstance(yours, str) else _values(yours),
            "plans": [_values(plan) for plan in planned.plans],
        },
        indent=1,
    )


def _values(plan: Plan) -> dict[str, Any]:
    memory = plan.memory
    return {
        "parallel": plan.parallel.model_dump(),
        "fits": plan.fits,
        "memory": {**memory.parts(), "total": memory.total, "stage": memory.stage},
        "microbatches": plan.work.microbatches,
        "bubble": plan.cost.bubble,
        "dispatch_bytes": plan.cost.dispatch_bytes,
        "dispatch_bytes_between_nodes": plan.cost.dispatch_between,
        "gradient_bytes": plan.cost.gradient_bytes,
        "estimated_seconds": plan.cost.seconds,
    }


def show(planned: Planned, console: Console, top: int | None) -> None:
    """top: layouts in the table; none: all."""
    config, cluster = planned.config, planned.cluster
    counts, work = parameters.count(config.model), (planned.best or planned.plans[0]).work if planned.plans else None
    say = lambda text="": console.print(text, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
    say(f"model      {_billions(counts.all)} parameters, {_billions(counts.active_all)} active a token, {config.model.dtype}")
    say(f"cluster    {cluster.nodes} x {cluster.gpus} GPUs of {cluster.memory / GIB:g} GiB")
    if work is not None:
        say(
            f"assumed    prompts of up to {work.prompt} tokens, every response at its longest; the busiest experts' rank gets "
            f"{cluster.imbalance:g} times the mean; {cluster.overhead / GIB:g} GiB a GPU for CUDA, NCCL and the allocator"
        )
    fitting = sum(plan.fits for plan in planned.plans)
    say(f"layouts    {len(planned.plans)} legal, {fitting} fit; estimated cost, tried on no GPU: see docs/planning.md")
    say()
    if planned.plans:
        console.print(table(planned, top))
        say(_CAPTION)
    say(_yours(planned))
    best = planned.best
    if best is not None:
        say()
        for line in details(planned, best):
            say(line)


def table(planned: Planned, top: int | None) -> Table:
    """The best layouts; then the configuration's own, where it is not among them."""
    shown = planned.plans if top is None else planned.plans[:top]
    found = Table(box=None, pad_edge=False, header_style="")
    for name in _COLUMNS:
        found.add_column(name, justify="right", no_wrap=True)
    cheapest = planned.plans[0].cost.seconds
    for number, plan in enumerate(shown, start=1):
        found.add_row(*_row(str(number), plan, planned.cluster.world, cheapest))
    yours = planned.yours
    if isinstance(yours, Plan):
        found.add_row(*_row("yours", yours, planned.cluster.world, cheapest))
    return found


def _row(name: str, plan: Plan, world: int, cheapest: float) -> Iterator[str]:
    layout, memory, cost = plan.parallel, plan.memory, plan.cost
    ends = (layout.first_stage_layers, layout.last_stage_layers)
    yield name
    yield from map(str, (layout.tensor, layout.pipeline, layout.virtual_pipeline))
    yield "" if ends == (None, None) else f"{ends[0]}/{ends[1]}"
    yield from map(str, (layout.expert, layout.expert_tensor, layout.data(world)))
    yield f"{memory.total / GIB:.1f}" + "!" * (not plan.fits)
    yield from (f"{part / GIB:.1f}" for part in (memory.stays, memory.training, memory.rollout))
    yield f"{cost.bubble:.0%}"
    yield f"{cost.dispatch_bytes / 1000:.1f}"
    yield f"{cost.dispatch_between / cost.dispatch_bytes:.0%}" if cost.dispatch_bytes else ""
    yield f"{cost.seconds / cheapest:.3f}"


def details(planned: Planned, plan: Plan) -> Iterator[str]:
    """Memory by part, the other way of keeping activations, placement, and YAML."""
    config, cluster, memory = planned.config, planned.cluster, plan.memory
    yield f"memory of a GPU of stage {memory.stage}, the fullest, GiB"
    for name, size in memory.parts().items():
        if size:
            yield f"  {size / GIB:8.2f}  {_NAMES[name]}"
    yield f"  {memory.total / GIB:8.2f}  in all, of {cluster.memory / GIB:g}: what stays, and training or generation"
    other = "none" if config.model.recompute == "full" else "full"
    model, stage = MemoryModel(config, cluster), stages(config.model, plan.parallel)[memory.stage]
    instead = model.activations(plan.parallel, stage, plan.work, other)
    yield f"  (model.recompute={other}: activations {instead / GIB:.2f})"
    yield ""
    yield "placement"
    yield from (f"  {line}" for line in placement.lines(config.model, plan.parallel, cluster.world, cluster.gpus))
    yield ""
    yield yaml_block(plan.parallel).rstrip()


def _yours(planned: Planned) -> str:
    yours = planned.yours
    if isinstance(yours, str):
        return f"yours: not possible on this cluster: {yours}"
    short = (yours.memory.total - planned.cluster.memory) / GIB
    return "yours: the parallel: of the file " + ("fits" if yours.fits else f"does not fit: {short:.1f} GiB short (!)")


def _billions(count: int) -> str:
    return f"{count / 1e9:.4g}B" if count >= 1e9 else f"{count / 1e6:.4g}M"
