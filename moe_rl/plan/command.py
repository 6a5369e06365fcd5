"""`moe-rl plan`."""

from pathlib import Path

from rich.console import Console

from moe_rl.config import RunConfig
from moe_rl.plan import planner, show
from moe_rl.plan.cluster import GIB, Cluster
from moe_rl.plan.planner import Planned
from parallel.errors import UsageError

_WIDTH = 132  # where there is no terminal to ask


def plan(config: RunConfig, cluster: Cluster, top: int | None, json_file: Path | None) -> int:
    """Prints the plans; 0 where one fits, else 1 with what is short and the fewest nodes that would do."""
    planned = planner.make(config, cluster)
    console = Console()
    show.show(planned, console if console.is_terminal else Console(width=_WIDTH), top)
    if json_file is not None:
        _write(json_file, show.as_json(planned) + "\n")
        print(f"\nall layouts: {json_file}")
    if planned.best is not None:
        return 0
    print(f"\nnothing fits: {_what_is_short(planned)}\n{_what_would_do(planned)}")
    return 1


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"--json={path}: cannot be written: {error.strerror}") from error


def _what_is_short(planned: Planned) -> str:
    if not planned.plans:
        return f"no layout splits this model over {planned.cluster.world} GPUs"
    memory = planned.plans[0].memory
    training, rollout = ("activations", "logits"), ("kv_cache", "generation")
    left_out = rollout if memory.training >= memory.rollout else training
    parts = sorted(memory.parts().items(), key=lambda part: -part[1])
    largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if name not in left_out and size)
    short = (memory.total - planned.cluster.memory) / GIB
    return f"the layout that needs least is {short:.1f} GiB short (GiB: {largest})"


def _what_would_do(planned: Planned) -> str:
    config, found = planned.config, planner.fewest_nodes(planned.config, planned.cluster)
    remedies = [
        "model.recompute=full" * (config.model.recompute != "full"),
        f"an algorithm.microbatch_tokens below {config.algorithm.microbatch_tokens}",
        f"a rollout.max_batch below {config.rollout.max_batch}",
        "algorithm.reference_on_cpu=true" * bool(config.algorithm.kl_coefficient and not config.algorithm.reference_on_cpu),
    ]
    less = "needs less memory: " + ", ".join(remedy for remedy in remedies if remedy)
    if found is None:
        return f"more nodes alone would not do, up to 1024; {less}"
    nodes, plan = found
    return f"it would fit on {nodes} nodes, with {show.one_line(plan.parallel)}; {less}"
