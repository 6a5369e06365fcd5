"""Builds the process groups and answers where this rank stands in them. The only caller of megatron.core.parallel_state."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallel.config import ParallelConfig
from parallel.cpu import let_megatron_run_without_cuda


@dataclass(frozen=True)
class Axis:
    """One way of splitting: this rank's place in it, its size, and the group of the ranks that differ only in it."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class Groups:
    """The groups of one rank. `model` spans tensor and pipeline: the ranks that together run one stream of tokens."""

    parallel: ParallelConfig
    tensor: Axis
    pipeline: Axis
    data: Axis
    expert: Axis
    model: Axis
    dispatch: Axis  # ranks that exchange tokens in a MoE layer: expert x expert_tensor
    collection: Any  # megatron's ProcessGroupCollection

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def is_model_main(self) -> bool:
        """One rank of each model copy: it scores and reports for the copy."""
        return self.model.rank == 0

    @property
    def last_stage_main(self) -> int:
        """Global rank of the last stage's first tensor rank: where a model copy's log-probabilities are."""
        return dist.get_global_rank(self.model.group, self.model.size - self.tensor.size)

    @property
    def previous_stage(self) -> int:
        return dist.get_global_rank(self.pipeline.group, (self.pipeline.rank - 1) % self.pipeline.size)

    @property
    def next_stage(self) -> int:
        return dist.get_global_rank(self.pipeline.group, (self.pipeline.rank + 1) % self.pipeline.size)

    def is_first_chunk(self, chunk: int) -> bool:
        """Whether virtual stage `chunk` of this rank holds the embedding."""
        return self.is_first_stage and chunk == 0

    def is_last_chunk(self, chunk: int) -> bool:
        """Whether virtual stage `chunk` of this rank holds the output layer."""
        return self.is_last_stage and chunk == self.parallel.virtual_pipeline - 1


@contextlib.contextmanager
def process_groups(parallel: ParallelConfig) -> Iterator[Groups]:
    """The groups over the whole world, while the block runs (collective). Raises UsageError when they do not tile it."""
    let_megatron_run_without_cuda()
    from megatron.core import parallel_state as state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel.check_world(dist.get_world_size())
    others = set(_known())
    state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=max(1, round(parallel.timeout_seconds / 60)),
        create_gloo_process_groups=torch.cuda.is_available(),
    )
    model_parallel_cuda_manual_seed(torch.initial_seed() % 2**31, force_reset_rng=True)
    groups = Groups(
        parallel=parallel,
        tensor=_axis(state.get_tensor_model_parallel_group()),
        pipeline=_axis(state.get_pipeline_model_parallel_group()),
        data=_axis(state.get_data_parallel_group()),
        expert=_axis(state.get_expert_model_parallel_group()),
        model=_axis(state.get_model_parallel_group()),
        dispatch=_axis(state.get_expert_tensor_and_model_parallel_group()),
        collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    try:
        yield groups
    finally:
        state.destroy_model_parallel()
    # not after an error: connections stay until it is on record
    for group in [group for group in _known() if group not in others]:  # in the same order on all ranks
        dist.destroy_process_group(group)
    gc.collect()  # a model is full of cycles, and as long as it lives its groups keep connections and threads


def _known() -> list[dist.ProcessGroup]:
    """The groups that this rank is in, as torch keeps them until they are destroyed."""
    return list(dist.distributed_c10d._world.pg_map)


def _axis(group: Any) -> Axis:
    return Axis(group, dist.get_rank(group), dist.get_world_size(group))
