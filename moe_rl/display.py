"""Progress on the terminal: one live line where there is one, a plain line a step where there is none."""

from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

# key, its short name, format; of two keys with one name the first that is there
SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("eval/pass_at_1", "pass@1", ".3f"),
    ("sft/loss", "loss", ".3f"),
    ("drift/update/local/expert_change_rate/mean", "change", ".4f"),  # under replay the routes used agree by force
    ("drift/update/expert_change_rate/mean", "change", ".4f"),
    ("ratio/clip_fraction", "clip", ".3f"),
    ("sampling/kept_fraction", "kept", ".2f"),
    ("time/rollout_tokens_per_second", "tok/s", ".0f"),
    ("kl/old_new", "kl", ".1e"),
    ("optimizer/grad_norm", "grad", ".2f"),
    ("time/step_seconds", "s", ".2f"),
)
_NAMES = {"train": "step", "eval": "eval problem"}
_SFT_EVERY = 20  # supervised steps are quick: a plain line for every one would bury the rest


def describe(values: Mapping[str, float]) -> str:
    """ "reward 0.430 clip 0.021 ...": the few metrics that a person follows, in a fixed order."""
    shown: dict[str, str] = {}
    for key, name, form in SHOWN:
        if key in values:
            shown.setdefault(name, f"{name} {values[key]:{form}}")
    return " ".join(shown.values())


class Display:
    """write_log: takes each plain line, whether or not the terminal shows it as such."""

    def __init__(self, console: Console, write_log: Callable[[str], None]) -> None:
        self._console, self._write_log = console, write_log
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def step(self, phase: str, step: int, steps: int | None, values: Mapping[str, float]) -> None:
        """Shows step `step` of `steps` (none: not known)."""
        text = describe(values)
        if phase != "sft" or step % _SFT_EVERY == 0 or step == steps:
            name = _NAMES.get(phase, f"{phase} step")
            line = f"{name} {step}{f'/{steps}' if steps else ''} {text}".rstrip()
            self._write_log(line)
            if not self._console.is_terminal:
                self._console.print(line, markup=False)
        if self._console.is_terminal and steps:
            self._live(phase, step, steps, text)

    def print(self, text: str) -> None:
        """Prints above the live line."""
        self._write_log(text)
        self._console.print(text, markup=False)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _live(self, phase: str, step: int, steps: int, text: str) -> None:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.fields[phase]}"),
                BarColumn(bar_width=10),
                MofNCompleteColumn(),
                TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1), markup=False),
                TimeRemainingColumn(compact=True),
                console=self._console,
                expand=True,
            )
            self._progress.start()
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(text, total=steps, phase=phase, completed=step)
        self._progress.update(self._tasks[phase], description=text, completed=step)
