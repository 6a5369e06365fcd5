"""PPO's value model on the policy's ranks: what it says of every token, and its own updates."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.model import MoEModel
from models.value import ValueLoss, ValueModel
from moe_rl import checkpoint
from moe_rl.algorithms.config import CriticSection
from moe_rl.algorithms.value import HELPERS, explained_variance, value_loss
from moe_rl.checkpoint import CriticState
from moe_rl.collectives import reduce_metrics
from moe_rl.metrics import Metrics
from moe_rl.microbatches import Minibatch, Prepared


@dataclass
class Pending:
    """What its updates found since it was last asked, on this rank."""

    metrics: Metrics | None = None
    norms: list[float] = field(default_factory=list)


class Critic:
    """A value model of the policy's shape, with its own optimizer. Every method is collective. Its passes replay no routes."""

    def __init__(self, policy: MoEModel, section: CriticSection, seed: int, updates: int, *, fresh: bool = True) -> None:
        """It starts from the policy's present weights with a head of zeros, or from critic.load; where it is not fresh, a
        checkpoint will say. updates: of the whole run."""
        self.section = section
        model = ValueModel(policy.config, policy.groups, policy.device, seed)
        if fresh and section.load is None:
            model.copy_trunk(policy)
        elif fresh and section.load is not None:
            checkpoint.load_critic_weights(section.load, model, "critic.load")
        self.state = CriticState(model, model.optimizer(section.optimizer, updates))
        self.pending = Pending()

    def score(self, minibatches: Sequence[Minibatch]) -> None:
        """Values of the state before each response token, before the step's updates."""
        parts = [part for minibatch in minibatches for part in minibatch.parts]
        for part, values in zip(parts, self.state.model.values([p.microbatch.stream for p in parts]), strict=False):
            part.old_values = values

    def step(self, minibatch: Minibatch) -> None:
        """One optimizer step on what the minibatch returned."""
        model, optimizer = self.state
        optimizer.zero_grad()
        losses = [self._loss(part, minibatch) for part in minibatch.parts]
        for found in model.accumulate_gradients(minibatch.streams, losses, minibatch.tokens):
            self.pending.metrics = self.pending.metrics or Metrics()
            self.pending.metrics.merge(found)
        self.pending.norms.append(optimizer.step())

    def _loss(self, part: Prepared, minibatch: Minibatch) -> ValueLoss:
        def loss(values: Tensor) -> tuple[Tensor, Metrics]:
            assert part.old_values is not None and part.returns is not None
            mask = torch.ones_like(part.sequence, dtype=torch.bool)
            return value_loss(values, part.old_values, part.returns, mask, self.section.clip, minibatch.denominators.tokens)

        return loss

    def metrics(self) -> dict[str, float]:
        """Of the updates since this was asked last (collective)."""
        pending, self.pending = self.pending, Pending()
        found, norms = reduce_metrics(pending.metrics, self.state.model.groups), pending.norms
        found |= explained_variance(found)
        found = {key: value for key, value in found.items() if key not in HELPERS}
        return found | {"critic/grad_norm": sum(norms) / len(norms), "critic/lr": self.state.optimizer.lr}
