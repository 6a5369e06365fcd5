"""The update of the policy from a scored rollout batch: old log-probabilities, then one optimizer step a minibatch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from models.model import Loss, MoEModel, Scores
from models.optimizer import Optimizer
from models.routing import Replay
from moe_rl.algorithms.base import Denominators, LossInputs
from moe_rl.algorithms.config import AlgorithmSection
from moe_rl.algorithms.diagnostics import derived_ratio_metrics
from moe_rl.algorithms.loss import KLTerm, LossSettings, policy_loss
from moe_rl.alignment import check_alignment, neighbour_gaps
from moe_rl.collectives import reduce_drift, reduce_metrics
from moe_rl.config import DriftSection, ReplaySection, RolloutSection
from moe_rl.corrections import correction_weights
from moe_rl.drift.observe import Compared, RouteObserver
from moe_rl.drift.sums import DriftSums, to_metrics
from moe_rl.metrics import Metrics
from moe_rl.microbatches import Minibatch, Prepared
from moe_rl.preparation import lay_out, prepare
from moe_rl.reference import Reference
from moe_rl.replay import ReplayPolicy, Routes, check_engine_records, count_replayed, replay_metrics, spread_filler
from moe_rl.router_shift import measure_router_shift, note_router_shift
from moe_rl.types import Rollout
from parallel.groups import Groups


@dataclass
class Updated:
    """One optimizer step. metrics: of this rank's last-stage share, None on other stages. drift: by view, of its tokens and
    layers; "" is the view of response tokens and the routes used."""

    metrics: Metrics | None
    drift: dict[str, DriftSums]
    grad_norm: float
    replayed: Tensor | None = None  # [4, L] counts (see moe_rl.replay), zeros for layers that are not here


class PolicyUpdate:
    """Turns rollouts into minibatches and minibatches into optimizer steps. Every method is collective."""

    def __init__(
        self,
        model: MoEModel,
        algorithm: AlgorithmSection,
        rollout: RolloutSection,
        drift: DriftSection,
        replay: ReplaySection,
    ) -> None:
        self.model, self.algorithm, self.temperature = model, algorithm, rollout.temperature
        self.drift, self.replay = drift, ReplayPolicy(replay)
        share = 1.0 if algorithm.router_shift else drift.scores_share if drift.enabled else 0.0
        self.observer = RouteObserver(model, share)
        self.settings = LossSettings.of(algorithm, rollout.max_response_tokens)

    def prepare(self, rollouts: Sequence[Rollout], seed: int, step: int, routes: Routes | None = None) -> list[Minibatch]:
        """The batch as minibatches and microbatches, advantages still 0; their shape is the same for every pass of the step.

        routes: what the engine recorded of the rollouts sampled here. Raises ValueError where replay needs one that is
        missing or no valid choice.
        """
        minibatches = prepare(self.model, rollouts, self.algorithm, self.temperature, seed, step)
        parts = [part for minibatch in minibatches for part in minibatch.parts]
        for part in parts:
            self.observer.mark(part.microbatch.stream, step)
        if routes is not None:
            lay_out(self.model, parts, routes)
        elif self.replay.replays_rollout:
            raise ValueError("replay.mode=r3: the rollout engine recorded no routes")
        return minibatches

    def score_old(self, minibatches: Sequence[Minibatch]) -> None:
        """Log-probabilities and routes under the weights that sampled: the baseline of ratios and of drift.

        Raises ValueError where the engine's log-probabilities are shifted by a token, or its routes are none.
        """
        parts = [part for minibatch in minibatches for part in minibatch.parts]
        replay = None
        if self.replay.replays_rollout:
            replay = [self._forced(i, part, part.rollout_routes) for i, part in enumerate(parts)]
        for i, (part, scores) in enumerate(self._score(parts, replay)):
            # else nobody looks, and a fused router shows nothing
            if self.drift.enabled or self.replay.replays_old or self.algorithm.router_shift:
                part.old = self.observer.record(part.microbatch.stream)
            if self.replay.replays_old:
                assert part.old is not None
                stream, experts = part.microbatch.stream, self.model.config.experts
                part.replay = self._forced(i, part, spread_filler(stream, part.old.choice, experts))
            elif replay is not None:
                part.replay = replay[i]
            if scores is not None:
                part.old_logprobs = scores.logprobs
        if self.model.config.topk == 1:
            known = [
                (part.rollout_routes[: part.microbatch.stream.real_here], part.old.live[: part.microbatch.stream.real_here])
                for part in parts
                if part.rollout_routes is not None and part.old is not None
            ]
            check_engine_records(known)
        self._check_alignment(parts)

    def _check_alignment(self, parts: Sequence[Prepared]) -> None:
        sums = torch.zeros(5, dtype=torch.float64, device=self.model.device)
        for part in parts:
            if part.old_logprobs is not None and self.model.groups.tensor.rank == 0:
                sums += neighbour_gaps(part.old_logprobs, part.rollout_logprobs, part.sequence)
        dist.all_reduce(sums)  # over all ranks, so that none goes on alone
        check_alignment(sums)

    def _forced(self, number: int, part: Prepared, routes: Tensor | None) -> Replay:
        assert routes is not None
        stream, experts = part.microbatch.stream, self.model.config.experts
        return self.replay.of_stream(stream, routes, self.model.moe_layers, experts, number)

    def score_reference(self, minibatches: Sequence[Minibatch], reference: Reference) -> None:
        parts = [part for minibatch in minibatches for part in minibatch.parts]
        with reference.in_place():
            for part, scores in self._score(parts):
                if scores is not None:
                    part.ref_logprobs = scores.logprobs

    def _score(self, parts: Sequence[Prepared], replay: Sequence[Replay] | None = None) -> list[tuple[Prepared, Scores | None]]:
        scores = self.model.score([part.microbatch.stream for part in parts], replay)
        return list(zip(parts, scores or [None] * len(parts), strict=True))

    def correct(self, minibatches: Sequence[Minibatch]) -> dict[str, float]:
        """Weights for what engine and trainer disagree by, and their metrics (collective)."""
        if self.algorithm.correction.mode == "off":
            return {}
        metrics = Metrics() if self.model.groups.is_last_stage else None
        for part in (part for minibatch in minibatches for part in minibatch.parts):
            if part.old_logprobs is None:
                continue
            mask, sequences = torch.ones_like(part.sequence, dtype=torch.bool), len(part.microbatch.members)
            part.weights, found = correction_weights(
                part.old_logprobs, part.rollout_logprobs, part.sequence, sequences, mask, self.algorithm.correction
            )
            assert metrics is not None
            metrics.merge(found)
        return reduce_metrics(metrics, self.model.groups)

    def step(self, minibatch: Minibatch, optimizer: Optimizer, kl: KLTerm | None, *, moved: bool = True) -> Updated:
        """Forward, backward, optimizer step on one minibatch. moved: whether the weights differ from those of the old pass."""
        replay = [part.replay for part in minibatch.parts if part.replay is not None] or None
        shifted, floor = self.algorithm.router_shift and moved, self.algorithm.router_shift_floor
        one_stage = self.model.groups.pipeline.size == 1
        if shifted and not one_stage:
            measure_router_shift(self.observer, minibatch.parts, replay, floor)
        optimizer.zero_grad()
        losses = [self._loss(part, minibatch.denominators, kl, shifted and one_stage) for part in minibatch.parts]
        results = self.model.accumulate_gradients(minibatch.streams, losses, minibatch.tokens, replay)
        metrics = None
        if results:
            metrics = Metrics()
            for result in results:
                metrics.merge(result)
        drift = self._drift(minibatch) if self.drift.enabled else {}
        return Updated(metrics, drift, optimizer.step(), self._replayed(minibatch) if replay else None)

    def _loss(self, part: Prepared, denominators: Denominators, kl: KLTerm | None, note_shift: bool) -> Loss:
        def loss(scores: Scores) -> tuple[Tensor, Metrics]:
            if note_shift:
                note_router_shift(self.observer, part, self.algorithm.router_shift_floor)
            part.train_logprobs = scores.logprobs.detach()
            entropy = scores.entropy if self.settings.entropy_coefficient else scores.entropy.detach()
            return policy_loss(_loss_inputs(part, scores.logprobs, entropy), self.settings, denominators, kl)

        return loss

    def gradient_cut(self, part: Prepared, denominators: Denominators) -> Tensor:
        """[T] tokens from which the objective took the gradient in the last update. On the last stage."""
        assert part.train_logprobs is not None
        leaf = part.train_logprobs.clone().requires_grad_()
        value, _ = policy_loss(_loss_inputs(part, leaf), replace(self.settings, entropy_coefficient=0.0), denominators)
        (gradient,) = torch.autograd.grad(value, leaf)
        return (gradient == 0) & (part.advantages != 0)

    def _replayed(self, minibatch: Minibatch) -> Tensor:
        counts = torch.stack([count_replayed(stream, self.model.moe_layers) for stream in minibatch.streams]).sum(0)
        whole = counts.new_zeros(len(counts), len(self.observer.layers))
        whole[:, self.observer.places] = counts
        return whole

    def _drift(self, minibatch: Minibatch) -> dict[str, DriftSums]:
        """Old against new routes, one to one with the log-ratios; under replay also what the routers themselves would do."""
        pairs = []
        for part in minibatch.parts:
            assert part.old is not None
            stream = part.microbatch.stream
            part.new = self.observer.record(stream)
            pairs.append(Compared(stream, part.old, part.new))
        views = ["", "prompt", *(["local"] if self.replay.source != "off" else [])]
        return {view: self.observer.compare(pairs, view or None) for view in views}


def _loss_inputs(part: Prepared, train_logprobs: Tensor, entropy: Tensor | None = None) -> LossInputs:
    assert part.old_logprobs is not None
    return LossInputs(
        train_logprobs=train_logprobs,
        old_logprobs=part.old_logprobs,
        advantages=part.advantages,
        sequence=part.sequence,
        sequences=len(part.microbatch.members),
        mask=torch.ones_like(part.sequence, dtype=torch.bool),
        weights=part.weights,
        log_router_shift=part.log_router_shift,
        ref_logprobs=part.ref_logprobs,
        rollout_logprobs=part.rollout_logprobs,
        entropy=entropy,
    )


def update_metrics(updates: Sequence[Updated], groups: Groups, layers: Sequence[int]) -> dict[str, float]:
    """Of all updates of a step (collective): sums reduced over ranks, then divided. Nothing where there was no update."""
    if not updates:
        return {}
    merged = None
    for update in updates:
        if update.metrics is not None:
            merged = merged or Metrics()
            merged.merge(update.metrics)
    norms = [update.grad_norm for update in updates]
    metrics = reduce_metrics(merged, groups)
    metrics |= derived_ratio_metrics(metrics)
    if not math.isfinite(metrics["loss/total"]):  # whose gradient may be 0, which the optimizer would take
        raise FloatingPointError(f"the loss is {metrics['loss/total']}: a log-probability, advantage or weight is not finite")
    metrics |= {"optimizer/grad_norm": sum(norms) / len(norms), "optimizer/grad_norm_max": max(norms)}
    if replayed := [update.replayed for update in updates if update.replayed is not None]:
        counts = torch.stack(replayed)
        dist.all_reduce(counts)
        metrics |= replay_metrics(list(counts), layers)
    for view in updates[0].drift:
        drift = reduce_drift([update.drift[view] for update in updates])
        metrics |= to_metrics(drift, layers, "update", view or None)
    return metrics
