"""The probe set: a few sequences that stay the same through the whole run, scored at chosen steps, so that curves compare like
with like. Scored twice in different batch shapes they also give the noise floor."""

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from models.layer_map import moe_modules
from moe_rl.collectives import reduce_drift
from moe_rl.drift.metrics import flipped
from moe_rl.drift.sums import Comparison, DriftSums, ScoredRows, to_metrics
from moe_rl.drift.tokens import by_sequence
from moe_rl.microbatches import Microbatch, Scored, cut, pack_here
from moe_rl.types import Rollout
from moe_rl.update import PolicyUpdate
from parallel.errors import UsageError

FILE = "probe.npz"


@dataclass
class ProbePass:
    """One pass over the probe set: by sequence, of this data-parallel rank's sequences and this stage's layers.

    routes [n, L here, K]; gates [n, L here, E] log p; margins [n, L here]; logprobs [response], on the last stage.
    """

    routes: dict[int, Tensor] = field(default_factory=dict)
    gates: dict[int, Tensor] = field(default_factory=dict)
    margins: dict[int, Tensor] = field(default_factory=dict)
    logprobs: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """What the probe set is compared with: the weights that the run began from. By sequence and by model layer."""

    sequences: list[Scored]
    routes: dict[int, Tensor]  # [n, L, K], all layers
    logprobs: dict[int, Tensor]
    routers: dict[int, Tensor]  # [E, hidden]


