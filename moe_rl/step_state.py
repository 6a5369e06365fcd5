"""A step that has begun: what its remaining updates need, on this rank. It can be saved between two updates and go on."""

from dataclasses import dataclass, field

from moe_rl.critic import Pending
from moe_rl.drift.instruments import Look
from moe_rl.drift.tokens import TokenTable
from moe_rl.microbatches import Minibatch
from moe_rl.rollouts.dynamic import Sampled
from moe_rl.stopwatch import Stopwatch
from moe_rl.update import Updated


@dataclass
class StepState:
    """done: updates made so far, of minibatches x epochs. metrics: found before the first; found: between them. lr: of the
    first."""

    step: int
    look: Look
    watch: Stopwatch
    sampled: Sampled
    minibatches: list[Minibatch]
    metrics: dict[str, float]
    lr: float
    done: int = 0
    updates: list[Updated] = field(default_factory=list)
    found: dict[str, float] = field(default_factory=dict)
    tables: list[TokenTable] = field(default_factory=list)  # the instruments', of a traced step
    critic: Pending | None = None
