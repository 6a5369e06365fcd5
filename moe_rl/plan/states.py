"""What stays in memory throughout: weights, gradients, optimizer state. As Megatron's DDP and distributed optimizer keep them.

Each chunk has two buffers, one of the experts' weights and one of all others, each with a data-parallel group of its own. A
tensor starts at a multiple of 64 elements; a buffer ends at a multiple of 128 and of its group's size
(megatron/core/optimizer/param_layout.py).
"""

import math
from collections.abc import Iterable
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
        self._layers: dict[tuple[Split, bool], tuple[int, int]] = {}
        self._states: dict[tuple[Split, Chunk, tuple[int, int]], States] = {}

    def of(self, parallel: ParallelConfig, stage: Stage, world: int) -> States:
        """On the rank of the stage with the largest share of the optimizer state."""
        total, sizes = States(0, 0, 0), groups(parallel, world)
        split = Split.of(parallel, self.down_projections)
        for chunk in stage.chunks:
            key = (split, chunk, sizes)
            if key not in self._states:
                self._states[key] = self._of_chunk(split, chunk, sizes)
            total += self._states[key]
        return total

    def _of_chunk(self, split: Split, chunk: Chunk, sizes: tuple[int, int]) -> States:
        size, total = SIZES[self.model.dtype], States(0, 0, 0)
        for elements, group in zip(self._elements(split, chunk), sizes, strict=True):
            end = math.lcm(group, 128)
            buffer = -(-elements // end) * end
            total += States(buffer * size, buffer * GRADIENT, buffer // group * optimizer_bytes(self.model.dtype))
        return total

    def _elements(self, split: Split, chunk: Chunk) -> tuple[int, int]:
        """Of a chunk's two buffers, where the last tensor ends."""
        ends: list[Weight] = parameters.embedding(self.model, split) if chunk.first else []
        if chunk.last:
            ends = ends + parameters.head(self.model, split, embeds=chunk.first, values=self.values)
        dense, experts = padded(ends)
        for is_moe, count in ((False, chunk.dense), (True, chunk.moe)):
            if count:
                key = (split, is_moe)
                if key not in self._layers:
                    self._layers[key] = padded(parameters.layer(self.model, is_moe, split))
                dense, experts = dense + count * self._layers[key][0], experts + count * self._layers[key][1]
        return dense, experts


def padded(weights: Iterable[Weight]) -> tuple[int, int]:
    """Elements of these tensors, each up to where the next may start: (of all but experts, of experts)."""
    sums = [0, 0]
    for weight in weights:
        sums[weight.is_expert] += -(-weight.elements // 64) * 64 * weight.count
    return sums[0], sums[1]
