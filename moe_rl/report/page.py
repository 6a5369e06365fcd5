"""The HTML of a report: everything inside one file, nothing that is fetched."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plotly.offline import get_plotlyjs

from moe_rl.drift.runs import Run
from moe_rl.report import overview
from moe_rl.report.figure import Chart, Panel, Style

_HERE = Path(__file__).parent
# The one policy a page without a server can carry: nothing may be loaded from anywhere, a fetch by mistake included
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' blob:; img-src data: blob:; font-src data:"


@dataclass(frozen=True)
class Section:
    title: str
    lead: str
    charts: list[Chart]


def page(runs: Sequence[Run], styles: Sequence[Style], sections: Sequence[Section]) -> str:
    """Self-contained HTML: about 5 MB, nearly all of it plotly.js."""
    figures: list[Panel] = []
    body = "\n".join(_section(section, figures) for section in sections)
    names = ", ".join(run.name for run in runs)
    chips = "".join(_chip(run, style) for run, style in zip(runs, styles, strict=True))
    tables = _table("results", runs, overview.results(runs)) + _table("settings", runs, overview.settings(runs), marked=True)
    notes = "".join(f"<p>skipped {_text(note)}</p>" for run in runs for note in run.notes)
    data = _script_safe(json.dumps([{"data": panel.data, "layout": panel.layout} for panel in figures], allow_nan=False))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>moe-rl report: {_text(names)}</title>
<link rel="icon" href="data:,">
<style>{(_HERE / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header><div><h1>moe-rl report</h1><div class="chips">{chips}</div></div></header>
<main>
<section>
<h2>Runs</h2>
<p class="lead">Settings in which the runs differ are marked. Averages are over the last 10 steps.
In a chart, drag to zoom and double-click to see all again.</p>
<div class="tables">{tables}</div>
</section>
{body}
<footer>{notes}<p>Made from metrics.jsonl and trace files of {_text(", ".join(str(run.path) for run in runs))}.</p></footer>
</main>
<script id="figures" type="application/json">{data}</script>
<script>{get_plotlyjs()}</script>
<script>{(_HERE / "page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _section(section: Section, figures: list[Panel]) -> str:
    charts = "\n".join(_chart(chart, figures) for chart in section.charts)
    return f"""<section>
<h2>{_text(section.title)}</h2>
<p class="lead">{_text(section.lead)}</p>
<div class="charts">
{charts}
</div>
</section>"""


def _chart(chart: Chart, figures: list[Panel]) -> str:
    if chart.panels:
        inside = "".join(_panel(panel, figures) for panel in chart.panels)
        inside = f'<div class="panels">{inside}</div>'
    else:
        inside = f'<p class="missing"><b>No data.</b> {_text(chart.missing)}</p>'
    wide = " wide" if chart.wide and chart.panels else ""
    return f'<div class="chart{wide}"><h3>{_text(chart.title)}</h3>{inside}<p class="how">{_text(chart.how)}</p></div>'


def _panel(panel: Panel, figures: list[Panel]) -> str:
    figures.append(panel)
    heading = f"<h4>{_text(panel.title)}</h4>" if panel.title else ""
    height = f"min-height:{panel.layout['height']}px"
    return f'<div class="panel">{heading}<div class="plot" data-figure="{len(figures) - 1}" style="{height}"></div></div>'


def _chip(run: Run, style: Style) -> str:
    border = {"solid": "solid", "dot": "dotted", "dash": "dashed", "dashdot": "dashed"}[style.dash]
    mark = f"--run:{style.color};border-top-style:{border}"
    return f'<span class="chip"><i style="{mark}"></i>{_text(run.name)}</span>'


def _table(corner: str, runs: Sequence[Run], rows: Sequence[overview.Row], marked: bool = False) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{_text(run.name)}</th>" for run in runs)
    lines = []
    for heading, cells in rows:
        differs = ' class="differs"' if marked and len(set(cells)) > 1 else ""
        lines.append(f"<tr{differs}><th>{_text(heading)}</th>{''.join(f'<td>{_text(text)}</td>' for text in cells)}</tr>")
    head = f"<thead><tr><th>{corner}</th>{head}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'


def _text(text: str) -> str:
    return html.escape(text)


def _script_safe(text: str) -> str:
    """JSON that no run name can close the script with."""
    return text.replace("<", "\\u003c")
