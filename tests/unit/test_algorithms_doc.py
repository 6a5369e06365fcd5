"""docs/algorithms.md shows the tables of algorithms and of presets as they are, and speaks of all settings of an algorithm.
`python tests/unit/test_algorithms_doc.py` writes the tables anew."""

from pathlib import Path

import pytest

from moe_rl.algorithms.config import AlgorithmSection, CriticSection
from moe_rl.algorithms.table import ALGORITHMS, ANY_AGGREGATION, ANY_ESTIMATOR
from moe_rl.presets import PRESETS
from moe_rl.shaping_config import ShapingSection

DOC = Path(__file__).parents[2] / "docs" / "algorithms.md"
BEGIN, END = "<!-- {0}: written by tests/unit/test_algorithms_doc.py -->\n", "<!-- end of {0} -->"


def algorithms() -> str:
    lines = [
        "| `algorithm.name` | objective | clip low / high | aggregation | advantages | KL | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, spec in ALGORITHMS.items():
        clip = "none" if spec.clip_low is None else f"{_bound(spec.clip_low)} / {spec.clip_high:.4g}"
        advantages = _choices(spec.advantages, ANY_ESTIMATOR)
        if not spec.advantage_std:
            advantages += ", no std"
        extra = ", dynamic sampling, overlong penalty" if spec.dynamic_sampling else ""
        cells = [
            f"`{name}`",
            f"`{spec.objective}`",
            clip,
            _choices(spec.aggregations, ANY_AGGREGATION),
            advantages + extra,
            "reward" if spec.kl_in_reward else "loss",
            spec.paper,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def presets() -> str:
    lines = ["| `run.preset` | settings | source | read as |", "|---|---|---|---|"]
    for name, preset in PRESETS.items():
        keys = [f"`{section}.{key}={value:g}`" if isinstance(value, int | float) else f"`{section}.{key}={value}`"
                for section, values in preset.values.items() for key, value in values.items()]  # fmt: skip
        lines.append(f"| `{name}` | {', '.join(keys)} | {preset.source} | {preset.note} |")
    return "\n".join(lines) + "\n"


TABLES = {"algorithms": algorithms, "presets": presets}


def _bound(low: float) -> str:
    return "none" if low == 1 else f"{low:.4g}"


def _choices(of: tuple[str, ...], every: tuple[str, ...]) -> str:
    """The default, and what else is allowed."""
    others = [name for name in of if name != of[0]]
    more = "; any other" if set(of) == set(every) else f"; {', '.join(others)}" if others else ""
    return of[0] + more


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_those_of_the_code(name: str) -> None:
    text = DOC.read_text(encoding="utf-8")
    assert text.split(BEGIN.format(name))[1].split(END.format(name))[0] == TABLES[name]()


def test_every_setting_is_spoken_of() -> None:
    text = DOC.read_text(encoding="utf-8")
    told_elsewhere = {"name", "epochs", "microbatch_tokens", "kl_horizon", "correction", "optimizer", "gamma"}
    for section in (AlgorithmSection, CriticSection, ShapingSection):
        missing = [key for key in section.model_fields if key not in told_elsewhere and key not in text]
        assert not missing, f"{section.__name__}: {missing}"


def write() -> None:
    text = DOC.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        text = before + begin + table() + end + rest.split(end)[1]
    DOC.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
