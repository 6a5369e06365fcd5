"""The graphs of a study: maps over minibatches and learning rates, scatters over runs, differences to GRPO."""

from collections.abc import Callable, Sequence
from statistics import fmean

from moe_rl.report.figure import Chart, Panel, Style, Trace, axis, heat_map, layout
from moe_rl.report.series import rounded
from moe_rl.study.results import PEAK, Cell, Difference, Result, Spread
from moe_rl.study.tables import lead, lr


def maps(methods: Sequence[str], cells: Sequence[Cell]) -> list[Chart]:
    def collapsed(cell: Cell) -> str:
        seeds = f"{cell.collapsed} of {len(cell.results)} collapsed"
        return f"{seeds}<br>lead {lead(cell)}" if any(result.lead is not None for result in cell.results) else seeds

    def span(field: str, digits: int) -> Callable[[Cell], str]:
        def text(cell: Cell) -> str:
            spread = cell.spread(field)
            return "" if spread is None else f"{spread.low:.{digits}f} to {spread.high:.{digits}f}"

        return text

    before = [cell.spread("before") for cell in cells]
    level = fmean(spread.mean for spread in before if spread is not None)
    return [
        _map(
            "Held-out pass@1 after",
            f"Before: {level:.3f} on average. Stronger colour: more problems answered. Below the number: the range over seeds, "
            "how many of them collapsed, and how many steps before that the first alarm came (median).",
            methods,
            cells,
            "after",
            3,
            lambda cell: f"{span('after', 3)(cell)}<br>{collapsed(cell)}",
        ),
        _map(
            "Expert change rate at the last minibatch",
            f"Mean over layers, in the {PEAK} steps in a row where it was highest before a collapse: without reward there is "
            "no gradient and no drift. Under replay: what the routers would choose (local). One minibatch: 0 by construction.",
            methods,
            cells,
            "change_peak",
            4,
            span("change_peak", 4),
        ),
        _map(
            "Expert change rate since the start",
            "Of the probe, a fixed set of sequences, between the weights of the start and of the end. It tells how far routing "
            "went in all, also with one minibatch.",
            methods,
            cells,
            "probe_change",
            3,
            span("probe_change", 3),
        ),
    ]


def _map(
    title: str,
    how: str,
    methods: Sequence[str],
    cells: Sequence[Cell],
    field: str,
    digits: int,
    below: Callable[[Cell], str],
) -> Chart:
    rates = sorted({cell.settings.lr for cell in cells})
    minibatches = sorted({cell.settings.minibatches for cell in cells})
    spreads = {cell.settings: cell.spread(field) for cell in cells}
    top = max((spread.mean for spread in spreads.values() if spread is not None), default=0.0) or 1.0
    panels = []
    for method in methods:
        of = {(cell.settings.minibatches, cell.settings.lr): cell for cell in cells if cell.settings.method == method}
        rows = [[of.get((minibatch, rate)) for rate in rates] for minibatch in minibatches]
        z = [[None if cell is None else _mean(spreads[cell.settings]) for cell in row] for row in rows]
        text = [["" if cell is None else _text(spreads[cell.settings], digits, below(cell)) for cell in row] for row in rows]
        if not any(value is not None for row in z for value in row):
            continue
        trace = heat_map([lr(rate) for rate in rates], [str(minibatch) for minibatch in minibatches], z, top, "", "%{text}")
        trace |= {"text": text, "texttemplate": "%{text}", "showscale": False, "xgap": 2, "ygap": 2}
        shape = layout("learning rate", "minibatches", 90 + 78 * len(minibatches))
        shape["xaxis"] = axis("learning rate", type="category")
        shape["yaxis"] = axis("minibatches", type="category", autorange="reversed")
        panels.append(Panel([trace], shape, method))
    return Chart(title, how, panels, "" if panels else "No run recorded it.", wide=True)


def _text(spread: Spread | None, digits: int, below: str) -> str:
    return "" if spread is None else f"<b>{spread.mean:.{digits}f}</b><br>{below}"


def _mean(spread: Spread | None) -> float | None:
    return None if spread is None else rounded(spread.mean)


