"""What stays in memory throughout: weights, gradients, optimizer state. As Megatron's DDP and distributed optimizer keep them.

Each chunk has two buffers, one of the experts' weights and one of all others, each with a data-parallel group of its own. A
tensor starts at a multiple of 64 elements; a buffer ends at a multiple of 128 and of its group's size
(megatron/core/optimizer/param_layout.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from models import parameters
from models.config import ModelConfig
from models.parameters import Split, Weight
from moe_rl.plan.stages import Chunk, Stage
from parallel.config import ParallelConfig

SIZES = {"float32": 4, "bfloat16": 2}
GRADIENT = 4  # grad_reduce_in_fp32


@dataclass(frozen=True)
class States:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int

    def __add__(self, other: "States") -> "States":
        return States(self.weights + other.weights, self.gradients + other.gradients, self.optimizer + other.optimizer)

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def optimizer_bytes(dtype: str) -> int:
    """An element: two moments, and a float32 copy of weights that are not float32 themselves."""
    return 8 if dtype == "float32" else 12


def groups(parallel: ParallelConfig, world: int) -> tuple[int, int]:
    """Sizes of the data-parallel groups of a dense weight and of an expert's."""
    return world // (parallel.tensor * parallel.context * parallel.pipeline), world // (
        parallel.expert * parallel.expert_tensor * parallel.pipeline
    )


class StateMemory:
    """Of one model, in any layout. down_projections: see models.parameters.Split. values: it is a value model."""

    def __init__(self, model: ModelConfig, *, down_projections: bool, values: bool = False) -> None:
        self.model, self.down_projections, self.values = model, down_projections, values
        self._weights: dict[tuple[Split, Chunk], tuple[Weight, ...]] = {}
        self._states: dict[tuple[Split, Chunk, tuple[int, int]], States] = {}

    def of(self, parallel: ParallelConfig, stage: Stage, world: int) -> States:
        """On the rank of the stage with the largest share of the optimizer state."""
        total, split, sizes = States(0, 0, 0), self.split(parallel), groups(parallel, world)
        for chunk in stage.chunks:
            total += self._of_chunk(split, chunk, sizes)
        return total

    def split(self, parallel: ParallelConfig) -> Split:
        return Split.of(parallel, self.down_projections)

    def weights(self, split: Split, chunk: Chunk) -> tuple[Weight, ...]:
        """Every tensor of a chunk on one rank."""
        key = (split, chunk)
        if key not in self._weights:
            found: list[Weight] = []
            for is_moe, count in ((False, chunk.dense), (True, chunk.moe)):
                layer = parameters.layer(self.model, is_moe, split) if count else []
                found += [Weight(w.group, w.elements, w.count * count) for w in layer]
            if chunk.first:
                found += parameters.embedding(self.model, split)
            if chunk.last:
                found += parameters.head(self.model, split, embeds=chunk.first, values=self.values)
            self._weights[key] = tuple(found)
        return self._weights[key]

    def _of_chunk(self, split: Split, chunk: Chunk, sizes: tuple[int, int]) -> States:
        key = (split, chunk, sizes)
        if key not in self._states:
            weights, dtype, total = self.weights(split, chunk), self.model.dtype, States(0, 0, 0)
            for is_expert, size in zip((False, True), sizes, strict=True):
                elements = buffer_elements([w for w in weights if w.is_expert == is_expert], size)
                total += States(elements * SIZES[dtype], elements * GRADIENT, elements // size * optimizer_bytes(dtype))
            self._states[key] = total
        return self._states[key]


def buffer_elements(weights: Sequence[Weight], group: int) -> int:
    """Elements of a buffer over these tensors, padding included."""
    end = math.lcm(group, 128)
    return -(-sum(-(-w.elements // 64) * 64 * w.count for w in weights) // end) * end
