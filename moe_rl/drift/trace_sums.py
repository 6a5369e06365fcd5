"""Everything that the trace files of a run say, as sums that one pass over the files collects."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from moe_rl.drift import analysis
from moe_rl.drift.analysis import Compared, LayerSums, MarginSums
from moe_rl.drift.ratio_analysis import Clipped, Moments, by_sequence, clip_by_flip, histogram
from moe_rl.drift.traces import ROUTES, Header, Trace

# (comparison, view): "engine" is rollout against old routes, "update" old against new ones; views as in metric keys
Which = tuple[str, str]
_PAIRS = {"engine": ("rollout_routes", "old_routes"), "update": ("old_routes", "new_routes")}


@dataclass
class TraceSums:
    """Sums over every row of the files added. A part for which no file holds the columns stays empty or None.

    drift: by (comparison, view), then (step, update). moments: flips against |log r| by (step, update); x: share of layers.
    load: of the newest routes a row has, response tokens where that is known, else all.
    """

    header: Header | None = None
    files: int = 0
    tokens: int = 0
    steps: list[int] = field(default_factory=list)
    drift: dict[Which, dict[tuple[int, int], LayerSums]] = field(default_factory=dict)
    margins: MarginSums | None = None
    log_ratios: np.ndarray | None = None  # [2, 51], see ratio_analysis.EDGES
    clipped: dict[str, Clipped] = field(default_factory=dict)  # by "token" and "sequence"
    moments: dict[str, dict[tuple[int, int], Moments]] = field(default_factory=dict)  # likewise
    load: np.ndarray | None = None  # [L, E]

    @staticmethod
    def collect(traces: Iterable[Trace]) -> "TraceSums":
        sums = TraceSums()
        for trace in traces:
            sums.add(trace)
        return sums

    def add(self, trace: Trace) -> None:
        """Traces of one model: the shapes of the first one count."""
        self.header = self.header or trace.header
        self.files += 1
        self.tokens += trace.tokens
        step = trace.get("step")
        if step is None or not trace.tokens:
            return
        self.steps = sorted({*self.steps, *np.unique(step).tolist()})
        response = trace.get("response")
        self._add_load(trace, response)
        for comparison, (before, after) in _PAIRS.items():
            old, new = trace.get(before), trace.get(after)
            if old is None or new is None:
                continue
            compared = analysis.compare(old, new)
            everything = np.ones(trace.tokens, bool)
            self._add_drift(trace, comparison, "", compared, everything if response is None else response)
            if response is not None:
                self._add_drift(trace, comparison, "prompt", compared, ~response)
                if comparison == "update":
                    self._add_margins(trace, compared, response)
                    self._add_ratios(trace, compared, response)

    def total(self, which: Which) -> LayerSums | None:
        """Over every step and update."""
        parts = list(self.drift.get(which, {}).values())
        return sum(parts[1:], parts[0]) if parts else None

    def by_update(self, which: Which) -> dict[int, LayerSums]:
        """Over every step, by the update's number."""
        found: dict[int, LayerSums] = {}
        for (_, update), sums in sorted(self.drift.get(which, {}).items()):
            found[update] = found[update] + sums if update in found else sums
        return found

    def by_step(self, which: Which) -> dict[int, LayerSums]:
        """Over the updates of each step."""
        found: dict[int, LayerSums] = {}
        for (step, _), sums in sorted(self.drift.get(which, {}).items()):
            found[step] = found[step] + sums if step in found else sums
        return found

    def correlation(self, unit: str, within: bool) -> float:
        """Of flips with |log r|, by "token" or "sequence".

        Later minibatches have both more flips and larger ratios, which alone makes the two correlate; `within` takes
        each value's distance from the mean of its update.
        """
        groups = list(self.moments.get(unit, {}).values())
        if not groups:
            return float("nan")
        total = groups[0]
        for group in groups[1:]:
            total = total.within(group) if within else total + group
        return total.correlation

    def _add_load(self, trace: Trace, response: np.ndarray | None) -> None:
        recorded = [name for name in reversed(ROUTES) if trace.get(name) is not None]
        if not recorded:
            return
        routes = trace.columns[recorded[0]]
        mask = np.ones(trace.tokens, bool) if response is None else response
        counts = analysis.load(routes, mask, trace.header.experts)
        self.load = counts if self.load is None else self.load + counts

    def _add_drift(self, trace: Trace, comparison: str, view: str, compared: Compared, mask: np.ndarray) -> None:
        if not (compared.known & mask[:, None]).any():
            return
        found = self.drift.setdefault((comparison, view), {})
        for key, rows in _groups(trace).items():
            sums = analysis.by_layer(compared, mask & rows)
            found[key] = found[key] + sums if key in found else sums

    def _add_margins(self, trace: Trace, compared: Compared, response: np.ndarray) -> None:
        margin = trace.get("old_margin")
        if margin is None:
            return
        pairs = compared.known & response[:, None]
        binned = analysis.flips_by_margin(margin[pairs], compared.flips[pairs])
        self.margins = binned if self.margins is None else self.margins + binned

    def _add_ratios(self, trace: Trace, compared: Compared, response: np.ndarray) -> None:
        train, old = trace.get("train_logprob"), trace.get("old_logprob")
        flipped, share, known = compared.token_flips()
        clipped, sample = trace.get("clipped"), trace.get("sample")
        if train is None or old is None:
            return
        log_ratio = train.astype(np.float64) - old
        used = response & known & np.isfinite(log_ratio)
        counts = histogram(log_ratio[used], flipped[used])
        self.log_ratios = counts if self.log_ratios is None else self.log_ratios + counts
        if clipped is not None:
            self._add_clipped("token", clip_by_flip(clipped[used], flipped[used]))
        for key, rows in _groups(trace).items():
            here = used & rows
            self._add_moments("token", key, Moments.of(share[here], np.abs(log_ratio[here])))
            if sample is None or not here.any():
                continue
            cut = np.zeros(trace.tokens, bool) if clipped is None else clipped
            sequences = by_sequence(sample[here], log_ratio[here], share[here], flipped[here], cut[here])
            self._add_moments("sequence", key, Moments.of(sequences.flip_share, sequences.log_ratio))
            if clipped is not None:
                self._add_clipped("sequence", clip_by_flip(sequences.clipped, sequences.flipped))

    def _add_clipped(self, unit: str, counts: Clipped) -> None:
        self.clipped[unit] = self.clipped[unit].plus(counts) if unit in self.clipped else counts

    def _add_moments(self, unit: str, key: tuple[int, int], moments: Moments) -> None:
        found = self.moments.setdefault(unit, {})
        found[key] = found[key] + moments if key in found else moments


def _groups(trace: Trace) -> dict[tuple[int, int], np.ndarray]:
    """(step, update) -> its rows [T]. A trace without updates is one update, 0."""
    step, update = trace.columns["step"], trace.get("update")
    updates = np.zeros(trace.tokens, np.int64) if update is None else update
    keys = np.unique(np.stack([step, updates], axis=1), axis=0)
    return {(int(s), int(u)): (step == s) & (updates == u) for s, u in keys}
