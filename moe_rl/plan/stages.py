"""What a pipeline stage holds, and which stages differ."""

from dataclasses import dataclass

from models.config import ModelConfig
from parallel.config import ParallelConfig


@dataclass(frozen=True)
class Chunk:
    """A model chunk: one virtual stage of one pipeline stage. first: holds the embedding; last: the output layer."""

    dense: int
    moe: int
    first: bool
    last: bool

    @property
    def layers(self) -> int:
        return self.dense + self.moe


@dataclass(frozen=True)
class Stage:
    index: int
    chunks: tuple[Chunk, ...]

    @property
    def layers(self) -> int:
        return sum(chunk.layers for chunk in self.chunks)

    @property
    def moe(self) -> int:
        return sum(chunk.moe for chunk in self.chunks)


def stages(model: ModelConfig, parallel: ParallelConfig) -> tuple[Stage, ...]:
    """Every pipeline stage, in order."""
    routes, found = set(model.moe_layers), []
    spans = parallel.stage_layers(model.layers)
    for index, chunks in enumerate(spans):
        made = []
        for number, span in enumerate(chunks):
            moe = sum(i in routes for i in span)
            first, last = index == number == 0, index == len(spans) - 1 and number == len(chunks) - 1
            made.append(Chunk(len(span) - moe, moe, first, last))
        found.append(Stage(index, tuple(made)))
    return tuple(found)


def different(stages: tuple[Stage, ...]) -> list[Stage]:
    """Of stages with the same contents the first, which has the most microbatches in flight."""
    found: dict[tuple[Chunk, ...], Stage] = {}
    for stage in stages:
        found.setdefault(stage.chunks, stage)
    return list(found.values())


def in_flight(stage: Stage, parallel: ParallelConfig, microbatches: int) -> int:
    """Chunk passes whose activations a stage holds at once, under 1F1B and its interleaved form (Megatron's schedules)."""
    after, virtual = parallel.pipeline - stage.index - 1, parallel.virtual_pipeline
    warmup = after if virtual == 1 else 2 * after + (virtual - 1) * parallel.pipeline
    return min(warmup + 1, microbatches * virtual)
