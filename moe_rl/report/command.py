"""`moe-rl report RUN [RUN ...]`: the page of one run, or of several compared. No GPU, no weights, no network."""

from collections.abc import Sequence
from pathlib import Path

from moe_rl.drift.command import missing
from moe_rl.drift.runs import load
from moe_rl.report import curves, routing
from moe_rl.report.figure import styles
from moe_rl.report.page import Section, page
from parallel.errors import UsageError

NAME = "report.html"


def report(paths: Sequence[Path], output: Path | None = None) -> int:
    """Writes the page and says where. output: by default report.html in the first run. Raises UsageError as `load` does."""
    runs = load(paths)
    looks = styles(len(runs))
    sections = [
        Section(
            "Learning",
            "What the policy gains, and whether it stays able to explore.",
            curves.charts(curves.LEARNING, runs, looks),
        ),
        Section(
            "Off-policy ratios",
            "How far the policy that is trained moves from the one that sampled, and what clipping cuts.",
            curves.charts(curves.RATIOS, runs, looks),
        ),
        Section(
            "Routing drift",
            "Which share of its experts a token changes between two passes, by layer, step and minibatch.",
            [*routing.change_maps(runs), routing.by_minibatch(runs, looks), *curves.charts(curves.DRIFT, runs, looks)],
        ),
        Section(
            "What drift does to the ratio",
            "Whether tokens that change experts are the ones with large ratios, and whether they flip near a tie.",
            [routing.flips_by_margin(runs, looks), routing.clipping(runs, looks), routing.log_ratios(runs, looks)],
        ),
        Section("Load", "How evenly tokens spread over experts.", [routing.load_maps(runs)]),
    ]
    if around := curves.recorded(curves.AROUND, runs):
        lead = "Critic, reference, corrections, sampling, shaping: what some of these runs have."
        sections.insert(2, Section("Around the loss", lead, curves.charts(around, runs, looks)))
    path = output or paths[0] / NAME
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(page(runs, looks, sections), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
    for run in runs:
        for line in [*(f"skipped {note}" for note in run.notes), *missing(run)]:
            print(line)
    print(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0
