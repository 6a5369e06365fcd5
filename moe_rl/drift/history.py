"""The drift, load and alarm numbers of metrics.jsonl, by what their keys say."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Line = Mapping[str, float | None]
Series = list[float | None]  # one value a line of metrics.jsonl; None where it lacks the key, or was not finite

_LESS_IS_WORSE = {"jaccard", "margin", "load_entropy"}
VIEWS = ("", "prompt", "local", "free")  # "": response tokens, the routes that were used
COMPARISONS = ("engine", "noise", "update", "probe")
_DRIFT = re.compile(
    r"drift/(?P<comparison>engine|noise|update|probe|load)(?:/(?P<view>prompt|local|free))?/(?P<metric>[a-z_]+)"
    r"(?:/(?:layer_(?P<layer>\d+)|(?P<place>mean|worst)))?(?:/minibatch_(?P<minibatch>\d+))?"
)


class DriftKey(NamedTuple):
    """A key under drift/. place: "layer", "mean", "worst", or "" where the key names none. minibatch None: all of a step."""

    comparison: str
    view: str
    metric: str
    place: str
    layer: int | None = None
    minibatch: int | None = None


def parse(key: str) -> DriftKey | None:
    """None for a key that is no drift key."""
    match = _DRIFT.fullmatch(key)
    if match is None:
        return None
    layer, minibatch = (None if match[name] is None else int(match[name]) for name in ("layer", "minibatch"))
    place = "layer" if layer is not None else match["place"] or ""
    return DriftKey(match["comparison"], match["view"] or "", match["metric"], place, layer, minibatch)


class History:
    """The lines of one run, looked up by key."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self.steps = [int(line["step"] or 0) for line in lines]
        self.keys = sorted({key for line in lines for key in line} - {"step"})
        self.drift = {parsed: key for key in self.keys if (parsed := parse(key)) is not None}

    def series(self, key: str) -> Series:
        return [line.get(key) for line in self.lines]

    def first_of(self, keys: Sequence[str]) -> Series:
        """A value a line: of the first of the keys that the line holds a number under."""
        return [next((value for key in keys if (value := line.get(key)) is not None), None) for line in self.lines]

    @property
    def natural_view(self) -> str:
        """The view of `update` that tells what routers choose by themselves: under replay the routes used agree by force."""
        return "local" if ("update", "local") in self.views() else ""

    def recent(self, key: str, last: int) -> float | None:
        """Mean over the last `last` lines that have the key."""
        return mean([value for value in self.series(key) if value is not None][-last:])

    def at(self, wanted: DriftKey, last: int) -> float | None:
        """`recent` of a drift key; None where the run lacks it."""
        key = self.drift.get(wanted)
        return None if key is None else self.recent(key, last)

    def views(self) -> list[tuple[str, str]]:
        """(comparison, view) that are there, the load apart."""
        found = {(key.comparison, key.view) for key in self.drift}
        return [(comparison, view) for comparison in COMPARISONS for view in VIEWS if (comparison, view) in found]

    def metrics(self, comparison: str, view: str) -> list[str]:
        return sorted({key.metric for key in self.drift if (key.comparison, key.view) == (comparison, view)})

    def layers(self, comparison: str, view: str, metric: str) -> list[int]:
        wanted = (comparison, view, metric)
        return sorted({key.layer for key in self.drift if key[:3] == wanted and key.layer is not None})

    def minibatches(self, comparison: str, view: str, metric: str) -> list[int]:
        wanted = (comparison, view, metric)
        return sorted({key.minibatch for key in self.drift if key[:3] == wanted and key.minibatch is not None})

    def over_layers(self, comparison: str, view: str, metric: str, minibatch: int | None, last: int) -> float | None:
        """The mean over layers: the key `mean`, or where a run lacks it the mean of its layers."""
        value = self.at(DriftKey(comparison, view, metric, "mean", None, minibatch), last)
        if value is not None:
            return value
        layers = self.layers(comparison, view, metric)
        values = [self.at(DriftKey(comparison, view, metric, "layer", layer, minibatch), last) for layer in layers]
        return mean([value for value in values if value is not None])

    def worst(self, comparison: str, view: str, metric: str, last: int) -> tuple[int, float] | None:
        """The layer where the metric says most of drift or of uneven load, the first of equals, and its value."""
        layers = self.layers(comparison, view, metric)
        values = {layer: self.at(DriftKey(comparison, view, metric, "layer", layer), last) for layer in layers}
        found = [(value, layer) for layer, value in values.items() if value is not None]
        if not found:
            return None
        sign = 1 if metric in _LESS_IS_WORSE else -1
        value, layer = min(found, key=lambda pair: (sign * pair[0], pair[1]))
        return layer, value

    def alarms(self) -> dict[str, list[int]]:
        """Rule -> the steps in which it fired."""
        rules = [key for key in self.keys if key.startswith("alarm/")]
        fired = {rule: [step for step, value in zip(self.steps, self.series(rule), strict=True) if value] for rule in rules}
        return {rule.removeprefix("alarm/"): steps for rule, steps in fired.items() if steps}


def name(comparison: str, view: str) -> str:
    """How a comparison and its view are written: update, update/free."""
    return f"{comparison}/{view}" if view else comparison


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
