"""The stability watch: looks at the metrics of every step and raises an alarm where a run starts to come apart.

It is plain arithmetic on numbers that are the same on every rank and in every resumed run, so its alarms are too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_rl.drift.watch_config import Action, RuleSection, WatchSection
from moe_rl.drift.watch_rules import RULES, Line, Memory


@dataclass(frozen=True)
class Alarm:
    """A rule found cause after having found none. value: what was compared with `threshold`. text: one line, the step in it."""

    rule: str
    step: int
    value: float
    threshold: float
    action: Action
    text: str


class Watch:
    """Rules, what they remember, and which of them have fired and are not quiet yet."""

    def __init__(self, section: WatchSection) -> None:
        self._rules = {
            name: _Watched(name, section) for name in RULES if section.enabled and _rule(section, name).action != "off"
        }

    def look(self, step: int, metrics: Line) -> list[Alarm]:
        """Call once a step, with every metric of it, before they are written; a line without the keys of RL changes nothing.

        A rule that has fired fires again only after it has found no cause for `quiet` steps (those that it skips left out).
        """
        return [alarm for rule in self._rules.values() if (alarm := rule.look(step, metrics)) is not None]

    def state(self) -> dict[str, Any]:
        """Everything that later alarms depend on, as JSON values."""
        return {name: rule.state() for name, rule in self._rules.items()}

    @classmethod
    def restore(cls, section: WatchSection, state: Mapping[str, Any]) -> "Watch":
        """Goes on where `state` was taken, to the bit under the same settings.

        Under others: levels at the start that were known stay; a rule that is not in `state` begins anew.
        """
        watch = cls(section)
        for name, rule in watch._rules.items():
            if name in state:
                rule.load(state[name])
        return watch


def alarm_metrics(alarms: Sequence[Alarm]) -> dict[str, float]:
    """`alarm/RULE`: 1 for each rule that fired."""
    return {f"alarm/{alarm.rule}": 1.0 for alarm in alarms}


class _Watched:
    """One rule, its memory, and whether it has fired. quiet: steps without cause since then."""

    def __init__(self, name: str, section: WatchSection) -> None:
        self._name, self._section, self._quiet_for = name, _rule(section, name), section.quiet
        self._memory = Memory(section.warmup)
        self._fired, self._quiet = False, 0

    def look(self, step: int, metrics: Line) -> Alarm | None:
        reading = RULES[self._name](self._section, self._memory, metrics)
        if reading is None:
            return None
        if not reading.cause:
            self._quiet += 1
            self._fired = self._fired and self._quiet < self._quiet_for
            return None
        fired, self._fired, self._quiet = self._fired, True, 0
        if fired:
            return None
        threshold, action = self._section.threshold, self._section.action
        text = f"step {step}: {reading.text} (drift.watch.{self._name}.threshold={threshold:g})"
        return Alarm(self._name, step, reading.value, threshold, action, text)

    def state(self) -> dict[str, Any]:
        lists = {name: list(values) for name, values in self._memory.lists.items()}
        return {"fired": self._fired, "quiet": self._quiet, "memory": lists}

    def load(self, state: Mapping[str, Any]) -> None:
        self._fired, self._quiet = state["fired"], state["quiet"]
        self._memory = Memory(self._memory.warmup, state["memory"])


def _rule(section: WatchSection, name: str) -> RuleSection:
    return getattr(section, name)
