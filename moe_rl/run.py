"""What a run holds, and how it starts, is saved and ends; its steps are moe_rl/trainer.py's."""

import json

from models.optimizer import Optimizer
from moe_rl import checkpoint, checkpoint_paths, rundir, summary, weights
from moe_rl.checkpoint import Progress, Saver
from moe_rl.collectives import from_main
from moe_rl.config import ReplaySection
from moe_rl.credit import Credit
from moe_rl.critic import Critic
from moe_rl.data import ProblemOrder
from moe_rl.drift.instruments import Instruments
from moe_rl.drift.watch import Watch
from moe_rl.evaluation import evaluate_policy
from moe_rl.identity import checked
from moe_rl.reference import Reference
from moe_rl.replay import ReplayPolicy
from moe_rl.rollouts.dynamic import Sampled
from moe_rl.session import Session
from moe_rl.sft import Supervised
from moe_rl.step_state import StepState
from moe_rl.tracking import read_summary
from moe_rl.update import PolicyUpdate
from parallel.errors import UsageError
from parallel.interruption import Interruption, end_after_saving


class Run:
    """State of a run: the weights live in the session's model, everything else that a step changes in `progress`."""

    def __init__(self, session: Session) -> None:
        self.session, self.config = session, session.config
        self.update = PolicyUpdate(
            session.model, self.config.algorithm, self.config.rollout, self.config.drift, self.config.replay
        )
        self.credit = Credit(self.config, session.groups)
        self.instruments = Instruments(self.update, self.config)
        self.order = ProblemOrder(session.task.train, self.config.run.seed, "train")
        self.progress = Progress(0, 0, 0, kl_coefficient=self.config.algorithm.kl_coefficient, **session.identity)
        self.reference: Reference | None = None
        self.critic: Critic | None = None
        self.optimizer: Optimizer
        self.watch = Watch(self.config.drift.watch)
        self.interruption = Interruption()
        self.begun: StepState | None = None  # a step that a checkpoint was saved within
        self.last_saved = -1
        self.checkpoints = self.config.directory / "checkpoints"
        self.warm_start = self.checkpoints / checkpoint_paths.WARM_START
        self.saver = Saver(self.checkpoints, self.config.checkpoint, session.still_owned)

    def begin(self) -> None:
        """Weights, optimizer and reference: as saved, or from checkpoint.load, or fresh with a warm start."""
        session, config = self.session, self.config
        if (found := checkpoint.intact(self.checkpoints, session.say)) is not None:
            self._prepare_reference(saved=True)
            self._make_optimizers(fresh=False)
            progress = checkpoint.load(found, session.model, self.optimizer, self.critic and self.critic.state)
            self.progress = checked(progress, session.identity, config)
            if self.progress.watch:
                self.watch = Watch.restore(self.config.drift.watch, json.loads(self.progress.watch))
            if self.progress.replay:
                self.update.replay = ReplayPolicy(ReplaySection.model_validate({"mode": self.progress.replay}))
            if self.progress.step:
                self.instruments.resume()
            self.begun = checkpoint.load_begun(found, session.model)
            self.last_saved = self.progress.step
            checkpoint.remove(self.warm_start)  # of a run that was killed before it could
            session.say(f"continuing after step {self.progress.step} from {found}")
            if session.tracker is not None:
                session.tracker.resume(self.progress.step)
                rundir.sort_out(config.directory, after=self.progress.step)
            if self.begun is not None:
                self.take_up(self.begun)
            return
        if session.tracker is not None:
            rundir.sort_out(config.directory, after=None)
        if (source := weights.initial(config)) is not None:
            weights.load(source, session.model)
            session.say(f"weights from {source}")
        elif config.sft.steps:
            session.say(f"warm start: {config.sft.steps} supervised steps")
            Supervised(session, self.warm_start, self.interruption).run()
        self._prepare_reference(saved=False)
        self._make_optimizers(fresh=True)
        session.log(0, evaluate_policy(session), "train")
        if config.sft.steps:
            self.save()  # so that a warm start is made once
            self.saver.finish()
            checkpoint.remove(self.warm_start)

    def take_up(self, state: StepState) -> None:
        """What belongs to a step that has begun, and lies elsewhere than in it."""
        self.instruments.tables, state.watch.progress = state.tables, self.session.progress
        if state.step == 1:
            self.instruments.resume()
        if self.critic is not None and state.critic is not None:
            self.critic.pending = state.critic
        self.write_rollouts(state.step, state.sampled)

    def _make_optimizers(self, *, fresh: bool) -> None:
        """Of the policy, and the critic where there is one, with its own. fresh: not about to be loaded."""
        config, algorithm = self.config, self.config.algorithm
        steps = max(1, config.run.steps - (config.critic.warmup_steps if algorithm.trains_critic else 0))
        a_step = algorithm.minibatches * algorithm.epochs
        self.optimizer = self.session.model.optimizer(config.optimizer, steps * a_step)
        if algorithm.trains_critic:
            updates = max(1, config.run.steps) * a_step
            self.critic = Critic(self.session.model, config.critic, config.run.seed, updates, fresh=fresh)

    def _prepare_reference(self, saved: bool) -> None:
        """The policy that RL starts from, frozen; kept beside the checkpoints so that a continued run has the same."""
        if not self.config.algorithm.kl_coefficient:
            return
        path = self.checkpoints / "reference"
        if saved:
            try:
                checkpoint.load_weights(path, self.session.model, key=None)
            except UsageError as error:
                key = f"algorithm.kl_coefficient={self.config.algorithm.kl_coefficient:g}"
                raise UsageError(
                    f"{error}; {key} compares with it: put back what was there, or begin anew under another run.name"
                ) from error
        else:
            checkpoint.save_weights(path, self.session.model)
        self.reference = Reference(self.session.model, on_cpu=self.config.algorithm.reference_on_cpu)

    def write_rollouts(self, step: int, sampled: Sampled) -> None:
        if self.session.tracker is not None and due(self.config.tracking.rollouts_every, step):
            rundir.write_rollouts(self.config.directory, step, sampled.kept.rollouts)

    def save_where_asked(self, state: StepState | None) -> None:
        """Between two updates, or two steps: where a signal asked for it, saves and ends the run (collective)."""
        if not self.interruption.agreed(self.session.model.device):
            return
        if state is not None or self.last_saved != self.progress.step:
            self.save(state=state)
        self.saver.finish()
        where = f"after step {self.progress.step}" + (f" and {state.done} updates of the next" if state is not None else "")
        self.session.say(f"saved {where}, as a signal asked; the same command goes on from here")
        end_after_saving()

    def save(self, *, pinned: bool = False, state: StepState | None = None) -> None:
        """pinned: what an alarm asked for stays, however many follow. state: of a step that has begun. Written in the
        background, it is visible after `saver.finish`."""
        if state is not None:
            state.tables, state.critic = self.instruments.tables, self.critic and self.critic.pending
        critic = self.critic and self.critic.state
        self.session.progress("save")
        if self.session.tracker is not None:
            self.session.tracker.to_disk()
        self.saver.save(self.progress, self.session.model, self.optimizer, pinned=pinned, critic=critic, begun=state)
        self.last_saved = self.progress.step
        self.session.progress("after save")

    def end(self) -> None:
        """Evaluates what came out, unless that was done, and shows the table."""
        directory, tracker = self.config.directory, self.session.tracker
        after = from_main(read_summary(directory) if tracker is not None else None)
        if after.get("step") != self.progress.step:
            after = {"step": self.progress.step, **evaluate_policy(self.session)}
        if tracker is not None:
            rundir.write_summary(directory, after)
            tracker.print(summary.plain([*rundir.read_metrics(directory), after], directory))


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
