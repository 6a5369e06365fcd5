"""The layouts that whole runs are made in, and what two of them may differ by."""

import re
from typing import Any

import pytest

LAYOUTS = {
    "one": (1, []),
    "EP2": (2, ["parallel.expert=2"]),
    "TP2": (2, ["parallel.tensor=2"]),
    "PP2": (2, ["parallel.pipeline=2"]),
    "PP2 virtual": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "TP2 EP2": (2, ["parallel.tensor=2", "parallel.expert=2"]),
    "DP2": (2, []),
}

# Counts and rates of routes: a route that differs between layouts would be a bug, not noise
EXACT = re.compile(
    r"reward/(?!shap|kl)|response/|eval/|step$|sampling/|optimizer/lr|drift/load/|replay/.*_fraction|ratio/(clip|outside)"
    r"|attribution/(clip_fraction|flip_rate)|correction/touched|drift/.*(expert_change_rate|flip_rate|jaccard)"
)


def name(layout: str, what: str) -> str:
    """Of a run."""
    return f"{layout}-{what}".replace(" ", "-")


def assert_close(ours: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Everything else: in these layouts it differed by at most 1.4e-5 relative (a share of variance, by 1.3e-6) or 8e-7 (a
    correlation near 0); allowed: four times that."""
    assert ours.keys() == wanted.keys()
    for key, value in wanted.items():
        if EXACT.match(key):
            assert ours[key] == pytest.approx(value, abs=1e-12), key
        elif key.startswith(("rollout/logprob_gap", "drift/noise")) and "margin" not in key and abs(value) < 1e-5:
            assert 0 <= ours[key] < 1e-5, key  # noise itself
        else:
            assert ours[key] == pytest.approx(value, rel=5e-5, abs=5e-6), key
