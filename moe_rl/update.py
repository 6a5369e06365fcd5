"""The update of the policy from a scored rollout batch: old log-probabilities, then one optimizer step a minibatch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.model import Loss, MoEModel, Scores
from models.optimizer import Optimizer
from models.routing import RouteLog
from moe_rl.algorithms import ALGORITHMS, Denominators, KLTerm, LossInputs, clip_range
from moe_rl.batching import split_minibatches
from moe_rl.config import AlgorithmSection
from moe_rl.drift.metrics import DriftSums
from moe_rl.metrics import Metrics
from moe_rl.microbatches import Microbatch, Scored, cut
from moe_rl.reference import Reference
from moe_rl.types import Rollout


@dataclass
class Prepared:
    """A microbatch with what its loss needs beside the live log-probabilities. T its response tokens, B its sequences."""

    microbatch: Microbatch
    advantages: Tensor  # [B]
    sequence: Tensor  # [T], which of the B
    rollout_logprobs: Tensor  # [T]
    old_logprobs: Tensor | None = None  # [T], on the last stage
    ref_logprobs: Tensor | None = None
    old_routes: RouteLog | None = None


@dataclass
class Minibatch:
    """What one optimizer step sees of this rank's share. tokens: that enter the model, on all data-parallel ranks."""

    parts: list[Prepared]
    denominators: Denominators
    tokens: int

    @property
    def streams(self) -> list[Any]:
        return [part.microbatch.stream for part in self.parts]


@dataclass
class Updated:
    """One optimizer step. metrics: of this rank's last-stage share, None on other stages. drift: of its tokens and layers."""

    metrics: Metrics | None
    drift: DriftSums | None
    grad_norm: float


class PolicyUpdate:
    """Turns rollouts into minibatches and minibatches into optimizer steps. Every method is collective."""

    def __init__(self, model: MoEModel, algorithm: AlgorithmSection, temperature: float, measure_drift: bool) -> None:
        self.model, self.algorithm, self.temperature = model, algorithm, temperature
        self.measure_drift = measure_drift
        self.loss, self.clip = ALGORITHMS[algorithm.name].loss, clip_range(algorithm)

    def prepare(self, rollouts: Sequence[Rollout], advantages: Tensor, seed: int, step: int) -> list[Minibatch]:
        """Cuts the batch into minibatches and microbatches; their shape is the same for every pass of the step."""
        sequences = [Scored(r.prompt_ids, r.response.token_ids) for r in rollouts]
        minibatches = []
        for places in split_minibatches(len(rollouts), self.algorithm.minibatches, seed, step):
            microbatches = cut(self.model, sequences, places, self.algorithm.microbatch_tokens, self.temperature)
            minibatches.append(
                Minibatch(
                    [self._prepare(m, rollouts, advantages) for m in microbatches],
                    Denominators(len(places), sum(len(sequences[i].response_ids) for i in places)),
                    sum(sequences[i].entering for i in places),
                )
            )
        return minibatches

    def _prepare(self, microbatch: Microbatch, rollouts: Sequence[Rollout], advantages: Tensor) -> Prepared:
        device, members = self.model.device, [rollouts[i].response for i in microbatch.members]
        lengths = torch.tensor([len(response.token_ids) for response in members], dtype=torch.int64)
        return Prepared(
            microbatch,
            advantages=advantages[microbatch.members].to(device),
            sequence=torch.arange(len(members)).repeat_interleave(lengths).to(device),
            rollout_logprobs=torch.tensor([p for r in members for p in r.logprobs], dtype=torch.float32, device=device),
        )

    def score_old(self, minibatches: Sequence[Minibatch]) -> None:
        """Log-probabilities and routes under the weights that sampled: the baseline of ratios and of drift."""
        for part, scores in self._score(minibatches):
            part.old_routes = part.microbatch.stream.routes
            if scores is not None:
                part.old_logprobs = scores.logprobs

    def score_reference(self, minibatches: Sequence[Minibatch], reference: Reference) -> None:
        with reference.in_place():
            for part, scores in self._score(minibatches):
                if scores is not None:
                    part.ref_logprobs = scores.logprobs

    def _score(self, minibatches: Sequence[Minibatch]) -> list[tuple[Prepared, Scores | None]]:
        parts = [part for minibatch in minibatches for part in minibatch.parts]
        scores = self.model.score([part.microbatch.stream for part in parts])
        return list(zip(parts, scores or [None] * len(parts), strict=True))

    def step(self, minibatch: Minibatch, optimizer: Optimizer, kl: KLTerm | None) -> Updated:
        """Forward, backward, optimizer step on one minibatch."""
        optimizer.zero_grad()
        losses = [self._loss(part, minibatch.denominators, kl) for part in minibatch.parts]
        results = self.model.accumulate_gradients(minibatch.streams, losses, minibatch.tokens)
        metrics = None
        if results:
            metrics = Metrics()
            for result in results:
                metrics.merge(result)
        drift = self._drift(minibatch) if self.measure_drift else None
        return Updated(metrics, drift, optimizer.step())

    def _loss(self, part: Prepared, denominators: Denominators, kl: KLTerm | None) -> Loss:
        def loss(scores: Scores) -> tuple[Tensor, Metrics]:
            assert part.old_logprobs is not None
            inputs = LossInputs(
                train_logprobs=scores.logprobs,
                old_logprobs=part.old_logprobs,
                advantages=part.advantages,
                sequence=part.sequence,
                mask=torch.ones_like(part.sequence, dtype=torch.bool),
                ref_logprobs=part.ref_logprobs,
                rollout_logprobs=part.rollout_logprobs,
                entropy=scores.entropy.detach(),
            )
            return self.loss(inputs, self.clip, denominators, kl)

        return loss

    def _drift(self, minibatch: Minibatch) -> DriftSums:
        """Old against new routes at the positions that predict a response token, one to one with its log-ratio."""
        model, tensor = self.model, self.model.groups.tensor
        layers, experts = model.config.moe_layers, model.config.experts
        total = DriftSums.zeros(len(layers), experts, model.device)
        if not model.moe_layers:
            return total
        places = [layers.index(layer) for layer in model.moe_layers]
        for part in minibatch.parts:
            stream, old = part.microbatch.stream, part.old_routes
            assert old is not None and stream.routes is not None
            mask = torch.zeros(stream.size, dtype=torch.bool, device=model.device)
            mask[stream.score_at] = True
            here = mask.chunk(tensor.size)[tensor.rank]
            measured = DriftSums.measure(old.stacked(model.moe_layers), stream.routes.stacked(model.moe_layers), here, experts)
            total = total + measured.placed(places, len(layers))
        return total
