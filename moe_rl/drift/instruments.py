"""The instruments of a run: which steps are looked at closely, and the passes that only they make."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from moe_rl.collectives import from_main, reduce_drift
from moe_rl.config import RunConfig
from moe_rl.drift import tokens, traces
from moe_rl.drift.attribution import attribution
from moe_rl.drift.metrics import flipped
from moe_rl.drift.observe import Compared, PassRecord
from moe_rl.drift.probe import ProbeSet
from moe_rl.drift.sums import DriftSums, to_metrics
from moe_rl.drift.tokens import TokenTable, gather_tables, routing_pieces, token_pieces, trace_columns
from moe_rl.microbatches import Minibatch, Prepared, Scored, pack_here
from moe_rl.replay import stream_routes
from moe_rl.types import Rollout
from moe_rl.update import PolicyUpdate


@dataclass(frozen=True)
class Look:
    """How closely one step is looked at."""

    step: int
    probe: bool = False
    trace: bool = False

    @property
    def close(self) -> bool:
        return self.probe or self.trace


@dataclass
class OtherPass:
    """What the pass that the update does not make said of the probed sequences: by sample, on this rank."""

    logprobs: dict[int, torch.Tensor] = field(default_factory=dict)
    live: dict[int, torch.Tensor] = field(default_factory=dict)


class Instruments:
    """Around the updates of a step. Every method is collective."""

    def __init__(self, update: PolicyUpdate, config: RunConfig) -> None:
        self.update, self.section, self.budget = update, config.drift, config.algorithm.microbatch_tokens
        self.model = update.model
        self.directory = config.directory
        self.probe = ProbeSet(update, self.section.probe_sequences, self.budget, self.directory)
        model = config.model
        self.mode = config.replay.mode
        self.header = traces.Header(
            config.run.name, config.algorithm.name, self.mode, model.moe_layers, model.experts, model.topk
        )
        self.tables: list[TokenTable] = []  # of the updates of a traced step, on the main rank

    @property
    def replays(self) -> bool:
        return self.update.replay.source != "off"

    def plan(self, step: int) -> Look:
        """The first step is always looked at, so that a short run has something to show."""
        if not self.section.enabled or not self.model.config.moe_layers:
            return Look(step)
        due = [every > 0 and (step == 1 or step % every == 0) for every in (self.section.probe_every, self.section.trace_every)]
        return Look(step, *due)

    def resume(self) -> None:
        """For a run that goes on after its first step: the probe set that it began with. Raises UsageError where it is gone."""
        if self.plan(1).probe:
            self.probe.resume()

    def probed(self, minibatch: Minibatch) -> list[int]:
        """The minibatch's sequences that attribution looks at: the same in every layout."""
        return minibatch.places[: self.section.probe_sequences]

    def traced(self, minibatch: Minibatch) -> list[int]:
        """Those that a trace file holds."""
        return minibatch.places[: self.section.trace_sequences]

    def sampled(self, minibatch: Minibatch, look: Look) -> set[int]:
        """Those that are looked at token by token, for either."""
        return {*(self.probed(minibatch) if look.probe else ()), *(self.traced(minibatch) if look.trace else ())}

    def mark(self, minibatches: Sequence[Minibatch], look: Look) -> None:
        """Before the first pass: the scores of sampled sequences are kept whole."""
        for minibatch in minibatches if look.close else ():
            full = frozenset(self.sampled(minibatch, look))
            for part in minibatch.parts:
                self.update.observer.mark(part.microbatch.stream, look.step, full)

    def before_updates(self, minibatches: Sequence[Minibatch], rollouts: Sequence[Rollout], look: Look) -> dict[str, float]:
        """After the old-log-probability pass."""
        if look.probe and look.step == 1:
            self.probe.begin(rollouts)
        return self.engine(minibatches) if look.probe else {}

    def after_updates(self, look: Look, policy_version: int) -> dict[str, float]:
        """policy_version: of the weights that sampled."""
        if self.tables:
            columns = [trace_columns(table, look.step, i, policy_version) for i, table in enumerate(self.tables)]
            whole = {name: np.concatenate([one[name] for one in columns]) for name in columns[0]}
            mode = self.mode if self.mode != "off" else self.update.replay.source  # an alarm may have switched it on
            traces.write(self.directory, look.step, replace(self.header, replay=mode), whole)
            self.tables = []
        return self.probe.measure() if look.probe else {}

    def engine(self, minibatches: Sequence[Minibatch]) -> dict[str, float]:
        """Rollout routes against the trainer's own choice with the same weights, where both are known."""
        pairs = []
        for part in (part for minibatch in minibatches for part in minibatch.parts):
            assert part.rollout_routes is not None and part.old is not None
            engine = PassRecord(part.rollout_routes, part.rollout_routes)
            pairs.append(Compared(part.microbatch.stream, engine, PassRecord(part.old.live, part.old.live)))
        metrics: dict[str, float] = {}
        for view in (None, "prompt"):
            (sums,) = reduce_drift([self.update.observer.compare(pairs, view)])
            metrics |= to_metrics([sums], self.model.config.moe_layers, "engine", view)
        return metrics

    def before_update(self, minibatch: Minibatch, rollouts: Sequence[Rollout], look: Look, last: bool) -> OtherPass | None:
        """The pass that the update does not make, for attribution: at the last update of a step, where routes are oldest."""
        return self.other_pass(minibatch, rollouts) if look.probe and last else None

    def after_update(
        self, minibatch: Minibatch, rollouts: Sequence[Rollout], look: Look, other: OtherPass | None
    ) -> dict[str, float]:
        if not look.trace and other is None:
            return {}
        table = self.table(minibatch, rollouts, look, other)
        if look.trace and table is not None:
            self.tables.append(table.of(self.traced(minibatch)))
        if other is None:
            return {}
        return from_main(self._explain(table.of(self.probed(minibatch))) if table is not None else None)

    def _explain(self, table: TokenTable) -> dict[str, float]:
        found = attribution(table, self.replays)
        if self.replays:
            rows, experts = torch.from_numpy(table.response), self.model.config.experts
            old, free = torch.from_numpy(table.old_routes), torch.from_numpy(table.free_routes)
            sums = DriftSums.measure(old, free, rows, experts).with_any(flipped(old, free).any(dim=1)[rows])
            found |= to_metrics([sums], self.model.config.moe_layers, "update", "free")
        return found

    def other_pass(self, minibatch: Minibatch, rollouts: Sequence[Rollout]) -> OtherPass:
        """Before an update, with its weights: its probed sequences along the old routes, or freely where it replays."""
        sequences = [Scored(r.prompt_ids, r.response.token_ids) for r in rollouts]
        wanted = set(self.probed(minibatch))
        mine = [i for part in minibatch.parts for i in part.microbatch.members if i in wanted]
        microbatches = pack_here(self.model, sequences, sorted(mine), self.budget, self.update.temperature)
        replay = None
        if not self.replays:
            routes = self._old_routes(minibatch.parts, wanted)
            config = self.model.config
            replay = [
                self.update.replay.of_stream(
                    m.stream,
                    stream_routes(m.stream, m.members, routes, config.topk, config.experts, len(self.model.moe_layers)),
                    self.model.moe_layers,
                    config.experts,
                    number,
                )
                for number, m in enumerate(microbatches)
            ]
        streams = [m.stream for m in microbatches]
        scores = self.model.score(streams, replay)
        found = OtherPass()
        for number, microbatch in enumerate(microbatches):
            stream, members = microbatch.stream, microbatch.members
            live = self.update.observer.record(stream).live
            found.live |= dict(zip(members, tokens.by_sequence(stream, self.model.groups, live), strict=True))
            if scores:
                lengths = [len(sequences[i].response_ids) for i in members]
                found.logprobs |= dict(zip(members, scores[number].logprobs.split(lengths), strict=True))
        return found

    def _old_routes(self, parts: Sequence[Prepared], wanted: set[int]) -> dict[int, torch.Tensor]:
        routes: dict[int, torch.Tensor] = {}
        for part in parts:
            assert part.old is not None
            rows = tokens.by_sequence(part.microbatch.stream, self.model.groups, part.old.choice)
            routes |= {i: r for i, r in zip(part.microbatch.members, rows, strict=True) if i in wanted}
        return routes

    def table(
        self, minibatch: Minibatch, rollouts: Sequence[Rollout], look: Look, other: OtherPass | None
    ) -> TokenTable | None:
        """After an update: what is known of its sampled sequences, on the main rank."""
        wanted, mine = self.sampled(minibatch, look), {}
        for part in minibatch.parts:
            routing = routing_pieces(self.model, part, wanted)
            for i, columns in routing.items():
                columns["free_routes"] = columns["new_routes"] * 0 - 1
                if other is not None and self.replays and i in other.live:
                    columns["free_routes"] = other.live[i].to(torch.int16).cpu().numpy()
            if part.train_logprobs is not None:
                self._add_tokens(routing, part, minibatch, wanted, other)
            mine |= routing
        return gather_tables(mine, self.model, {i: rollouts[i].reward for i in wanted})

    def _add_tokens(
        self, pieces: tokens.Pieces, part: Prepared, minibatch: Minibatch, wanted: set[int], other: OtherPass | None
    ) -> None:
        assert part.train_logprobs is not None and part.old_logprobs is not None
        blank = torch.full_like(part.train_logprobs, float("nan"))
        if other is not None:
            for place, i in enumerate(part.microbatch.members):
                if i in other.logprobs:
                    blank[part.sequence == place] = other.logprobs[i]
        columns = {
            "rollout_logprob": part.rollout_logprobs,
            "old_logprob": part.old_logprobs,
            "train_logprob": part.train_logprobs,
            "advantage": part.advantages,
            "other_logprob": blank,
        }
        clipped = self.update.gradient_cut(part, minibatch.denominators)
        for i, found in token_pieces(part, wanted, clipped, columns).items():
            pieces[i] |= found
