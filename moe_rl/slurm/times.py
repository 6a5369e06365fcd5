"""Slurm's way to write a time limit (man sbatch, --time)."""

import re

_FORMS = (
    re.compile(r"(?P<m>\d+)(:(?P<s>\d+))?"),
    re.compile(r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)"),
    re.compile(r"(?P<d>\d+)-(?P<h>\d+)(:(?P<m>\d+)(:(?P<s>\d+))?)?"),
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def seconds(text: str) -> int | None:
    """`minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`, `days-hours:minutes`, `days-hours:minutes:seconds`;
    None: UNLIMITED. Raises ValueError for anything else, and for none at all."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    for form in _FORMS:
        if match := form.fullmatch(text):
            total = sum(int(value) * _SECONDS[unit] for unit, value in match.groupdict().items() if value)
            if total:
                return total
    raise ValueError(
        f"slurm.time={text}: must be above 0 and written as Slurm does: minutes, hours:minutes:seconds, days-hours, "
        "days-hours:minutes:seconds, such as 90, 12:00:00 or 2-00:00:00"
    )
