"""How many ways a model is split, and whether that fits the processes and the model at hand."""

import math
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from parallel.errors import UsageError


class ParallelConfig(BaseModel):
    """Sizes of the parallel groups. Sequence parallelism is on whenever `tensor` > 1: MoE training needs it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt = Field(default=1, description="model chunks a pipeline stage")
    first_stage_layers: PositiveInt | None = Field(
        default=None, description="layers of the first pipeline stage, where they do not divide evenly; none: an equal share"
    )
    last_stage_layers: PositiveInt | None = Field(default=None, description="layers of the last pipeline stage, likewise")
    expert: PositiveInt = 1
    expert_tensor: PositiveInt = 1
    context: PositiveInt = Field(default=1, description="needs Transformer Engine's attention")
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    timeout_seconds: float = Field(
        default=3600.0,
        gt=0,
        description="a collective that takes longer ends the run; above run.hang_seconds, which says more",
    )

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"parallel.virtual_pipeline={self.virtual_pipeline}: needs parallel.pipeline > 1; "
                "raise parallel.pipeline or set parallel.virtual_pipeline=1"
            )
        for key in ("first_stage_layers", "last_stage_layers"):
            if getattr(self, key) and (self.pipeline == 1 or self.virtual_pipeline > 1):
                raise ValueError(
                    f"parallel.{key}={getattr(self, key)}: needs parallel.pipeline > 1 and parallel.virtual_pipeline=1"
                )
        return self

    def check_layers(self, layers: int) -> None:
        """Raises UsageError unless `layers` can be split over the pipeline."""
        uneven = {"first_stage_layers": self.first_stage_layers, "last_stage_layers": self.last_stage_layers}
        given = {key: value for key, value in uneven.items() if value is not None}
        rest, stages = layers - sum(given.values()), self.pipeline * self.virtual_pipeline - len(given)
        if not given and layers % stages:
            key = "parallel.pipeline" + " x parallel.virtual_pipeline" * (self.virtual_pipeline > 1)
            more = "" if self.virtual_pipeline > 1 else ", or set parallel.first_stage_layers and parallel.last_stage_layers"
            raise UsageError(f"{key}={stages}: must divide model.layers={layers}; choose a divisor of {layers}{more}")
        if given and (rest < 0 or (rest % stages if stages else rest) or (stages and not rest)):
            named = ", ".join(f"parallel.{key}={value}" for key, value in given.items())
            raise UsageError(
                f"{named}: leaves {rest} of model.layers={layers} for {stages} other stages; must leave each as many, and one"
            )

    def stage_layers(self, layers: int) -> list[list[range]]:
        """The 0-based layers of each [pipeline stage][virtual stage], as Megatron lays them out."""
        first, last = self.first_stage_layers, self.last_stage_layers
        even = self.pipeline * self.virtual_pipeline - (first is not None) - (last is not None)
        share = (layers - (first or 0) - (last or 0)) // even if even else 0
        counts = [share] * self.pipeline
        counts[0], counts[-1] = first or share, last or share
        chunks: list[list[range]] = [[] for _ in counts]
        start = 0
        for _ in range(self.virtual_pipeline):
            for stage, count in enumerate(counts):
                chunks[stage].append(range(start, start + count))
                start += count
        return chunks

    @property
    def model_parallel(self) -> int:
        """Processes that together hold one copy of the dense (not expert) weights."""
        return self.tensor * self.pipeline * self.context

    @property
    def fewest_processes(self) -> int:
        """The smallest world size in which every group exists."""
        return math.lcm(self.tensor * self.context, self.expert * self.expert_tensor) * self.pipeline

    def data(self, world_size: int) -> int:
        """Data-parallel size (of the dense weights) in a world of `world_size` processes."""
        return world_size // self.model_parallel

    def check_world(self, world_size: int) -> None:
        """Raises UsageError unless the groups tile `world_size` processes."""
        if world_size % self.fewest_processes:
            raise UsageError(
                f"run.processes={world_size}: must be a multiple of {self.fewest_processes}, what tensor={self.tensor} x "
                f"pipeline={self.pipeline} x context={self.context} with expert={self.expert} x "
                f"expert_tensor={self.expert_tensor} needs; set run.processes={self._nearest_world(world_size)}"
            )

    def check_backend(self, backend: str, transformer_engine: bool) -> None:
        """Raises UsageError for what the communication backend or the installed kernels cannot do."""
        if self.context > 1 and not transformer_engine:
            raise UsageError(
                f"parallel.context={self.context}: context parallelism needs Transformer Engine's attention, which is not "
                "installed here; set parallel.context=1 or install moe-rl[gpu] on a GPU machine"
            )
        if self.context > 1:
            raise UsageError(
                f"parallel.context={self.context}: the packed stream is not split over context ranks yet; set "
                "parallel.context=1 and use parallel.tensor, whose sequence parallelism splits activations too"
            )
        if self.expert_tensor > 1 and self.dispatcher == "alltoall" and backend == "gloo":
            raise UsageError(
                f"parallel.expert_tensor={self.expert_tensor}: with parallel.dispatcher=alltoall it needs an uneven "
                "all-gather, which gloo (CPU) lacks; set parallel.dispatcher=allgather"
            )

    def _nearest_world(self, world_size: int) -> int:
        return max(1, round(world_size / self.fewest_processes)) * self.fewest_processes
