"""The rollout of one step: every group that comes, or dynamic sampling."""

from collections.abc import Callable, Sequence

from moe_rl.rollouts.collect import Batch, collect
from moe_rl.rollouts.dynamic import Sampled, sample_groups
from moe_rl.session import Session
from moe_rl.stopwatch import Stopwatch
from moe_rl.types import Problem


def sample_step(
    session: Session, take: Callable[[int, int], Sequence[Problem]], step: int, watch: Stopwatch, *, routes: bool
) -> Sampled:
    """rollout.prompts x rollout.responses responses, scored (collective). take(i, n): n problems from the step's i-th on."""
    section, algorithm = session.config.rollout, session.config.algorithm
    sampling = session.sampling(section.temperature)

    def sample(problems: Sequence[Problem], first: int) -> Batch:
        return collect(session, problems, section.responses, sampling, "train", step, watch, routes=routes, first=first)

    if algorithm.samples_dynamically:
        return sample_groups(take, sample, section.prompts, section.responses, algorithm.sampling_rounds)
    batch = sample(take(0, section.prompts), 0)
    return Sampled(batch, batch, section.prompts, {})
