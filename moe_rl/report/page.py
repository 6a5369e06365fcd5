"""The HTML of a report: everything inside one file, nothing that is fetched."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plotly.offline import get_plotlyjs

from moe_rl.drift.runs import Run
from moe_rl.report import overview
from moe_rl.report.figure import Chart, Panel, Style, Table

_HERE = Path(__file__).parent
# The one policy a page without a server can carry: nothing may be loaded from anywhere, a fetch by mistake included
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' blob:; img-src data: blob:; font-src data:"


@dataclass(frozen=True)
class Section:
    title: str
    lead: str
    charts: list[Chart]


def page(runs: Sequence[Run], styles: Sequence[Style], sections: Sequence[Section]) -> str:
    """The page of one run, or of several compared."""
    results = table(Table("results", [run.name for run in runs], overview.results(runs)))
    settings = overview.settings(runs)
    differ = [place for place, (_, cells) in enumerate(settings) if len(set(cells)) > 1]
    names = [run.name for run in runs]
    first = f"""<section>
<h2>Runs</h2>
<p class="lead">Settings in which the runs differ are marked. Averages are over the last 10 steps.
In a chart, drag to zoom and double-click to see all again.</p>
<div class="tables">{results}{table(Table("settings", names, settings, differ))}</div>
</section>"""
    notes = [f"skipped {note}" for run in runs for note in run.notes]
    source = f"Made from metrics.jsonl and trace files of {', '.join(str(run.path) for run in runs)}."
    return document("moe-rl report", list(zip(names, styles, strict=True)), first, sections, [*notes, source])


def document(
    title: str, marks: Sequence[tuple[str, Style]], first: str, sections: Sequence[Section], footer: Sequence[str]
) -> str:
    """Self-contained HTML: about 5 MB, nearly all of it plotly.js. marks: names of what has a colour. first: HTML."""
    figures: list[Panel] = []
    body = "\n".join(_section(section, figures) for section in sections)
    chips = "".join(_chip(name, style) for name, style in marks)
    notes = "".join(f"<p>{_text(note)}</p>" for note in footer)
    data = _script_safe(json.dumps([{"data": panel.data, "layout": panel.layout} for panel in figures], allow_nan=False))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{_text(title)}: {_text(", ".join(name for name, _ in marks))}</title>
<link rel="icon" href="data:,">
<style>{(_HERE / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header><div><h1>{_text(title)}</h1><div class="chips">{chips}</div></div></header>
<main>
{first}
{body}
<footer>{notes}</footer>
</main>
<script id="figures" type="application/json">{data}</script>
<script>{get_plotlyjs()}</script>
<script>{(_HERE / "page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def lead(title: str, text: str) -> str:
    """A section of words alone."""
    return f'<section><h2>{_text(title)}</h2><p class="lead">{_text(text)}</p></section>'


def table(found: Table) -> str:
    """Nothing where there is no row."""
    if not found.rows:
        return ""
    head = "".join(f"<th>{_text(name)}</th>" for name in found.columns)
    lines = []
    for place, (heading, cells) in enumerate(found.rows):
        mark = ' class="differs"' if place in found.marked else ""
        lines.append(f"<tr{mark}><th>{_text(heading)}</th>{''.join(f'<td>{_text(text)}</td>' for text in cells)}</tr>")
    head = f"<thead><tr><th>{_text(found.corner)}</th>{head}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'


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
    if chart.table is not None and chart.table.rows:
        inside = table(chart.table)
    elif chart.panels:
        inside = "".join(_panel(panel, figures) for panel in chart.panels)
        inside = f'<div class="panels">{inside}</div>'
    else:
        inside = f'<p class="missing"><b>No data.</b> {_text(chart.missing)}</p>'
    wide = " wide" if chart.wide and (chart.panels or chart.table) else ""
    return f'<div class="chart{wide}"><h3>{_text(chart.title)}</h3>{inside}<p class="how">{_text(chart.how)}</p></div>'


def _panel(panel: Panel, figures: list[Panel]) -> str:
    figures.append(panel)
    heading = f"<h4>{_text(panel.title)}</h4>" if panel.title else ""
    height = f"min-height:{panel.layout['height']}px"
    return f'<div class="panel">{heading}<div class="plot" data-figure="{len(figures) - 1}" style="{height}"></div></div>'


def _chip(name: str, style: Style) -> str:
    border = {"solid": "solid", "dot": "dotted", "dash": "dashed", "dashdot": "dashed"}[style.dash]
    mark = f"--run:{style.color};border-top-style:{border}"
    return f'<span class="chip"><i style="{mark}"></i>{_text(name)}</span>'


def _text(text: str) -> str:
    return html.escape(text)


def _script_safe(text: str) -> str:
    """JSON that no run name can close the script with."""
    return text.replace("<", "\\u003c")
