"""Everything a command works with on one rank: process groups, model, task, tokenizer, engine, and the run's directory."""

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch.distributed as dist

from models import build
from models.model import MoEModel
from moe_rl import config as configuration
from moe_rl import rundir
from moe_rl.cluster import as_text
from moe_rl.config import RunConfig
from moe_rl.identity import identity
from moe_rl.ownership import check_free, nothing_to_check, owned
from moe_rl.rollouts.embedded import EmbeddedEngine
from moe_rl.rollouts.engine import Engine
from moe_rl.tasks import Encoder, Task, Tokenizer, build_encoder, build_task, build_tokenizer, check_stops
from moe_rl.tracking import EVALUATIONS, Phase, Tracker
from moe_rl.types import Sampling
from parallel import runtime
from parallel.errors import UsageError
from parallel.groups import Groups, process_groups
from parallel.preflight import RankReport, preflight
from parallel.runtime import Runtime
from parallel.watchdog import Watchdog


def _nobody_watches(phase: str) -> None:
    pass


@dataclass(frozen=True)
class Session:
    """tracker: on the main rank only. progress: told, by the name of what begins, that this rank gets on. still_owned: called
    on the main rank before the run's files are written, raises UsageError where another start of the run has them now."""

    config: RunConfig
    runtime: Runtime
    groups: Groups
    model: MoEModel
    task: Task
    tokenizer: Tokenizer
    engine: Engine
    tracker: Tracker | None
    progress: Callable[[str], None] = _nobody_watches
    still_owned: Callable[[], None] = nothing_to_check

    def say(self, text: str) -> None:
        if self.tracker is not None:
            self.tracker.print(text)

    def log(self, step: int, metrics: Mapping[str, float], phase: Phase) -> None:
        if self.tracker is not None:
            self.still_owned()
            self.tracker.log(step, metrics, phase)

    @cached_property
    def identity(self) -> Mapping[str, str]:
        """Fingerprints of problems and vocabulary, which a run keeps."""
        return identity(self.task, self.tokenizer)

    @cached_property
    def encoder(self) -> Encoder:
        return build_encoder(self.tokenizer, self.config.task, self.config.rollout)

    def sampling(self, temperature: float) -> Sampling:
        """As rollouts are sampled; evaluation has another temperature."""
        rollout = self.config.rollout
        texts, ids = check_stops(rollout.stop, self.tokenizer)
        greedy = temperature == 0
        return Sampling(
            rollout.max_response_tokens,
            temperature,
            1.0 if greedy else rollout.top_p,
            0 if greedy else rollout.top_k,
            self.tokenizer.stop_ids | ids | set(rollout.stop_token_ids),
            rollout.logprobs == "full",
            texts,
        )


@contextlib.contextmanager
def opened(
    config: RunConfig, steps: Mapping[Phase, int], *, resumable: Phase | None = None, evaluates: bool = False
) -> Iterator[Session]:
    """Starts this rank's part and ends it. steps: how many each phase will have, for the display.

    resumable: the phase that goes on in the run's own directory. evaluates: trains nothing, so that the task may lack
    training problems, and writes below RUN/eval alone.
    """
    run = config.run
    with runtime.started(run.seed, run.threads, config.parallel.timeout_seconds) as here:
        config.parallel.check_backend(here.backend, build.transformer_engine_is_present())
        with contextlib.ExitStack() as stack:
            groups = stack.enter_context(process_groups(config.parallel))
            stack.enter_context(one_line_for_files_of(config.directory))
            directory = config.directory / EVALUATIONS if evaluates else config.directory
            reports, warnings = preflight(groups, here) if run.preflight and here.world_size > 1 else ([], [])
            watchdog = Watchdog(run.hang_seconds, directory, here)
            stack.enter_context(watchdog.watching())
            task, tokenizer = build_task(config.task, trains=not evaluates), build_tokenizer(config.model.tokenizer)
            model = MoEModel(config.model, groups, here.device, run.seed)
            tracker, still_owned = None, nothing_to_check
            if here.is_main:
                moved = None
                if not evaluates:
                    check_free(directory)
                    moved = rundir.make_room(config, resumable)
                    still_owned = stack.enter_context(owned(directory))
                resolved = None if evaluates else configuration.dump(config)
                tracker = stack.enter_context(Tracker(config.tracking, directory, resolved, steps))
                if moved:
                    tracker.print(moved)
                if reports and not evaluates:
                    tracker.print(_written(reports, warnings, directory / "preflight.txt"))
            dist.barrier()  # nobody looks for checkpoints before
            engine = EmbeddedEngine(model, config.rollout.max_batch, tokenizer.decode, watchdog.progress)
            session = Session(config, here, groups, model, task, tokenizer, engine, tracker, watchdog.progress, still_owned)
            for note in [*warnings, *session.encoder.notes()]:
                session.say(f"note: {note}")
            yield session


def _written(reports: Sequence[RankReport], warnings: Sequence[str], path: Path) -> str:
    """A line about the preflight, whose findings are now in the file."""
    path.write_text(as_text(reports, warnings) + "\n", encoding="utf-8")
    nodes = len({report.host for report in reports})
    return f"preflight: {len(reports)} ranks on {nodes} node{'s' * (nodes > 1)}, every group works; {path}"


@contextlib.contextmanager
def one_line_for_files_of(directory: Path) -> Iterator[None]:
    """For all that a run reads and writes beside its checkpoints. What a user's own code does to other files is left alone."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
        named = isinstance(error.filename, str | Path) and _is_in(directory, Path(error.filename))
        if not full and not named:
            raise
        place = error.filename or directory
        raise UsageError(
            f"{place}: cannot be {'written' if full else 'used'}: {error.strerror}; {'make room or ' if full else ''}mend it, "
            "and the same command goes on from the newest checkpoint"
        ) from error


def _is_in(directory: Path, path: Path) -> bool:
    return path.absolute().is_relative_to(directory.absolute())