def scatters(results: Sequence[Result], looks: dict[str, Style]) -> list[Chart]:
    how = "Above 0: it answers more problems than before. Crosses: collapsed. "
    return [
        _scatter(
            "Pass@1 against change within a step",
            f"{how}To the right: the policy that is updated uses other experts than the one that sampled.",
            f"expert change rate at the last minibatch, highest {PEAK} steps",
            "change_peak",
            results,
            looks,
        ),
        _scatter(
            "Pass@1 against change since the start",
            f"{how}To the right: the run ended with other experts than it began with.",
            "expert change rate of the probe at the end",
            "probe_change",
            results,
            looks,
        ),
    ]


def _scatter(title: str, how: str, x: str, field: str, results: Sequence[Result], looks: dict[str, Style]) -> Chart:
    data: list[Trace] = []
    for method, style in looks.items():
        ours = [result for result in results if result.settings.method == method and getattr(result, field) is not None]
        if not ours:
            continue
        marker = {"color": style.color, "size": 8, "symbol": ["x" if result.collapsed else "circle" for result in ours]}
        trace = _marks(method, [getattr(result, field) for result in ours], [result.gain for result in ours], marker)
        data.append(trace | {"text": [result.name for result in ours], "hovertemplate": "%{text}<br>%{x:.4f}, %{y:+.3f}"})
    shape = layout(x, "pass@1 after less before", 380, hovermode="closest", showlegend=True)
    return Chart(title, how, [Panel(data, shape)] if data else [], "No run recorded it.")


def _marks(name: str, x: Sequence[float], y: Sequence[float], marker: dict[str, object]) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "opacity": 0.8,
        "name": name,
        "x": list(x),
        "y": [rounded(v) for v in y],
        "marker": marker,
    }


def against(differences: Sequence[Difference], looks: dict[str, Style]) -> list[Chart]:
    return [
        _difference(
            "Pass@1 after, less that of GRPO",
            "Means over seeds, bars from the lowest to the highest. Above 0: better than GRPO there. Bars that cross 0: the "
            "seeds do not agree. One pass@1 over 256 problems has a standard error of about 0.03.",
            "pass@1",
            "gains",
            differences,
            looks,
        ),
        _difference(
            "Expert change rate, less that of GRPO",
            f"At the last minibatch, highest {PEAK} steps before a collapse. Below 0: routing moves less than under GRPO.",
            "share",
            "changes",
            differences,
            looks,
        ),
    ]


def _difference(
    title: str, how: str, unit: str, field: str, differences: Sequence[Difference], looks: dict[str, Style]
) -> Chart:
    """Methods stand beside each other at every place."""
    places = sorted({(found.settings.minibatches, found.settings.lr) for found in differences})
    methods = [method for method in looks if any(found.settings.method == method for found in differences)]
    data: list[Trace] = []
    for number, method in enumerate(methods):
        ours = [(d.settings, getattr(d, field)) for d in differences if d.settings.method == method and getattr(d, field)]
        means = [fmean(values) for _, values in ours]
        bars = {
            "type": "data",
            "symmetric": False,
            "array": [rounded(max(values) - mean) for (_, values), mean in zip(ours, means, strict=True)],
            "arrayminus": [rounded(mean - min(values)) for (_, values), mean in zip(ours, means, strict=True)],
            "thickness": 1.5,
        }
        shift = (number - (len(methods) - 1) / 2) * 0.3
        x = [places.index((settings.minibatches, settings.lr)) + shift for settings, _ in ours]
        names = [f"{settings.minibatches} minibatches, {lr(settings.lr)}" for settings, _ in ours]
        if ours:
            trace = _marks(method, x, means, {"color": looks[method].color, "size": 9})
            data.append(trace | {"error_y": bars, "text": names, "hovertemplate": "%{text}: %{y:+.4f}"})
    shape = layout("minibatches, learning rate", unit, 380, hovermode="closest", showlegend=True)
    ticks = [f"{minibatches}<br>{lr(rate)}" for minibatches, rate in places]
    shape["xaxis"] |= {
        "tickvals": list(range(len(places))),
        "ticktext": ticks,
        "tickangle": 0,
        "range": [-0.6, len(places) - 0.4],
    }
    return Chart(title, how, [Panel(data, shape)] if data else [], "No seed was trained both under GRPO and another method.")
