"""Writes checkpoints: planned and copied by all ranks together, written by each, published by all together."""

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from models.convert import manifest
from models.convert.files import keep_with
from models.convert.manifest import Entry
from models.model import MoEModel
from models.optimizer import Optimizer
from moe_rl import checkpoint_paths
from moe_rl.checkpoint import begun_step, files
from moe_rl.checkpoint.agreement import main_does, said
from moe_rl.checkpoint.contents import CriticState, Progress, random_states, trained, weights
from moe_rl.checkpoint.shards import Shards
from moe_rl.checkpoint_paths import CRITIC, begun_layout
from moe_rl.config import CheckpointSection
from moe_rl.ownership import nothing_to_check
from parallel.errors import UsageError

if TYPE_CHECKING:
    from moe_rl.step_state import StepState


class Saver:
    """Saves a run's checkpoints, in the background where the settings say so. Every method is collective.

    In the background: `save` copies the state and returns, a thread of each rank writes the copy, and the checkpoint becomes
    visible at the first `publish_finished` that finds all ranks done. At most one is under way: `save` and `finish` wait.
    """

    def __init__(self, directory: Path, section: CheckpointSection, still_owned: Callable[[], None] = nothing_to_check) -> None:
        """still_owned: called on the main rank before anything is changed in the directory; may raise UsageError."""
        self._directory, self._section, self._still_owned = directory, section, still_owned
        self._pending: _Pending | None = None

    def save(
        self,
        progress: Progress,
        model: MoEModel,
        optimizer: Optimizer,
        *,
        pinned: bool = False,
        critic: CriticState | None = None,
        begun: "StepState | None" = None,
    ) -> None:
        """As the function `save`. begun: a step within which this is, of each rank.

        Raises UsageError where this one, or the one before, could not be written.
        """
        self.finish()
        main_does(self._still_owned)
        states = _states(progress, model, optimizer, critic)
        target = self._directory / checkpoint_paths.name(progress.step, begun and begun.done)
        self._pending = _Pending(target, states, model, self._section.asynchronous, pinned, begun)
        if not self._section.asynchronous:
            self.finish()

    def publish_finished(self) -> None:
        """Call at every step boundary: makes a checkpoint visible once it is written. Raises as `save` does."""
        if self._pending is not None and self._pending.is_written():
            self.finish()

    def finish(self) -> None:
        """Waits for what is under way, and makes it visible. Call before the run ends, also where a signal ends it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            main_does(self._still_owned)
            pending.publish()
            try:
                main_does(lambda: files.retire(self._directory, self._section.keep, self._section.keep_every))
            except UsageError as error:
                raise UsageError(
                    f"{error}; the new checkpoint is complete: remove the older one, or raise checkpoint.keep, and the same "
                    "command goes on"
                ) from error


def save(
    directory: Path,
    progress: Progress,
    model: MoEModel,
    optimizer: Optimizer,
    keep: int,
    *,
    pinned: bool = False,
    critic: CriticState | None = None,
) -> Path:
    """Saves weights, optimizer, schedule, every rank's random state and `progress` (collective); keeps the newest `keep`.

    pinned: this one stays, and does not count among them. critic: weights, optimizer and schedule of it are saved too.
    Raises UsageError, and leaves what was there, where it cannot be written.
    """
    Saver(directory, CheckpointSection(keep=keep)).save(progress, model, optimizer, pinned=pinned, critic=critic)
    return directory / checkpoint_paths.name(progress.step)


def save_weights(path: Path, model: MoEModel) -> None:
    """Weights alone, for `load_weights` (collective)."""
    _Pending(path, [("", weights(model))], model, background=False, pinned=False).publish()


def remove(directory: Path) -> None:
    """A directory of checkpoints that nothing goes on from any more, if it is there (collective)."""
    main_does(lambda: files.remove(directory))


def _states(
    progress: Progress, model: MoEModel, optimizer: Optimizer, critic: CriticState | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """One at a time, and each into its folder ("": the checkpoint itself): a state holds gathered moments."""
    yield "", trained(model, optimizer) | {"progress": asdict(progress), "random": random_states()}
    if critic is not None:
        yield CRITIC, trained(*critic)


class _Pending:
    """One checkpoint until it is visible. background: its state is copied, and a thread writes the copy; else it is written
    when this returns."""

    def __init__(
        self,
        target: Path,
        states: Iterable[tuple[str, dict[str, Any]]],
        model: MoEModel,
        background: bool,
        pinned: bool,
        begun: "StepState | None" = None,
    ) -> None:
        self._target, self._part, self._model, self._pinned = target, files.part_of(target), model, pinned
        self._entries: dict[str, Entry] = {}  # of the files that this rank wrote
        self._thread: threading.Thread | None = None
        self._broke_off = background  # until the thread has ended well
        self._wrong = ""  # the first that was: what goes well after it mends nothing
        self._shards: list[Shards] = []
        self._together(lambda: files.begin(target))
        for folder, state in states:
            self._together(lambda folder=folder: (self._part / folder).mkdir(exist_ok=True))
            shards = Shards(state, self._part / folder, copied=background)
            self._shards.append(shards)
            if not background:
                self._write(lambda shards=shards: self._write_shards([shards]))
        if begun is not None:
            self._together(lambda: begun_layout(self._part).parent.mkdir())
            self._write(lambda: self._write_begun(begun))
        if background:
            self._thread = threading.Thread(target=self._write_behind, name="checkpoint", daemon=True)
            self._thread.start()

    def is_written(self) -> bool:
        """Whether every rank has written its files, or failed (collective)."""
        running = torch.tensor(int(self._thread is not None and self._thread.is_alive()), device=self._model.device)
        dist.all_reduce(running, dist.ReduceOp.MAX)
        return not int(running)

    def publish(self) -> None:
        """Waits for the files of all ranks, lists them in the manifest, looks at their sizes and renames (collective).

        Raises UsageError, and leaves nothing of this one, where a rank could not write.
        """
        if self._thread is not None:
            self._thread.join()
        if self._broke_off:
            self._wrong = self._wrong or f"{self._target}: its writing thread broke off"
        mine = (self._wrong, self._entries, [shards.results for shards in self._shards])
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
        self._together(lambda: self._finish(everywhere))

    def _write_behind(self) -> None:
        """In the thread."""
        self._write(lambda: self._write_shards(self._shards))
        self._broke_off = False

    def _write(self, work: Callable[[], None]) -> None:
        """Unless something was wrong before."""
        if self._wrong:
            return
        try:
            work()
        except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of what a file raises
            self._wrong = said(error)

    def _write_shards(self, several: Sequence[Shards]) -> None:
        """This rank's files. No collectives: it may run beside training."""
        for shards in several:
            for path in shards.write():
                self._stored(path)  # Megatron's writer asks for it before its last bytes are handed over

    def _write_begun(self, begun: "StepState") -> None:
        """At once: a run that saves within a step is about to end."""
        for path in begun_step.write(self._part, begun, self._model.groups.parallel):
            self._stored(path)

    def _stored(self, path: Path) -> None:
        files.to_disk(path)
        self._entries[path.relative_to(self._part).as_posix()] = manifest.digest(path)

    def _finish(self, everywhere: Sequence[tuple[str, dict[str, Entry], list[list[Any]]]]) -> None:
        """On rank 0."""
        if wrong := next((wrong for wrong, *_ in everywhere if wrong), ""):
            raise UsageError(wrong)
        for number, shards in enumerate(self._shards):
            shards.finish([results[number] for *_, results in everywhere])
        keep_with(self._part, self._model.config)
        entries = manifest.listed(self._part, {name: entry for _, known, _ in everywhere for name, entry in known.items()})
        for name in entries:
            files.to_disk(self._part / name)
        manifest.write(self._part, entries)
        if wrong := manifest.wrong_size(self._part, entries):
            raise UsageError(wrong)
        if self._pinned:
            (self._part / files.PINNED).touch()
        files.publish(self._target)

    def _together(self, work: Callable[[], None]) -> None:
        """`main_does`, after which nothing stays of a checkpoint that cannot be saved."""
        try:
            main_does(work)
        except UsageError as error:
            if dist.get_rank() == 0:
                shutil.rmtree(self._part, ignore_errors=True)
            raise UsageError(
                f"{self._target}: cannot be saved: {error}; what was saved before is as it was: make room or mend it, and the "
                "same command goes on from there"
            ) from error
