"""study.html: the phase diagrams of a grid, what goes with what, and how well the watch foretold it."""

from collections.abc import Sequence

from moe_rl.report import page as pages
from moe_rl.report.figure import Chart, Table, styles
from moe_rl.report.page import Section
from moe_rl.study import charts
from moe_rl.study.results import Cell, Difference, Result, RuleScore, distinct
from moe_rl.study.tables import steps, summary


def html(
    results: Sequence[Result],
    cells: Sequence[Cell],
    differences: Sequence[Difference],
    rules: Sequence[RuleScore],
    notes: Sequence[str],
) -> str:
    """notes: what is not in it, for the foot of the page."""
    methods = list(dict.fromkeys(cell.settings.method for cell in cells))
    looks = dict(zip(methods, styles(len(methods)), strict=True))
    first = pages.lead(
        "Routing study",
        f"{summary(results)}. Numbers are means over the seeds, with their range. A run collapsed where its reward stayed "
        "below half of its best until the end, or its held-out pass@1 fell below half. More minibatches: more updates a step.",
    )
    sections = [
        Section(
            "Where it holds and where it breaks",
            "Each cell is one setting. Read a row from left to right for a higher learning rate, a column downwards for more "
            "minibatches; the same place in two maps is the same setting under another method.",
            charts.maps(methods, cells),
        ),
        Section(
            "What goes with what",
            "Every mark is one run. Two quantities that move together need not cause each other: both follow the size of the "
            "updates.",
            charts.scatters(results, looks),
        ),
        Section(
            "Against plain GRPO",
            "The same seed, minibatches and learning rate under another method, less GRPO: they start from the same weights.",
            charts.against(differences, looks),
        ),
        Section(
            "Alarms",
            "The rules of the stability watch at their default thresholds, replayed over the metrics of every run.",
            [_rules(rules), _leads(results)],
        ),
    ]
    return pages.document("moe-rl routing study", list(looks.items()), first, sections, notes)


def _rules(rules: Sequence[RuleScore]) -> Chart:
    columns = [
        "threshold",
        "hits",
        "late",
        "missed",
        "median lead",
        "false alarms",
        "a 100 steps",
        "calm runs with one",
        "of these, pass@1 fell",
        "ahead of reward",
    ]
    rows = []
    for rule in rules:
        score = rule.score
        found = [f"{rule.threshold:g}", str(score.hits), str(score.late), str(score.misses)]
        found.append(steps(score.lead))
        found += [str(score.false), "-" if score.false_rate is None else f"{score.false_rate:.2f}"]
        found += [str(score.false_runs), str(rule.false_lost), steps(rule.ahead)]
        rows.append((score.rule, found))
    how = (
        "Hits: collapsed runs with an alarm before or at the collapse; late: only after it; missed: never. Lead: steps from "
        "the alarm to the collapse, over hits and late ones. False: alarms in runs that did not collapse; some got worse. "
        "Ahead: median steps before the rule `reward`, which sees no more than the reward itself. Runs that are the same count "
        "once."
    )
    return Chart("Every rule over all runs", how, table=Table("rule", columns, rows), wide=True, missing="No rule is on.")


def _leads(results: Sequence[Result]) -> Chart:
    rows = [
        (
            result.name,
            [
                "-" if result.collapse is None else str(result.collapse),
                "-" if result.lead is None else str(result.lead),
                ", ".join(f"{rule} {step}" for rule, step in sorted(result.alarms.items(), key=lambda pair: pair[1])) or "none",
            ],
        )
        for result in distinct(results)
        if result.collapsed
    ]
    how = (
        "Every run that collapsed; runs that are the same stand here once. A rule that compares with the start of the run "
        "needs 5 steps to know it, so it cannot foretell an earlier collapse. -: pass@1 halved "
        "without a step from which the reward was gone."
    )
    columns = ["collapse at step", "lead, steps", "first alarm of each rule, at step"]
    return Chart("Every collapse", how, table=Table("run", columns, rows), wide=True, missing="No run collapsed.")
