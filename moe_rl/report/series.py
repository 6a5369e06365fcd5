"""Long runs made short enough to draw: neighbouring steps are averaged, and what is missing stays missing."""

from collections.abc import Sequence

Value = float | None

MOST_POINTS = 600  # of a curve
MOST_COLUMNS = 240  # of a heat map


def thin(steps: Sequence[int], rows: Sequence[Sequence[Value]], most: int) -> tuple[list[int], list[list[Value]], int]:
    """At most `most` steps: each stands for `width` neighbours (the last for what is left) and holds the mean of those known.

    rows: any number of series over the same steps. Returns the last step of each group, the rows, and `width`.
    """
    width = max(1, -(-len(steps) // most))
    starts = range(0, len(steps), width)
    kept = [steps[min(start + width, len(steps)) - 1] for start in starts]
    return kept, [[_mean(row[start : start + width]) for start in starts] for row in rows], width


def smooth(values: Sequence[Value], window: int) -> list[Value]:
    """The mean of the last `window` known values, at each place that has one."""
    known: list[float] = []
    smoothed: list[Value] = []
    for value in values:
        if value is not None:
            known.append(value)
        smoothed.append(None if value is None else sum(known[-window:]) / len(known[-window:]))
    return smoothed


def rounded(value: Value) -> Value:
    """Five significant digits: what a page needs, in a third of the bytes."""
    return None if value is None else float(f"{value:.5g}")


def _mean(values: Sequence[Value]) -> Value:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
