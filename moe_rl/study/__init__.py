"""What a grid of runs shows: tables, CSV files and pages, from the run directories alone. See docs/routing_study.md."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from moe_rl.report.command import report
from moe_rl.study import csv_files, page
from moe_rl.study.results import Result, cells, differences, read, rule_scores
from moe_rl.study.tables import summary, tables
from moe_rl.summary import as_text
from parallel.errors import UsageError

PAGE, REPORT = "study.html", "report.html"
_MOST_NAMED = 8


def write(root: Path, directories: Sequence[Path]) -> None:
    """Prints tables of at most 80 columns and writes root/{results,cells,rules}.csv, study.html and report.html.

    Runs that are not complete are named and left out. report.html: `moe-rl report` of a calm and a collapsed run a method.
    Raises UsageError where no run is complete or root cannot be written to.
    """
    read_all = {directory: read(directory) for directory in directories}
    results = [found for found in read_all.values() if isinstance(found, Result)]
    left_out = [f"{directory.name}: {why}" for directory, why in read_all.items() if isinstance(why, str)]
    if not results:
        raise UsageError(f"{root}: holds no complete run of {len(directories)}; the first: {(left_out or ['none given'])[0]}")
    grid, paired, rules = cells(results), differences(results), rule_scores(results)
    console = Console(highlight=False)
    for part in tables(grid, paired, rules):
        if console.is_terminal:
            console.print(part, width=80)
        else:
            print("\n" + as_text(part, 80))
    few = [*left_out[:_MOST_NAMED], *([f"and {len(left_out) - _MOST_NAMED} more"] if len(left_out) > _MOST_NAMED else [])]
    print(f"\n{summary(results)}")
    for line in few:
        print(f"left out: {line}")
    notes = [f"{len(results)} of {len(directories)} runs. Left out: {'; '.join(few) or 'none'}.", f"Made from {root}."]
    try:
        files = csv_files.write(root, results, grid, rules)
        part = root / f".{PAGE}.part"
        part.write_text(page.html(results, grid, paired, rules, notes), encoding="utf-8")
        part.replace(root / PAGE)
    except OSError as error:
        raise UsageError(f"{root}: cannot be written: {error.strerror}") from error
    sys.stdout.flush()
    report([result.path for result in examples(results)], root / REPORT)
    for path in [*files, root / PAGE]:
        print(f"written: {path}")


def examples(results: Sequence[Result]) -> list[Result]:
    """A calm and a collapsed run of each method: the best pass@1 where routing is measured, and the latest collapse."""
    chosen: list[Result] = []
    for method in dict.fromkeys(result.settings.method for result in results):
        ours = [result for result in results if result.settings.method == method]
        calm = [result for result in ours if not result.collapsed]
        collapsed = [result for result in ours if result.collapsed]
        chosen += [max(calm, key=lambda r: (r.settings.minibatches > 1, r.after))] if calm else []
        chosen += [max(collapsed, key=lambda r: (r.settings.minibatches > 1, r.collapse or 0))] if collapsed else []
    return chosen
