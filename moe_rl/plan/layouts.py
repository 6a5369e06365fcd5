"""Every layout that a model and a cluster allow."""

import math
from collections.abc import Iterator

from models.config import ModelConfig
from moe_rl.plan.cluster import Cluster
from parallel.config import ParallelConfig
from parallel.errors import UsageError

# Model chunks a stage beyond which only messages grow
_MOST_CHUNKS = 8
_SIZES = ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor", "context")


def layouts(model: ModelConfig, cluster: Cluster, like: ParallelConfig) -> Iterator[ParallelConfig]:
    """Those that `check_layout` and `check_world` accept. Tensor and expert-tensor groups stay inside a node; context
    parallelism is refused by `check_backend`. What does not split the model (dispatcher, timeout) is as in `like`."""
    inside = divisors(cluster.gpus)
    tensors = [n for n in inside if _splits(model, _layout(like, tensor=n))]
    experts = [
        (expert, expert_tensor)
        for expert in divisors(model.experts or 1)
        for expert_tensor in (inside if model.experts else [1])
        if _splits(model, _layout(like, expert=expert, expert_tensor=expert_tensor))
    ]
    for pipeline in divisors(cluster.world):
        for depth in _depths(model.layers, pipeline):
            for tensor in tensors:
                for expert, expert_tensor in experts:
                    found = _layout(like, tensor=tensor, expert=expert, expert_tensor=expert_tensor, **depth)
                    if cluster.world % found.fewest_processes == 0:
                        yield found


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _layout(like: ParallelConfig, **sizes: int) -> ParallelConfig:
    """Not validated again: thousands are tried, of sizes that are valid together."""
    rest = {"first_stage_layers": None, "last_stage_layers": None}
    return like.model_copy(update=rest | dict.fromkeys(_SIZES, 1) | sizes)


def _splits(model: ModelConfig, layout: ParallelConfig) -> bool:
    try:
        model.check_layout(layout)
    except UsageError:
        return False
    return True


def _depths(layers: int, pipeline: int) -> Iterator[dict[str, int]]:
    """Ways to cut the layers into `pipeline` stages: evenly, with several chunks a stage, or with other numbers in the first
    and the last stage, which have the embedding and the output layer beside them."""
    if pipeline > layers:
        return
    if layers % pipeline == 0:
        yield {"pipeline": pipeline}
        for virtual in range(2, _MOST_CHUNKS + 1) if pipeline > 1 else ():
            if layers % (pipeline * virtual) == 0:
                yield {"pipeline": pipeline, "virtual_pipeline": virtual}
        return
    for middle in {layers // pipeline, layers // pipeline + 1} if pipeline > 2 else {0}:
        ends = layers - middle * (pipeline - 2)
        for first in {ends // 2, -(-ends // 2)} if ends >= 2 else ():
            yield {"pipeline": pipeline, "first_stage_layers": first, "last_stage_layers": ends - first}
