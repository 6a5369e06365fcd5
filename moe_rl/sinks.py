"""Where metrics go beside the run directory. The only file that imports wandb and TensorBoard, on use."""

import importlib.util
import netrc
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from parallel.errors import UsageError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Sink(Protocol):
    """A place for metrics."""

    def log(self, step: int, values: Mapping[str, float], phase: str) -> None: ...

    def close(self) -> None: ...


class WandbSink:
    """A wandb run below `directory`/wandb, offline where no account is known. A resumed run goes on under the same id: a step
    that is made again has the place that it had, so that wandb keeps it once.

    supervised: steps that come before the first of RL. note: a line for the person, or nothing.
    """

    def __init__(self, project: str, directory: Path, config: Mapping[str, Any], supervised: int, *, resumed: bool) -> None:
        import wandb

        self._before = {"train": supervised + 1 if supervised else 0, "sft": 0}

        identity = directory / "wandb" / "run-id.txt"
        known = identity.read_text(encoding="utf-8").strip() if resumed and identity.exists() else None
        offline = "WANDB_MODE" not in os.environ and not wandb_account()
        try:
            self._run = wandb.init(
                project=project,
                name=directory.name,
                dir=str(directory),
                config=dict(config),
                id=known,
                resume="allow" if known else None,
                mode="offline" if offline else None,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            text = " ".join(str(error).split())
            raise UsageError(f"tracking.wandb=true: {text}; WANDB_MODE=offline writes without a server") from error
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("sft/*", step_metric="sft/step")
        identity.parent.mkdir(exist_ok=True)
        identity.write_text(self._run.id + "\n", encoding="utf-8")
        self.note = ""
        if offline:
            folder = Path(self._run.settings.sync_dir)
            folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
            self.note = f"wandb: no API key (WANDB_API_KEY or `wandb login`), so offline; to upload: wandb sync '{folder}'"
        elif self._run.url:
            self.note = f"wandb: {self._run.url}"

    def log(self, step: int, values: Mapping[str, float], phase: str) -> None:
        if phase != "train":  # names that phases share have another axis there
            values = {key if key.startswith(f"{phase}/") else f"{phase}/{key}": value for key, value in values.items()}
        self._run.log({**values, "step" if phase == "train" else f"{phase}/step": step}, step=self._before[phase] + step)

    def close(self) -> None:
        self._run.finish()


def wandb_account() -> bool:
    """Whether an API key is known: in the environment, or in the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    names = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in map(os.path.expanduser, names):
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


class TensorboardSink:
    """TensorBoard event files in `directory`/tensorboard, those of supervised steps in its sft/; `tensorboard --logdir runs`
    shows them. resumed: by phase, the step that it goes on after; what an earlier start left of another counts no more."""

    def __init__(self, directory: Path, resumed: Mapping[str, int]) -> None:
        check_tensorboard()
        self._directory, self._resumed = directory / "tensorboard", resumed
        self._writers: dict[str, SummaryWriter] = {}

    def log(self, step: int, values: Mapping[str, float], phase: str) -> None:
        if phase not in self._writers:
            self._writers[phase] = self._open(phase)
        for key, value in values.items():
            self._writers[phase].add_scalar(key, value, step)
        self._writers[phase].flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _open(self, phase: str) -> "SummaryWriter":
        """Phases have steps and names in common: each has a folder, so that neither hides or doubles the other's."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self._directory if phase == "train" else self._directory / phase
        return SummaryWriter(str(folder), purge_step=self._resumed.get(phase, -1) + 1)


def check_tensorboard() -> None:
    """Raises UsageError where TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError("tracking.tensorboard=true: TensorBoard is not installed; pip install 'moe-rl[tensorboard]'")