class ProbeSet:
    """Every method is collective."""

    def __init__(self, update: PolicyUpdate, sequences: int, microbatch_tokens: int, directory: Path) -> None:
        self.update, self.model, self.count = update, update.model, sequences
        self.budget, self.path = microbatch_tokens, directory / FILE
        self.start: Start | None = None

    def begin(self, rollouts: Sequence[Rollout]) -> None:
        """With the first rollout batch, before its first update: chooses the sequences and remembers how they were routed."""
        count = min(self.count, len(rollouts))
        chosen = [rollouts[i * len(rollouts) // count] for i in range(count)]
        sequences = [Scored(r.prompt_ids, r.response.token_ids) for r in chosen]
        found = self._score(sequences, cut(self.model, sequences, range(count), self.budget, self.update.temperature))
        self._save(sequences, found)
        self.resume()

    def resume(self) -> None:
        """Goes on with the probe set that the run began with. Raises UsageError where its file is gone or damaged."""
        if not self.path.exists():
            raise UsageError(
                f"{self.path}: is gone; drift.probe_every={self.update.drift.probe_every} compares with it: put it back, or "
                "begin anew under another run.name (with checkpoint.load, to keep the weights)"
            )
        try:
            self.start = self._load()
        except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UsageError(
                f"{self.path}: cannot be read: {reason}; put back what was there, or begin anew under another run.name (with "
                "checkpoint.load, to keep the weights)"
            ) from error

    def _load(self) -> Start:
        with np.load(self.path) as file:
            count = int(file["count"])
            sequences = [Scored(file[f"prompt_{i}"].tolist(), file[f"response_{i}"].tolist()) for i in range(count)]
            device = self.model.device
            return Start(
                sequences,
                {i: torch.from_numpy(file[f"routes_{i}"]).to(device) for i in range(count)},
                {i: torch.from_numpy(file[f"logprobs_{i}"]).to(device) for i in range(count)},
                {layer: torch.from_numpy(file[f"router_{layer}"]).to(device) for layer in self.model.moe_layers},
            )

    def measure(self) -> dict[str, float]:
        """`drift/noise/...`, `drift/probe/...` of the weights as they are."""
        start = self.start
        assert start is not None, "the probe set has not begun"
        microbatches = cut(self.model, start.sequences, range(len(start.sequences)), self.budget, self.update.temperature)
        now = self._score(start.sequences, microbatches)
        again = self._score(start.sequences, self._otherwise(start.sequences, microbatches))
        here = [self.model.config.moe_layers.index(layer) for layer in self.model.moe_layers]
        began = ProbePass(routes={i: start.routes[i][:, here] for i in now.routes})
        metrics = self._compare(start.sequences, now, again, "noise") | self._compare(start.sequences, began, now, "probe")
        return metrics | self._shifts(start, now, again)

    def _otherwise(self, sequences: Sequence[Scored], microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """The same sequences in another shape, which kernels may sum up in another way: in reverse order, in about half as
        large microbatches. Where these hold one sequence each, as when ranks are many, two go into one, and one alone twice."""
        mine = [i for m in reversed(microbatches) for i in reversed(m.members)]
        largest = max(m.stream.real for m in microbatches)
        budget = largest // 2 if any(len(m.members) > 1 for m in microbatches) else 2 * largest
        mine = mine * 2 if len(mine) == 1 else mine
        return pack_here(self.model, sequences, mine, max(1, budget), self.update.temperature)

    def _score(self, sequences: Sequence[Scored], microbatches: Sequence[Microbatch]) -> ProbePass:
        for microbatch in microbatches:
            self.update.observer.mark(microbatch.stream, 0, frozenset(microbatch.members))
        scores = self.model.score([m.stream for m in microbatches])
        found = ProbePass()
        for number, microbatch in enumerate(microbatches):
            members, stream = microbatch.members, microbatch.stream
            record = self.update.observer.record(stream)
            columns = {"routes": record.choice, "gates": record.gates, "margins": record.margins}
            for name, values in columns.items():
                if values is None:  # no layer here routes, or filler alone
                    continue
                if name != "routes":
                    assert stream.observe is not None
                    whole = values.new_zeros(stream.size_here, *values.shape[1:])
                    whole[stream.observe] = values
                    values = whole
                rows = by_sequence(stream, self.model.groups, values)
                getattr(found, name).update(zip(members, rows, strict=True))
            if scores:
                lengths = [len(sequences[i].response_ids) for i in members]
                found.logprobs |= dict(zip(members, scores[number].logprobs.split(lengths), strict=True))
        return found

    def _compare(self, sequences: Sequence[Scored], old: ProbePass, new: ProbePass, comparison: Comparison) -> dict[str, float]:
        """Response tokens, and prompt tokens apart."""
        layers, experts = self.model.config.moe_layers, self.model.config.experts
        here = [layers.index(layer) for layer in self.model.moe_layers]
        metrics: dict[str, float] = {}
        for view in (None, "prompt"):
            sums = DriftSums.zeros(len(layers), experts, self.model.device)
            anywhere = [torch.zeros(0, dtype=torch.bool, device=self.model.device)]
            for i in sorted(new.routes) if self.model.groups.tensor.rank == 0 else ():  # each tensor rank has all tokens
                before = torch.arange(len(new.routes[i]), device=self.model.device) < len(sequences[i].prompt_ids) - 1
                mask = before if view else ~before
                a, b = old.routes[i], new.routes[i]
                anywhere.append(flipped(a, b.to(a.dtype)).any(dim=1)[mask])
                if here:
                    scored = None
                    if i in old.gates:
                        scored = ScoredRows(old.gates[i][mask], new.gates[i][mask], a[mask], old.margins[i][mask])
                    sums = sums + DriftSums.measure(a, b, mask, experts, scored).placed(here, len(layers))
            observer = self.update.observer
            sums = sums.with_any(observer.once(observer.on_any_stage(torch.cat(anywhere))))
            metrics |= to_metrics(reduce_drift([sums]), layers, comparison, view)
        return metrics

    def _shifts(self, start: Start, now: ProbePass, again: ProbePass) -> dict[str, float]:
        """How far router weights and log-probabilities moved from the start; and log-probabilities by batch shape alone."""
        layers = self.model.config.moe_layers
        sums = torch.zeros(len(layers) + 3, dtype=torch.float64, device=self.model.device)
        groups = self.model.groups
        if groups.tensor.rank == 0:
            if groups.data.rank == 0:
                for layer, module in moe_modules(self.model.bare):
                    began = start.routers[layer].double()
                    moved = module.mlp.router.weight.detach().double() - began
                    sums[layers.index(layer)] = moved.norm() / began.norm()
            for i, logprobs in now.logprobs.items():
                sums[-3] += len(logprobs)
                sums[-2] += (logprobs - start.logprobs[i]).abs().double().sum()
                sums[-1] += (logprobs - again.logprobs[i]).abs().double().sum()
        dist.all_reduce(sums)
        moved = dict(zip(layers, sums.tolist(), strict=False))
        metrics = {f"drift/probe/router_shift/layer_{layer:02d}": value for layer, value in moved.items()}
        if moved:
            metrics["drift/probe/router_shift/mean"] = sum(moved.values()) / len(moved)
            metrics["drift/probe/router_shift/worst"] = max(moved.values())
        count, shift, noise = sums[-3:].tolist()
        return metrics | {"drift/probe/logprob_shift": shift / count, "drift/noise/logprob_shift": noise / count}

    def _save(self, sequences: Sequence[Scored], found: ProbePass) -> None:
        """Everything of all stages and ranks in one file, written aside by the main rank and renamed."""
        model, groups = self.model, self.model.groups
        routers = {i: m.mlp.router.weight.detach().float().cpu().numpy() for i, m in moe_modules(model.bare)}
        mine: dict[str, Any] = {
            "layers": model.moe_layers,
            "routes": {i: rows.to(torch.int16).cpu().numpy() for i, rows in found.routes.items()},
            "logprobs": {i: rows.float().cpu().numpy() for i, rows in found.logprobs.items()},
            "routers": routers if groups.data.rank == 0 else {},
        }
        everything: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine if groups.tensor.rank == 0 else None, everything)
        if everything is not None:
            part = self.path.with_name(f".{self.path.name}")
            with part.open("wb") as file:
                np.savez(file, **_whole(sequences, [piece for piece in everything if piece], model.config.moe_layers))
            part.replace(self.path)
        dist.barrier()  # the others read it


def _whole(sequences: Sequence[Scored], pieces: Sequence[Mapping[str, Any]], layers: Sequence[int]) -> dict[str, Any]:
    out: dict[str, Any] = {"count": np.array(len(sequences))}
    for i, sequence in enumerate(sequences):
        out[f"prompt_{i}"], out[f"response_{i}"] = np.array(sequence.prompt_ids), np.array(sequence.response_ids)
    for piece in pieces:
        places = [layers.index(layer) for layer in piece["layers"]]
        for i, rows in piece["routes"].items():
            whole = out.setdefault(f"routes_{i}", np.zeros((len(rows), len(layers), rows.shape[2]), dtype=np.int16))
            whole[:, places] = rows
        out |= {f"logprobs_{i}": rows for i, rows in piece["logprobs"].items()}
        out |= {f"router_{layer}": weight for layer, weight in piece["routers"].items()}
    return out
