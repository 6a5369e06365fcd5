"""One forward, or forward and backward, over microbatches: Megatron's schedules behind one call."""

from collections.abc import Callable, Iterable
from typing import Any

from parallel.groups import Groups

# (iterator over microbatches, model chunk) -> (output, function of the output that gives (loss, token count, collected))
ForwardStep = Callable[[Any, Any], tuple[Any, Callable[[Any], tuple[Any, Any, Any]]]]


def run_microbatches(
    chunks: list[Any], step: ForwardStep, microbatches: Iterable[Any], groups: Groups, *, longest: int, forward_only: bool
) -> list[Any]:
    """Runs `step` on every microbatch through all pipeline stages; collective over the model-parallel group.

    chunks: this rank's model chunks, one a virtual stage. longest: tokens of the longest microbatch.
    Returns what the loss function collected, in order of microbatches, on the last stage; an empty list elsewhere.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batches = list(microbatches)
    schedule = get_forward_backward_func(
        pp_size=groups.pipeline.size, vp_size=len(chunks) if groups.parallel.virtual_pipeline > 1 else None
    )
    iterators = [iter(batches) for _ in chunks]  # each chunk walks through the microbatches by itself
    return schedule(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(batches),
        seq_length=longest,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def round_up_microbatches(count: int, groups: Groups) -> int:
    """Microbatches that the schedule can run: an interleaved pipeline takes multiples of its stages."""
    multiple = groups.pipeline.size if groups.parallel.virtual_pipeline > 1 else 1
    return -(-max(count, 1) // multiple) * multiple
