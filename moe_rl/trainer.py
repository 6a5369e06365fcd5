"""The RL loop: rollout -> reward -> old log-probabilities -> advantage -> minibatch updates -> drift -> save -> log."""

import json
from dataclasses import replace

from models.optimizer import Optimizer
from moe_rl import checkpoint, rundir, summary, weights
from moe_rl.algorithms.kl import next_coefficient
from moe_rl.algorithms.loss import KLTerm
from moe_rl.checkpoint import Progress, Saver
from moe_rl.collectives import from_main
from moe_rl.config import ReplaySection, RunConfig
from moe_rl.credit import Credit
from moe_rl.critic import Critic
from moe_rl.data import ProblemOrder
from moe_rl.drift.instruments import Instruments, Look
from moe_rl.drift.watch import Watch, alarm_metrics
from moe_rl.evaluation import evaluate_policy
from moe_rl.identity import checked
from moe_rl.notes import notes
from moe_rl.reference import Reference
from moe_rl.replay import ReplayPolicy
from moe_rl.rollouts.collect import reward_metrics
from moe_rl.rollouts.step import Sampled, sample_step
from moe_rl.session import Session, opened
from moe_rl.sft import supervise
from moe_rl.step_state import StepState
from moe_rl.stopwatch import Stopwatch
from moe_rl.tracking import Phase, read_summary
from moe_rl.types import Rollout
from moe_rl.update import Minibatch, PolicyUpdate, update_metrics
from parallel.interruption import Interruption, end_after_saving


def train(config: RunConfig) -> None:
    """The command `moe-rl train`; continues from the newest complete checkpoint of the run, if there is one."""
    steps: dict[Phase, int] = {"train": config.run.steps, "sft": config.sft.steps}
    with opened(config, steps, resumable="train") as session:
        Trainer(session).run()


