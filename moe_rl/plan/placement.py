"""Which GPU holds what: layers by pipeline stage, experts by rank.

Megatron's order of ranks: tensor innermost, then data, then pipeline; for experts expert_tensor, expert, their data, pipeline.
"""

from collections.abc import Iterator

from models.config import ModelConfig
from parallel.config import ParallelConfig


def stage_of(rank: int, parallel: ParallelConfig, world: int) -> int:
    return rank // (world // parallel.pipeline)


def experts_of(rank: int, model: ModelConfig, parallel: ParallelConfig, world: int) -> range:
    """The routed experts that a rank holds (or, with expert_tensor > 1, a part of each) in every MoE layer of its stage."""
    within = rank % (world // parallel.pipeline)
    place = within // parallel.expert_tensor % parallel.expert
    each = model.experts // parallel.expert
    return range(place * each, (place + 1) * each)


def lines(model: ModelConfig, parallel: ParallelConfig, world: int, gpus: int) -> Iterator[str]:
    """Stages with their ranks and layers; then the experts of the first group's ranks, which every later group repeats."""
    per_stage = world // parallel.pipeline
    for stage, chunks in enumerate(parallel.stage_layers(model.layers)):
        ends = ["embedding"] * (stage == 0) + ["output layer"] * (stage == parallel.pipeline - 1)
        layers = ", ".join(_span(chunk) for chunk in chunks)
        yield (
            f"stage {stage}: ranks {_span(range(stage * per_stage, (stage + 1) * per_stage))}, layers {layers}"
            + f" + {' and '.join(ends)}" * bool(ends)
        )
    if not model.experts:
        return
    if parallel.expert == 1:
        yield f"experts: every rank holds all {model.experts}" + _parts(parallel)
        return
    group = parallel.expert * parallel.expert_tensor
    where = "in one node" if group <= gpus else f"over {-(-group // gpus)} nodes"
    yield f"experts: groups of {group} consecutive ranks ({where}), {per_stage // group} a stage; of the first group"
    each = model.experts // parallel.expert
    shown = list(range(parallel.expert)) if parallel.expert <= 8 else [0, 1, 2, parallel.expert - 1]
    for place in shown:
        if place == parallel.expert - 1 and len(shown) < parallel.expert:
            yield "  ..."
        ranks = range(place * parallel.expert_tensor, (place + 1) * parallel.expert_tensor)
        name = "rank" if len(ranks) == 1 else "ranks"
        experts = range(place * each, (place + 1) * each)
        yield f"  {name} {_span(ranks)}: expert{'s' * (each > 1)} {_span(experts)} of every MoE layer" + _parts(parallel)


def _parts(parallel: ParallelConfig) -> str:
    return f", 1/{parallel.expert_tensor} of each" * (parallel.expert_tensor > 1)


def _span(numbers: range) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
