"""The figures of docs/comparison_with_trl.md: shows them, and with --write puts them into the document."""

import argparse
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from tests.comparison.agreements import AGREEMENTS, EPSILON, SEEDS, Agreement, Deviation, deviation

DOCUMENT = Path(__file__).parents[2] / "docs" / "comparison_with_trl.md"
BEGIN, END = "<!-- begin: figures -->", "<!-- end: figures -->"
_VLLM = "vllm_importance_sampling_"
SPREADS = (0.01, 0.1, 0.4)


def figures() -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("trl", "torch", "transformers"))
    lines = [
        f"{versions}; float64 on a CPU; {len(SEEDS)} random batches a row.",
        "",
        "| here | TRL | value | gradient | largest gradient |",
        "|---|---|---|---|---|",
    ]
    for name, agreement in AGREEMENTS.items():
        found = _all(agreement)
        value = f"{max(one.value for one in found):.1e}" if agreement.value else "differs"
        deviations = (value, _largest(one.gradient for one in found), _largest(one.scale for one in found))
        lines.append(_row(name, _settings(agreement), *deviations))
    lines += ["", *_off_policy()]
    return "\n".join(lines)


def _off_policy() -> list[str]:
    lines = ["| RLOO: spread of log ratios, a token | gradient | largest gradient |", "|---|---|---|"]
    for spread in SPREADS:
        found = _all(AGREEMENTS["rloo, ratio 1"]._replace(spread=spread))
        lines.append(_row(f"{spread:g}", _largest(one.gradient for one in found), _largest(one.scale for one in found)))
    return lines


def _all(agreement: Agreement) -> list[Deviation]:
    return [deviation(agreement, seed) for seed in SEEDS]


def _largest(numbers: Iterable[float]) -> str:
    return f"{max(numbers):.1e}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _settings(agreement: Agreement) -> str:
    """TRL's, without the clip range that most rows share, and without the prefix that its settings of vLLM share."""
    own = [
        f"{key.removeprefix(_VLLM)}={value}" for key, value in agreement.theirs.items() if (key, value) not in EPSILON.items()
    ]
    return ", ".join(
        ([] if agreement.trainer == "GRPOTrainer" else [agreement.trainer]) + [part for part in own if "None" not in part]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"into docs/{DOCUMENT.name}")
    text = figures()
    if not parser.parse_args().write:
        print(text)
        return
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    print(f"wrote docs/{DOCUMENT.name}")


if __name__ == "__main__":
    main()
