"""What `moe-rl eval` leaves in RUN/eval: every response, all figures, and the table on the terminal. Main rank only."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.table import Table

from moe_rl.checkpoint_paths import WARM_START
from moe_rl.config import RunConfig
from moe_rl.estimates import Estimate, Outcome
from moe_rl.summary import as_text
from moe_rl.task_config import TaskSection
from moe_rl.tracking import EVALUATIONS
from moe_rl.types import Rollout
from parallel.errors import UsageError

_WIDTH = 80


def name_of(weights: Path, config: RunConfig) -> str:
    """`step_000150-reversal`; with `warm_start` in front where they are of one, and the run where the weights are another
    run's."""
    weights = weights.resolve()
    name, place = weights.name, weights.parent
    if place.name == WARM_START:
        name, place = f"{place.name}-{name}", place.parent
    if place.name == "checkpoints" and place.parent != config.directory.resolve():
        name = f"{place.parent.name}-{name}"
    return re.sub(r"[^\w.-]+", "_", f"{name}-{_task(config.task)}")


def _task(section: TaskSection) -> str:
    """The name of a task, or of its file."""
    path = section.eval_path or section.train_path
    return section.name if path is None else path.stem


class EvaluationFiles:
    """NAME.jsonl, one response a line in order of problems, and NAME.json, the figures; NAME.2 ... where NAME is taken.

    Responses are written as they come to NAME.jsonl.part, which is renamed when the last one is there; NAME.json comes after
    it. So an evaluation that was killed has only the part, and two at the same time have two names.
    """

    def __init__(self, folder: Path, name: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.name, self._part = _reserve(folder, name)
            self._file = self._part.open("w", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise UsageError(f"run.dir and run.name: {folder} cannot be written: {error.strerror}") from error
        self.responses, self.figures = (folder / f"{self.name}.{suffix}" for suffix in ("jsonl", "json"))

    def add(self, rollouts: Sequence[Rollout], outcomes: Sequence[Outcome], samples: int) -> None:
        """Writes responses, `samples` to each problem."""
        for place, (rollout, outcome) in enumerate(zip(rollouts, outcomes, strict=True)):
            line = {
                "problem": rollout.problem.id,
                "prompt": rollout.problem.prompt,
                "answer": rollout.problem.answer,
                "sample": place % samples,
                "response": rollout.text,
                "reward": outcome.reward,
                "passed": outcome.passed,
                "tokens": outcome.tokens,
                "stopped": outcome.stopped,
            }
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def finish(self, figures: Mapping[str, Any]) -> None:
        """Puts both files in place."""
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self.responses)
        part = self.figures.with_name(f"{self.figures.name}.part")
        part.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        part.replace(self.figures)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def _reserve(folder: Path, name: str) -> tuple[str, Path]:
    """The first name that nobody has, held by an empty part."""
    number = 1
    while True:
        candidate = name if number == 1 else f"{name}.{number}"
        part = folder / f"{candidate}.jsonl.part"
        number += 1
        try:
            part.touch(exist_ok=False)
        except FileExistsError:
            continue
        # looked at with the part held: until then another evaluation could have finished under this name
        if not any((folder / f"{candidate}.{suffix}").exists() for suffix in ("jsonl", "json")):
            return candidate, part
        part.unlink()


@dataclass(frozen=True)
class Evaluated:
    """What was evaluated on what. heldout: problems that the task has; of these `problems` were asked."""

    weights: Path
    problems: int
    heldout: int


def figures(config: RunConfig, evaluated: Evaluated, estimates: Mapping[str, Estimate], seconds: float) -> dict[str, Any]:
    """The content of NAME.json. A standard error that is not defined is null."""
    return {
        "weights": str(evaluated.weights),
        "task": config.task.name,
        "problems": evaluated.problems,
        "heldout_problems": evaluated.heldout,
        "samples": config.eval.samples,
        "figures": {name: {"value": e.value, "stderr": e.stderr} for name, e in estimates.items()},
        "time/eval_seconds": seconds,
        "settings": config.model_dump(mode="json"),
    }


def read_pass_at_1(run: Path) -> dict[str, Estimate]:
    """pass@1 of every finished evaluation of a run, by its name, the newest last. What is no such file is left out."""
    found = {}
    for path in sorted((run / EVALUATIONS).glob("*.json"), key=lambda path: path.stat().st_mtime):
        try:
            one = json.loads(path.read_text(encoding="utf-8"))["figures"]["pass_at_1"]
            found[path.stem] = Estimate(float(one["value"]), None if one["stderr"] is None else float(one["stderr"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def table(config: RunConfig, evaluated: Evaluated, estimates: Mapping[str, Estimate]) -> str:
    """Every figure with its standard error, as text of at most 80 columns."""
    found = Table(box=SIMPLE_HEAD)
    found.add_column("", no_wrap=True)
    found.add_column("value", justify="right", no_wrap=True)
    found.add_column("standard error", justify="right", no_wrap=True)
    for name, title, form in _rows(estimates, config.rollout.max_response_tokens):
        estimate = estimates[name]
        has_error = not name.endswith(("_median", "_p95", "_max", "_failed"))
        error = "" if not has_error else "n/a" if estimate.stderr is None else f"+- {estimate.stderr:{form}}"
        found.add_row(title, f"{estimate.value:{form}}", error)
    section = config.eval
    sampled = "greedy" if section.temperature == 0 else f"temperature {section.temperature:g}"
    asked = f"{evaluated.problems} of {evaluated.heldout} held-out problems of {_task(config.task)}"
    lines = [
        f"weights: {evaluated.weights}",
        f"{asked}, {section.samples} response{'s' * (section.samples > 1)} each, {sampled}",
        as_text(found, _WIDTH),
    ]
    if evaluated.problems == 1:
        lines.append("n/a: the standard error is over problems, and there is one")
    return "\n".join(lines)


def _rows(estimates: Mapping[str, Estimate], limit: int) -> list[tuple[str, str, str]]:
    """Name, title, format."""
    rows = [(name, f"pass@{name.removeprefix('pass_at_')}", ".4f") for name in estimates if name.startswith("pass_at_")]
    rows += [
        ("reward_mean", "reward", ".4f"),
        ("response_length_mean", "response tokens, mean", ".1f"),
        ("response_length_median", "response tokens, median", ".1f"),
        ("response_length_p95", "response tokens, 95 % have at most", ".0f"),
        ("response_length_max", "response tokens, longest", ".0f"),
        ("response_truncated_fraction", f"share cut at {limit} tokens", ".4f"),
        ("response_eos_fraction", "share ended by end of sequence", ".4f"),
    ]
    if estimates["reward_failed"].value:
        rows.append(("reward_failed", "responses whose reward failed (0)", ".0f"))
    return rows
