"""What a run's settings ask of each data-parallel rank in one step."""

from dataclasses import dataclass

from moe_rl.config import RunConfig
from parallel.config import ParallelConfig


@dataclass(frozen=True)
class Workload:
    """Of one data-parallel rank. Every sequence is taken as long as it may be.

    longest: tokens of prompt and response. rows: sequences that generate at once; batches: how often. microbatch: tokens;
    microbatches: of one update. updates: of one step; sequences: of one update.
    """

    prompt: int
    response: int
    rows: int
    batches: int
    microbatch: int
    microbatches: int
    updates: int
    sequences: int

    @property
    def longest(self) -> int:
        return self.prompt + self.response

    @property
    def update_tokens(self) -> int:
        return self.sequences * self.longest


def workload(config: RunConfig, parallel: ParallelConfig, world: int, prompt_tokens: int) -> Workload:
    """prompt_tokens: the longest prompt; no more than model.max_positions leaves beside the response."""
    rollout, algorithm, data = config.rollout, config.algorithm, parallel.data(world)
    prompt = max(1, min(prompt_tokens, config.model.max_positions - rollout.max_response_tokens))
    longest = prompt + rollout.max_response_tokens
    mine = -(-rollout.batch // data)
    rows = min(rollout.max_batch, mine)
    sequences = -(-rollout.batch // algorithm.minibatches // data) or 1
    together = max(1, algorithm.microbatch_tokens // longest)
    count = -(-sequences // together)
    if parallel.virtual_pipeline > 1:  # an interleaved schedule takes multiples of its stages
        count = -(-count // parallel.pipeline) * parallel.pipeline
    tokens = -(-min(together, sequences) * longest // parallel.tensor) * parallel.tensor
    return Workload(
        prompt=prompt,
        response=rollout.max_response_tokens,
        rows=rows,
        batches=-(-mine // rows),
        microbatch=tokens,
        microbatches=count,
        updates=algorithm.minibatches * algorithm.epochs,
        sequences=sequences,
    )
