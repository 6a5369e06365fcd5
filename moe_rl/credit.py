"""Credit assignment: from a batch's rewards to the advantage of every token. Collective: groups and moments span all ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rl.advantages import group_advantages, group_batch_advantages, group_metrics, leave_one_out_advantages
from moe_rl.algorithms.config import AlgorithmSection, CriticSection
from moe_rl.algorithms.kl import ESTIMATORS
from moe_rl.algorithms.table import SEQUENCE_ESTIMATORS
from moe_rl.config import RunConfig
from moe_rl.metrics import Metrics
from moe_rl.microbatches import Minibatch, Prepared
from moe_rl.shaping import shaped_rewards
from moe_rl.token_advantages import Moments, gae, moments, normalised, returns_to_go, token_rewards
from moe_rl.types import Rollout
from parallel.groups import Groups


class Credit:
    """How a run turns rewards into advantages."""

    def __init__(self, config: RunConfig, groups: Groups) -> None:
        self.algorithm: AlgorithmSection = config.algorithm
        self.critic: CriticSection = config.critic
        self.shaping, self.overlong_buffer = config.shaping, config.overlong_buffer
        self.rollout, self.groups = config.rollout, groups

    def assign(self, minibatches: Sequence[Minibatch], rollouts: Sequence[Rollout], kl_coefficient: float) -> dict[str, float]:
        """Sets every part's advantages (and the returns of a critic), after the passes that score. kl_coefficient: of a
        penalty in the reward, where the algorithm has one there."""
        parts = [part for minibatch in minibatches for part in minibatch.parts]
        rewards, metrics = self.shape(rollouts)
        group = torch.arange(len(rollouts)) // self.rollout.responses
        metrics.merge(group_metrics(rewards, group))
        penalties = self._penalties(parts, kl_coefficient)
        of_sequence = torch.zeros_like(rewards)
        if penalties is not None:
            of_sequence = self._of_sequences(parts, penalties, len(rollouts))
            metrics.add("reward/kl_penalty_mean", of_sequence.sum(), len(rollouts))
        if self.algorithm.estimator in SEQUENCE_ESTIMATORS:
            advantages = self._of_responses(rewards - of_sequence, group)
            for part in parts:
                part.advantages = advantages[part.microbatch.members].to(part.sequence.device)[part.sequence]
        else:
            self._of_tokens(parts, rewards, penalties)
        return metrics.means()

    def shape(self, rollouts: Sequence[Rollout]) -> tuple[Tensor, Metrics]:
        """[B] shaped rewards, float32."""
        responses = [rollout.response for rollout in rollouts]
        return shaped_rewards(
            torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32),
            torch.tensor([len(response.token_ids) for response in responses]),
            [response.logprobs for response in responses],
            self.shaping,
            self.rollout.max_response_tokens,
            self.overlong_buffer,
        )

    def _of_responses(self, rewards: Tensor, group: Tensor) -> Tensor:
        if self.algorithm.estimator == "leave_one_out":
            return leave_one_out_advantages(rewards, group)
        if self.algorithm.estimator == "group_batch":
            return group_batch_advantages(rewards, group, self.algorithm.advantage_epsilon)
        return group_advantages(rewards, group, self.algorithm.divides_by_std, self.algorithm.advantage_epsilon)

    def _penalties(self, parts: Sequence[Prepared], coefficient: float) -> list[Tensor] | None:
        """coefficient x KL(old || reference) of each response token, by part; None where the reward has none. Zeros where the
        log-probabilities are on another stage."""
        if not (self.algorithm.kl_in_reward and self.algorithm.kl_coefficient):
            return None
        estimator, found = ESTIMATORS[self.algorithm.estimates_kl], []
        for part in parts:
            if part.old_logprobs is None:
                found.append(torch.zeros_like(part.rollout_logprobs))
                continue
            assert part.ref_logprobs is not None
            found.append(coefficient * estimator(part.old_logprobs - part.ref_logprobs))
        return found

    def _of_sequences(self, parts: Sequence[Prepared], values: Sequence[Tensor], count: int) -> Tensor:
        """[B] sums over each sequence's tokens, on every rank."""
        total = torch.zeros(count, dtype=torch.float64, device=parts[0].sequence.device)
        if self._speaks():
            for part, of_part in zip(parts, values, strict=True):
                places = torch.tensor(part.microbatch.members, dtype=torch.int64, device=total.device)
                total.index_add_(0, places[part.sequence], of_part.double())
        dist.all_reduce(total)
        return total.float().cpu()

    def _of_tokens(self, parts: Sequence[Prepared], rewards: Tensor, penalties: list[Tensor] | None) -> None:
        """batch, gae: on the last stage, which alone has what it takes; normalised over the tokens of all ranks."""
        sums = torch.zeros(3, dtype=torch.float64, device=parts[0].sequence.device)
        for i, part in enumerate(parts):
            if part.old_logprobs is None:
                continue
            own = rewards[part.microbatch.members].to(part.sequence.device)
            penalty = torch.zeros_like(part.rollout_logprobs) if penalties is None else penalties[i]
            at_tokens = token_rewards(own, penalty, part.sequence)
            if self.algorithm.trains_critic:
                assert part.old_values is not None
                found, returns = gae(at_tokens, part.old_values, part.sequence, self.critic.gamma, self.critic.gae_lambda)
                part.returns = returns.float()
            else:
                found = returns_to_go(at_tokens, part.sequence)
            part.advantages = found
            if self._speaks():
                sums += moments(found)
        dist.all_reduce(sums)
        whole = Moments(*sums.tolist())
        for part in parts:
            part.advantages = normalised(part.advantages, whole, self.algorithm.advantage_epsilon).float()

    def _speaks(self) -> bool:
        """Whether this rank counts what all tensor ranks of the last stage know."""
        return self.groups.is_last_stage and self.groups.tensor.rank == 0
