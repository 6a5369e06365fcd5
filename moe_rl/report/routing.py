"""Charts of routing: heat maps over layers and steps, change by minibatch, flips against margin, log-ratios, clipping, load."""

from collections.abc import Sequence

from moe_rl.drift import findings, hints
from moe_rl.drift.history import DriftKey, name
from moe_rl.drift.ratio_analysis import EDGES
from moe_rl.drift.runs import Run
from moe_rl.report.figure import Chart, Panel, Style, Trace, axis, bars, heat_map, layout, line
from moe_rl.report.series import MOST_COLUMNS, rounded, thin

RATE = "expert_change_rate"
_LAST = 10  # steps averaged where a chart is not over steps


def change_maps(runs: Sequence[Run]) -> list[Chart]:
    """A heat map a run for every comparison that some run has; the one between old and new weights always."""
    views = [view for view in hints.MEANING if view == ("update", "") or any(view in run.history.views() for run in runs)]
    return [_change_map(runs, *view) for view in views]


def _change_map(runs: Sequence[Run], comparison: str, view: str) -> Chart:
    title = f"Expert change rate by layer and step: {name(comparison, view)}"
    maps = [(run, *_layers_by_step(run, comparison, view)) for run in runs]
    maps = [(run, layers, steps, rows, width) for run, layers, steps, rows, width in maps if steps]
    known = [value for _, _, _, rows, _ in maps for row in rows for value in row if value is not None]
    how = f"{hints.meaning(comparison, view).capitalize()}. Stronger colour: more experts changed; one scale for all runs."
    if not known:
        return Chart(title, how, missing=f"{hints.VIEWS.get((comparison, view), hints.DRIFT)} records it.")
    top = max(known) or 1.0
    panels = []
    for run, layers, steps, rows, width in maps:
        hover = f"layer %{{y}}, step %{{x}}{f' (mean of {width})' if width > 1 else ''}<br>%{{z:.4f}}"
        trace = heat_map(steps, [f"{layer:02d}" for layer in layers], rows, top, "share", hover)
        panels.append(Panel([trace], _map_layout("step", "layer", len(layers)), run.name))
    return Chart(title, how, panels, wide=len(panels) > 1)


def _layers_by_step(run: Run, comparison: str, view: str) -> tuple[list[int], list[int], list[list[float | None]], int]:
    """Layers, steps, a row a layer, and how many steps each column stands for. Steps without any value are left out."""
    history = run.history
    layers = history.layers(comparison, view, RATE)
    series = [history.series(history.drift[DriftKey(comparison, view, RATE, "layer", layer)]) for layer in layers]
    if layers:
        used = [place for place in range(len(history.steps)) if any(row[place] is not None for row in series)]
        rows = [[row[place] for place in used] for row in series]
        steps, rows, width = thin([history.steps[place] for place in used], rows, MOST_COLUMNS)
        return layers, steps, [[rounded(value) for value in row] for row in rows], width
    if run.traces is None or run.traces.header is None or (comparison, view) not in run.traces.drift:
        return [], [], [], 1
    by_step = run.traces.by_step((comparison, view))
    columns = [sums.rates()[RATE].tolist() for sums in by_step.values()]
    rows = [[rounded(value) if value == value else None for value in row] for row in zip(*columns, strict=True)]
    steps, rows, width = thin(list(by_step), rows, MOST_COLUMNS)
    return list(run.traces.header.layers), steps, rows, width


def by_minibatch(runs: Sequence[Run], styles: Sequence[Style]) -> Chart:
    title = "Expert change rate by minibatch"
    how = (
        f"Mean over layers and the last {_LAST} steps, under replay by the routers' own choice (local). Minibatch 0 has the "
        "weights that sampled; later ones are further off."
    )
    data: list[Trace] = []
    for run, style in zip(runs, styles, strict=True):
        places, values = _minibatches(run)
        if places:
            data.append(line(run.name, style, places, values, ".4f", mode="lines+markers"))
    if not data:
        return Chart(title, how, missing=f"{hints.DRIFT} records it.")
    shape = layout("minibatch of the step", "share", hovermode="x unified")
    shape["xaxis"]["dtick"] = 1
    return Chart(title, how, [Panel(data, shape)])


def _minibatches(run: Run) -> tuple[list[int], list[float | None]]:
    history, view = run.history, run.history.natural_view
    if found := history.minibatches("update", view, RATE):
        return found, [rounded(history.over_layers("update", view, RATE, minibatch, _LAST)) for minibatch in found]
    sums = run.traces.by_update(("update", "")) if run.traces is not None else {}
    means = [part.rates()[RATE] for part in sums.values()]
    return list(sums), [rounded(float(values[values == values].mean())) for values in means]


def flips_by_margin(runs: Sequence[Run], styles: Sequence[Style]) -> Chart:
    title = "Flips against margin"
    how = "Margin: k-th minus (k+1)-th score. Flips near a tie (left) are noise; flips far from one say that the router moved."
    data: list[Trace] = []
    for run, style in zip(runs, styles, strict=True):
        bins = findings.margin_bins(run, _LAST)
        if not bins:
            continue
        places = [(place + 0.5) * 100 / len(bins) for place in range(len(bins))]
        margins = ["" if found.margin is None else f"margin {found.margin:.2e}" for found in bins]
        values = [rounded(found.flip_rate) for found in bins]
        data.append(line(run.name, style, places, values, ".4f", mode="lines+markers", **_with_text(margins, ".4f")))
    if not data:
        return Chart(title, how, missing=f"{hints.TRACES} with {hints.SCORES} records it.")
    shape = layout("percentile of the margin (0: nearest to a tie)", "flip rate", hovermode="closest")
    shape["xaxis"]["range"] = [0, 100]
    return Chart(title, how, [Panel(data, shape)])


