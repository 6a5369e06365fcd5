"""What a run leaves behind and shows while it goes: the run directory, wandb, TensorBoard, the terminal. Main rank only."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rich.console import Console

from moe_rl import sinks, yaml_text
from moe_rl.config import TrackingSection
from moe_rl.display import Display
from parallel.errors import UsageError

Phase = Literal["train", "sft"]

FILES: dict[Phase, str] = {"train": "metrics.jsonl", "sft": "sft.jsonl"}
SUMMARY = "summary.json"
EVALUATIONS = "eval"  # the folder of a run where `moe-rl eval` writes


def check(section: TrackingSection, directory: Path) -> None:
    """Raises UsageError, before anything starts, where a Tracker could not do what `section` asks for."""
    existing = next(parent for parent in [directory, *directory.absolute().parents] if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        reason = "may not be read and written to" if existing.is_dir() else "is a file"
        raise UsageError(f"run.dir and run.name: {directory} cannot be made: {existing} {reason}")
    if section.tensorboard:
        sinks.check_tensorboard()


class Tracker:
    """Writes `directory`: config.yaml, one object a step in metrics.jsonl (sft.jsonl), log.txt.

    resolved: the text of config.yaml; none: no such file is written.
    steps: how many a phase has, for the display.
    A file left by an earlier run is moved to *.previous.jsonl at the first `log`, unless `resume` came before it.
    """

    def __init__(
        self,
        section: TrackingSection,
        directory: Path,
        resolved: str | None,
        steps: Mapping[Phase, int] | None = None,
        console: Console | None = None,
    ) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if resolved is not None:
                part = directory / "config.yaml.part"  # renamed: a run that is killed here can still go on
                part.write_text(resolved, encoding="utf-8")
                part.replace(directory / "config.yaml")
            self._log = _Appended(directory / "log.txt")
        except OSError as error:
            raise UsageError(f"run.dir and run.name: {directory} cannot be written: {error.strerror}") from error
        self.directory = directory
        self._section = section
        self._config: Any = yaml_text.parse(resolved or "", "config.yaml") or {}
        self._steps = dict(steps or {})
        self._display = Display(console or Console(highlight=False, soft_wrap=True), self._write_log)
        self._files: dict[Phase, StepFile] = {}
        self._sinks: list[sinks.Sink] | None = None

    def resume(self, step: int, phase: Phase = "train") -> None:
        """Goes on after `step`: what the phase's file holds beyond it is dropped, so that no step appears twice."""
        file = self._files[phase] = StepFile(self.directory / FILES[phase], resume=step)
        if phase == "train" and file.last != step:  # supervised training may have ended before the step it is saved as
            self.print(f"warning: {self.directory / FILES[phase]}: lacks step {step}, and perhaps others before it")
        self._sinks = self._open_sinks({phase: step})

    def log(self, step: int, metrics: Mapping[str, float], phase: Phase = "train") -> None:
        """One step's metrics, everywhere. The steps of a phase must rise.

        A value that is not finite is null in the file. Only keys under `time/` and those that end in `_seconds` or
        `_per_second` may differ between two runs of the same configuration.
        """
        if self._sinks is None:
            self._sinks = self._open_sinks({})
        if phase not in self._files:
            self._files[phase] = StepFile(self.directory / FILES[phase])
        values = {key: float(metrics[key]) for key in sorted(metrics)}
        self._files[phase].append(step, values)
        for sink in self._sinks:
            sink.log(step, values, phase)
        self._display.step(phase, step, self._steps.get(phase), values)

    def to_disk(self) -> None:
        """Waits until the steps that were logged are stored: a checkpoint must not outlive the lines before it."""
        for file in self._files.values():
            file.to_disk()

    def progress(self, phase: str, done: int, total: int, values: Mapping[str, float]) -> None:
        """Shows how far a phase without steps is, and what it has found so far; keeps nothing of it but the line in log.txt."""
        self._display.step(phase, done, total, values)

    def print(self, text: str) -> None:
        """A line (or several) on the terminal, above what is live, and in log.txt."""
        self._display.print(text)

    def close(self) -> None:
        self._display.close()
        for sink in self._sinks or ():
            sink.close()
        for file in self._files.values():
            file.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open_sinks(self, resumed: Mapping[str, int]) -> list[sinks.Sink]:
        opened: list[sinks.Sink] = []
        if self._section.wandb:
            project, supervised = self._section.wandb_project, self._steps.get("sft", 0)
            sink = sinks.WandbSink(project, self.directory, self._config, supervised, resumed=bool(resumed))
            if sink.note:
                self.print(sink.note)
            opened.append(sink)
        if self._section.tensorboard:
            opened.append(sinks.TensorboardSink(self.directory, resumed))
        return opened

    def _write_log(self, text: str) -> None:
        self._log.write(text + "\n")


class _Appended:
    """A file to which texts are added. It has no buffer: what a full disk has refused must not come up at the end again."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self.name = str(path)

    def write(self, text: str) -> None:
        left = memoryview(text.encode("utf-8", "backslashreplace"))
        while left:
            left = left[self._file.write(left) or 0 :]

    def to_disk(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class StepFile:
    """A file of JSON objects, one a line, each with a `step` that rises.

    resume: keep the lines up to this step; none: begin anew and move what is there aside. last: the step of the last line.
    """

    def __init__(self, path: Path, resume: int | None = None) -> None:
        self.last: int | None = None
        if path.exists():
            if resume is None:
                path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))
            else:
                kept = [line for line in read_steps(path) if line["step"] <= resume]
                part = path.with_name(path.name + ".part")
                with part.open("w", encoding="utf-8") as file:
                    file.writelines(json.dumps(line) + "\n" for line in kept)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(path)
                self.last = int(kept[-1]["step"]) if kept else None
        self._file = _Appended(path)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a line. Floats at full precision; what is not finite as null, which JSON has no number for."""
        if self.last is not None and step <= self.last:
            raise ValueError(f"step={step}: must be above {self.last}, the last one in {self._file.name}")
        self.last = step
        line = {"step": step, **{key: value if math.isfinite(value) else None for key, value in values.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def to_disk(self) -> None:
        self._file.to_disk()

    def close(self) -> None:
        self._file.close()


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a null stays None. A last line that was cut short is left out.

    Raises UsageError, with the line, where one is no step.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    steps: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if number == len(lines):  # what follows the last newline: nothing, or a line cut short
            break
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{path}:{number}: is not a JSON object: {error.msg}") from error
        if not isinstance(found, dict) or not isinstance(found.get("step"), int):
            raise UsageError(f'{path}:{number}: is no step: must be an object with an integer "step"')
        steps.append(found)
    return steps


def read_summary(directory: Path) -> dict[str, float]:
    """The evaluation after a run's last step, with its "step"; empty before the run has ended, or where it was cut short."""
    path = directory / SUMMARY
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:  # no JSON, or no text
        return {}
    return found if isinstance(found, dict) else {}
