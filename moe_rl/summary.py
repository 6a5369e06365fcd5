"""The closing table of a run, from the lines of metrics.jsonl: what it learned, how far its routing drifted, its speed."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

Line = Mapping[str, float | None]

_CHANGE = re.compile(r"drift/update/(local/)?expert_change_rate/layer_(\d+)/minibatch_(\d+)")
_CHANGE_TITLE = "expert change rate by layer and minibatch, last {last} steps"
_LOCAL_TITLE = "expert change rate of the routers' own choice (local), last {last} steps"
_MOST_ROWS = 12
_MOST_COLUMNS = 6
_WIDTH = 80


def summary(lines: Sequence[Line], directory: Path, last: int = 10) -> Group:
    """What rich prints. `last`: over how many of the first and of the last steps the noisy numbers are averaged."""
    parts = [_progress(lines, last)]
    change = change_by_layer(lines, last)
    if change:
        title = _LOCAL_TITLE if any(match[1] for match in _change_keys(lines)) else _CHANGE_TITLE
        parts.append(_change_table(change, title.format(last=last)))
    return Group(*parts, Text(f"run directory: {directory}", overflow="fold"))


def plain(lines: Sequence[Line], directory: Path, last: int = 10) -> str:
    """The same as text of at most 80 columns, without colour or box characters."""
    return as_text(summary(lines, directory, last), _WIDTH)


def as_text(part: RenderableType, width: int) -> str:
    """What rich would print, without colour or box characters."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False, force_terminal=False)
    with console.capture() as capture:
        console.print(part)
    text = capture.get().replace("─", "-")
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def show(lines: Sequence[Line], directory: Path, console: Console, last: int = 10) -> None:
    """Prints the table: rich on a terminal, plain text elsewhere."""
    if console.is_terminal:
        console.print(summary(lines, directory, last))
    else:
        console.print(plain(lines, directory, last), markup=False, highlight=False, soft_wrap=True)


def change_by_layer(lines: Sequence[Line], last: int) -> dict[int, dict[int, float]]:
    """Layer -> minibatch -> expert change rate, averaged over the last `last` lines that have it.

    Under replay, where the routes used agree by force, of what routers would choose by themselves.
    """
    rates: dict[int, dict[int, float]] = {}
    for match in _change_keys(lines):
        value = _mean(_values(lines, match[0])[-last:])
        if value is not None:
            rates.setdefault(int(match[2]), {})[int(match[3])] = value
    return rates


def _change_keys(lines: Sequence[Line]) -> list[re.Match[str]]:
    """Sorted; those of the local view alone, where there are any."""
    found = [match for key in sorted({key for line in lines for key in line}) if (match := _CHANGE.fullmatch(key))]
    return [match for match in found if match[1]] or found


def _progress(lines: Sequence[Line], last: int) -> Table:
    rewards = _values(lines, "reward/mean")
    passed = [_with_error(line) for line in lines if line.get("eval/pass_at_1") is not None]
    speed = _mean(_values(lines, "time/rollout_tokens_per_second")[-last:])
    span = min(last, max(1, len(rewards) // 2))
    table = Table(box=SIMPLE_HEAD)
    for name in ("", "before", "after"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    steps = f"step{'s' if span > 1 else ''}"
    table.add_row(f"reward, first and last {span} {steps}", _cell(_mean(rewards[:span])), _cell(_mean(rewards[-span:])))
    before, after = (passed[0], passed[-1]) if len(passed) > 1 else ([*passed, "-"][0], "-")
    table.add_row("held-out pass@1", before, after)
    table.add_row("generated tokens a second", "", _cell(speed, ",.0f"))
    return table


def _change_table(change: Mapping[int, Mapping[int, float]], title: str) -> Table:
    minibatches = sorted({minibatch for by_minibatch in change.values() for minibatch in by_minibatch})
    columns, layers = spread(minibatches, _MOST_COLUMNS), spread(sorted(change), _MOST_ROWS)
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("layer", no_wrap=True)
    for minibatch in columns:
        table.add_column(str(minibatch), justify="right", no_wrap=True)
    for layer in layers:
        table.add_row(f"{layer:02d}", *(_cell(change[layer].get(minibatch), ".4f") for minibatch in columns))
    means = [_mean([rates[minibatch] for rates in change.values() if minibatch in rates]) for minibatch in columns]
    table.add_section()
    table.add_row("mean" if len(layers) == len(change) else f"all {len(change)}", *(_cell(mean, ".4f") for mean in means))
    return table


def spread(items: list[int], most: int) -> list[int]:
    """At most `most` of `items`, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _values(lines: Sequence[Line], key: str) -> list[float]:
    return [value for line in lines if (value := line.get(key)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _with_error(line: Line) -> str:
    """pass@1 with its standard error, where the line has one."""
    stderr = line.get("eval/pass_at_1_stderr")
    return _cell(line["eval/pass_at_1"]) + (f" +- {stderr:.3f}" if stderr is not None else "")


def _cell(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else f"{value:{form}}"