def log_ratios(runs: Sequence[Run], styles: Sequence[Style]) -> Chart:
    title = "Log-ratio of flipped and steady tokens"
    how = (
        "Filled: tokens that changed experts in some layer; dotted: tokens that kept all of them. "
        "Wider wings of the filled shape mean that changes of routing go with large ratios."
    )
    panels = []
    for run, style in zip(runs, styles, strict=True):
        counts = run.traces.log_ratios if run.traces is not None else None
        if counts is None or not counts.any():
            continue
        used = counts.any(axis=0).nonzero()[0]
        window = list(range(int(used[0]), int(used[-1]) + 1))
        data: list[Trace] = []
        for which, label in enumerate(("steady", "flipped")):
            total = int(counts[which].sum())
            if total:
                shares = [rounded(float(counts[which, i]) / total) for i in window]
                stroke = {"color": style.color, "width": 2, "shape": "hvh", "dash": "solid" if which else "dot"}
                more = {
                    "line": stroke,
                    "fill": "tozeroy" if which else "none",
                    **_with_text([_range(i) for i in window], ".3f"),
                }
                data.append(line(f"{label} ({total:,})", style, window, shares, ".3f", **more))
        shape = layout("log r, nats (logarithmic both ways)", "share of tokens", showlegend=True, hovermode="closest")
        shape["xaxis"] |= _LOG_RATIO_TICKS
        panels.append(Panel(data, shape, run.name))
    return Chart(title, how, panels, "" if panels else f"{hints.TRACES} records it.", wide=len(panels) > 1)


def _with_text(text: Sequence[str], form: str) -> dict[str, object]:
    return {"text": list(text), "hovertemplate": f"%{{y:{form}}}, %{{text}}"}


def _log_ratio_ticks() -> dict[str, list[object]]:
    """Whole decades. Edge i lies between the bins i and i + 1; the bin around 0 is in the middle."""
    half = len(EDGES) // 2
    edges = [*range(0, half - 1, 4), *range(half + 4, len(EDGES), 4)]
    places = [*(i + 0.5 for i in edges), half]
    return {"tickvals": [*places], "ticktext": [*(f"{EDGES[i]:.3g}" for i in edges), "0"]}


_LOG_RATIO_TICKS = _log_ratio_ticks()


def _range(place: int) -> str:
    low = "below" if place == 0 else f"{EDGES[place - 1]:.1e} to"
    high = "and above" if place == len(EDGES) else f"{EDGES[place]:.1e}"
    return f"log r {low} {high}"


def clipping(runs: Sequence[Run], styles: Sequence[Style]) -> Chart:
    title = "Who is clipped"
    how = (
        "Share that is cut, of steady (plain) and of flipped (hatched) tokens and sequences. "
        "A taller hatched bar: drift of routing uses up the clip range."
    )
    data: list[Trace] = []
    for run, style in zip(runs, styles, strict=True):
        names: list[str] = []
        values: list[float | None] = []
        for unit in findings.UNITS:
            for label, value in zip(("steady", "flipped"), findings.clip_fractions(run, unit, _LAST), strict=True):
                names.append(f"{label} {unit}s")
                values.append(rounded(value))
        if any(value is not None for value in values):
            pattern = {"pattern": {"shape": ["", "/", "", "/"], "fillmode": "overlay", "fgcolor": "rgba(255,255,255,.6)"}}
            data.append(bars(run.name, style, names, values, ".4f", marker=pattern))
    if not data:
        return Chart(title, how, missing=f"{hints.TRACES} records it.")
    return Chart(title, how, [Panel(data, layout("", "share clipped", barmode="group", hovermode="x unified"))])


def load_maps(runs: Sequence[Run]) -> Chart:
    title = "Load by layer and expert"
    how = (
        "Tokens an expert receives, over an even share (1). Faintest: never chosen. Few strong cells in a row: a narrow router."
    )
    found = [(run, run.traces) for run in runs if run.traces is not None and run.traces.load is not None]
    loads = []
    for run, traces in found:
        assert traces.load is not None and traces.header is not None
        mean = traces.load.mean(axis=1, keepdims=True)
        loads.append((run, traces.header, (traces.load / mean.clip(min=1e-9)).tolist()))
    top = max((value for _, _, rows in loads for row in rows for value in row), default=1.0)
    panels = []
    for run, header, rows in loads:
        cells = [[rounded(value) for value in row] for row in rows]
        hover = "layer %{y}, expert %{x}<br>%{z:.2f} x an even share"
        trace = heat_map(list(range(header.experts)), [f"{layer:02d}" for layer in header.layers], cells, top, "x even", hover)
        panels.append(Panel([trace], _map_layout("expert", "layer", len(header.layers)), run.name))
    return Chart(title, how, panels, "" if panels else f"{hints.TRACES} records it.")


def _map_layout(x: str, y: str, rows: int) -> dict[str, object]:
    height = min(620, 130 + max(4, rows) * (22 if rows <= 16 else 8))
    return layout(x, y, height, yaxis=axis(y, type="category", autorange="reversed"))