class Trainer:
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
        self.saver = Saver(self.checkpoints, self.config.checkpoint)

    def run(self) -> None:
        for note in notes(self.config):
            self.session.say(f"note: {note}")
        with self.interruption.listening():
            self.begin()
            self.steps()
        self.end()

    def steps(self) -> None:
        """Until the last one, or until an alarm or a signal ends the run before."""
        for step in range(self.progress.step + 1, self.config.run.steps + 1):
            metrics = self.step(self.begun or self.begin_step(step))
            self.begun = None
            if _due(self.config.eval.every, step):
                metrics |= evaluate_policy(self.session)
            found, actions = self.look_out(step, metrics)
            metrics |= found
            # before the save: a run that dies in between drops this line when it goes on, rather than missing it
            self.session.log(step, metrics, "train")
            self.saver.publish_finished()
            if _due(self.config.checkpoint.every, step) or step == self.config.run.steps or actions & {"save", "stop"}:
                self.save(pinned=bool(actions & {"save", "stop"}))
            if "stop" in actions and step < self.config.run.steps:
                self.session.say(f"stopped after step {step}; the same command goes on from here")
                break
            self.save_where_asked(None)
        self.saver.finish()

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
            session.say(f"continuing after step {self.progress.step} from {found}")
            if session.tracker is not None:
                session.tracker.resume(self.progress.step)
                rundir.sort_out_traces(config.directory, after=self.progress.step)
            if self.begun is not None:
                self.take_up(self.begun)
            return
        if session.tracker is not None:
            rundir.sort_out_traces(config.directory, after=None)
        if (source := weights.initial(config)) is not None:
            weights.load(source, session.model)
            session.say(f"weights from {source}")
        elif config.sft.steps:
            session.say(f"warm start: {config.sft.steps} supervised steps")
            supervise(session)
        self._prepare_reference(saved=False)
        self._make_optimizers(fresh=True)
        session.log(0, evaluate_policy(session), "train")
        if config.sft.steps:
            self.save()  # so that a warm start is made once

    def take_up(self, state: StepState) -> None:
        """What belongs to a step that has begun, and lies elsewhere than in it."""
        self.instruments.tables = state.tables
        if state.step == 1:
            self.instruments.resume()
        if self.critic is not None and state.critic is not None:
            self.critic.pending = state.critic
        self._write_rollouts(state.step, state.sampled)

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
            checkpoint.load_weights(path, self.session.model, key=None)
        else:
            checkpoint.save_weights(path, self.session.model)
        self.reference = Reference(self.session.model, on_cpu=self.config.algorithm.reference_on_cpu)

    def step(self, state: StepState) -> dict[str, float]:
        """The updates of a step that has begun, and what is known at its end."""
        self.update_models(state)
        watch = state.watch
        with watch("drift"):
            metrics = state.metrics | state.found
            metrics |= self.instruments.after_updates(state.look, self.progress.policy_version)
        if self.critic is not None:
            metrics |= self.critic.metrics()
        metrics |= update_metrics(state.updates, self.session.groups, self.config.model.moe_layers)
        if state.updates:
            metrics["optimizer/lr"] = state.lr
        if self.reference is not None:
            metrics["kl/coefficient"] = self.progress.kl_coefficient
        self.progress = replace(
            self.progress,
            step=state.step,
            position=self.progress.position + state.sampled.problems,
            policy_version=self.progress.policy_version + len(state.updates),
            kl_coefficient=self.next_kl_coefficient(metrics),
        )
        times = watch.metrics()
        tokens = state.sampled.everything.tokens
        return metrics | times | {"time/rollout_tokens_per_second": tokens / times["time/rollout_seconds"]}

    def begin_step(self, step: int) -> StepState:
        """One rollout batch, scored, with advantages."""
        watch, look = Stopwatch(), self.instruments.plan(step)
        sampled = self.rollout(step, watch, routes=self.update.replay.replays_rollout or look.close)
        self._write_rollouts(step, sampled)
        batch = sampled.kept
        minibatches = self.update.prepare(batch.rollouts, self.config.run.seed, step, batch.routes)
        metrics = reward_metrics(sampled.everything) | sampled.metrics
        metrics |= self.score(minibatches, batch.rollouts, look, watch)
        metrics |= self.credit.assign(minibatches, batch.rollouts, self.progress.kl_coefficient)
        return StepState(step, look, watch, sampled, minibatches, metrics, self.optimizer.lr)

    def _write_rollouts(self, step: int, sampled: Sampled) -> None:
        if self.session.tracker is not None and _due(self.config.tracking.rollouts_every, step):
            rundir.write_rollouts(self.config.directory, step, sampled.kept.rollouts)

    def rollout(self, step: int, watch: Stopwatch, *, routes: bool) -> Sampled:
        position = self.progress.position
        return sample_step(
            self.session, lambda first, count: self.order.take(position + first, count), step, watch, routes=routes
        )

    def score(self, minibatches: list[Minibatch], rollouts: list[Rollout], look: Look, watch: Stopwatch) -> dict[str, float]:
        """The passes without gradients: the policy that sampled, its drift so far, the reference, the critic."""
        self.instruments.mark(minibatches, look)
        with watch("old_logprobs"):
            self.update.score_old(minibatches)
            metrics = self.update.correct(minibatches)
        with watch("drift"):
            metrics |= self.instruments.before_updates(minibatches, rollouts, look)
        if self.reference is not None:
            with watch("reference"):
                self.update.score_reference(minibatches, self.reference)
        if self.critic is not None:
            with watch("critic"):
                self.critic.score(minibatches)
        return metrics

    def update_models(self, state: StepState) -> None:
        """One optimizer step a minibatch and epoch that is left, of policy and critic, and what the instruments see around the
        policy's."""
        section, look, watch = self.config.algorithm, state.look, state.watch
        rollouts = state.sampled.kept.rollouts
        kl = None
        if self.reference is not None and not section.kl_in_reward:
            kl = KLTerm(section.estimates_kl, self.progress.kl_coefficient)
        learns = self.critic is None or state.step > self.config.critic.warmup_steps
        planned = state.minibatches * section.epochs
        while state.done < len(planned):
            self.save_where_asked(state)
            minibatch, last = planned[state.done], state.done == len(planned) - 1
            if self.critic is not None:
                with watch("critic"):
                    self.critic.step(minibatch)
            if learns:
                with watch("drift"):
                    other = self.instruments.before_update(minibatch, rollouts, look, last)
                with watch("update"):
                    state.updates.append(self.update.step(minibatch, self.optimizer, kl, moved=state.done > 0))
                with watch("drift"):
                    state.found |= self.instruments.after_update(minibatch, rollouts, look, other)
            state.done += 1

    def next_kl_coefficient(self, metrics: dict[str, float]) -> float:
        section, now = self.config.algorithm, self.progress.kl_coefficient
        if self.reference is None or section.kl_target is None or "kl/ref" not in metrics:
            return now
        return next_coefficient(
            now, metrics["kl/ref"], section.kl_target, section.kl_horizon, self.config.rollout.batch, section.kl_error_limit
        )

    def look_out(self, step: int, metrics: dict[str, float]) -> tuple[dict[str, float], set[str]]:
        """The stability watch's alarms, said and as metrics, and what they ask for: the same on every rank."""
        alarms = self.watch.look(step, metrics)
        for alarm in alarms:
            self.session.say(alarm.text)
        actions = {str(alarm.action) for alarm in from_main(alarms)}
        if "replay" in actions and self.update.replay.source == "off":
            self.update.replay = ReplayPolicy(ReplaySection(mode="r2"))
            self.progress = replace(self.progress, replay="r2")
            self.session.say(f"replay.mode=r2 from step {step + 1} on")
        self.progress = replace(self.progress, watch=json.dumps(self.watch.state(), allow_nan=False))
        return alarm_metrics(alarms), actions

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
        self.saver.save(self.progress, self.session.model, self.optimizer, pinned=pinned, critic=critic, begun=state)
        self.last_saved = self.progress.step

    def end(self) -> None:
        """Evaluates what came out, unless that was done, and shows the table."""
        directory, tracker = self.config.directory, self.session.tracker
        after = from_main(read_summary(directory) if tracker is not None else None)
        if after.get("step") != self.progress.step:
            after = {"step": self.progress.step, **evaluate_policy(self.session)}
        if tracker is not None:
            rundir.write_summary(directory, after)
            tracker.print(summary.plain([*rundir.read_metrics(directory), after], directory))


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
