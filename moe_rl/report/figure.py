"""A chart as the page takes it: Plotly's data and layout as plain dicts, a heading, and how to read it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Wong's palette (Nature Methods 8, 441, 2011), told apart with every common colour blindness; without its yellow and black
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_DASHES = ("solid", "dot", "dash", "dashdot")

Trace = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One Plotly graph. title: the run, where a chart has a panel a run."""

    data: list[Trace]
    layout: dict[str, Any]
    title: str = ""


@dataclass(frozen=True)
class Table:
    """corner: the heading of the first column. rows: a heading and a cell a column. marked: rows whose cells are set off."""

    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    marked: Sequence[int] = ()


@dataclass(frozen=True)
class Chart:
    """how: a sentence on how to read it. missing: what to switch on, where there is no panel and no table.

    wide: takes the whole row.
    """

    title: str
    how: str
    panels: list[Panel] = field(default_factory=list)
    missing: str = ""
    wide: bool = False
    table: Table | None = None


@dataclass(frozen=True)
class Style:
    """What a run looks like everywhere on the page."""

    color: str
    dash: str


def styles(count: int) -> list[Style]:
    """A colour a run; beyond six the colours come again with another dash."""
    places = [divmod(place, len(PALETTE)) for place in range(count)]
    return [Style(PALETTE[color], _DASHES[turn % len(_DASHES)]) for turn, color in places]


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def layout(x: str, y: str, height: int = 300, **more: Any) -> dict[str, Any]:
    """Colours and fonts come from the page, in its light or dark mode."""
    return {"xaxis": axis(x), "yaxis": axis(y), "height": height, **more}


def log_axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Ticks at round numbers of the decades that the values reach, fewer of them the more decades."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    leads = (1, 1.5, 2, 3, 5, 7) if max(values) < 10 * min(values) else (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [lead * 10.0**decade for decade in range(low, high + 1) for lead in leads]
    return axis(title, type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])


def line(name: str, style: Style, x: Sequence[Any], y: Sequence[Any], hover: str, **more: Any) -> Trace:
    """hover: the format of a value, as d3 writes it, such as ".4f"."""
    stroke = {"color": style.color, "dash": style.dash, "width": 2}
    shown = {"type": "scatter", "mode": "lines" if len(x) > 1 else "markers", "name": name, "x": list(x), "y": list(y)}
    return {**shown, "line": stroke, "marker": {"color": style.color}, "hovertemplate": f"%{{y:{hover}}}", **more}


def bars(name: str, style: Style, x: Sequence[Any], y: Sequence[Any], hover: str, **more: Any) -> Trace:
    marker = {"color": style.color, **more.pop("marker", {})}
    shown = {"type": "bar", "name": name, "x": list(x), "y": list(y), "marker": marker}
    return {**shown, "hovertemplate": f"%{{y:{hover}}}", **more}


def heat_map(x: Sequence[Any], y: Sequence[Any], z: Sequence[Sequence[Any]], top: float, unit: str, hover: str) -> Trace:
    """top: the value of the strongest colour, the same for all runs of a chart. hover: the template of a cell."""
    bar = {"title": {"text": unit, "side": "right"}, "thickness": 12, "outlinewidth": 0}
    shown = {"type": "heatmap", "x": list(x), "y": list(y), "z": [list(row) for row in z], "hoverongaps": False}
    return {**shown, "zmin": 0, "zmax": top, "colorbar": bar, "hovertemplate": f"{hover}<extra></extra>"}
