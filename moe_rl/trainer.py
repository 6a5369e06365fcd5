"""The RL loop: rollout -> reward -> old log-probabilities -> advantage -> minibatch updates -> drift -> save -> log."""

import json
from dataclasses import replace

from moe_rl.algorithms.kl import next_coefficient
from moe_rl.algorithms.loss import KLTerm
from moe_rl.collectives import from_main
from moe_rl.config import ReplaySection, RunConfig
from moe_rl.drift.instruments import Look
from moe_rl.drift.watch import alarm_metrics
from moe_rl.evaluation import evaluate_policy
from moe_rl.notes import notes
from moe_rl.replay import ReplayPolicy
from moe_rl.rollouts.collect import reward_metrics
from moe_rl.rollouts.step import Sampled, sample_step
from moe_rl.run import Run, due
from moe_rl.session import opened
from moe_rl.step_state import StepState
from moe_rl.stopwatch import Stopwatch
from moe_rl.tracking import Phase
from moe_rl.types import Rollout
from moe_rl.update import Minibatch, update_metrics


def train(config: RunConfig) -> None:
    """The command `moe-rl train`; continues from the newest complete checkpoint of the run, if there is one."""
    steps: dict[Phase, int] = {"train": config.run.steps, "sft": config.sft.steps}
    with opened(config, steps, resumable="train") as session:
        Trainer(session).run()


class Trainer(Run):
    """A run whose steps are taken."""

    def run(self) -> None:
        for note in notes(self.config):
            self.session.say(f"note: {note}")
        with self.interruption.listening():
            self.begin()
            self.save_where_asked(None)
            self.steps()
        self.end()

    def steps(self) -> None:
        """Until the last one, or until an alarm or a signal ends the run before."""
        for step in range(self.progress.step + 1, self.config.run.steps + 1):
            metrics = self.step(self.begun or self.begin_step(step))
            self.begun = None
            if due(self.config.eval.every, step):
                metrics |= evaluate_policy(self.session)
            found, actions = self.look_out(step, metrics)
            metrics |= found
            # before the save: a run that dies in between drops this line when it goes on, rather than missing it
            self.session.log(step, metrics, "train")
            self.saver.publish_finished()
            if due(self.config.checkpoint.every, step) or step == self.config.run.steps or actions & {"save", "stop"}:
                self.save(pinned=bool(actions & {"save", "stop"}))
            if "stop" in actions and step < self.config.run.steps:
                self.session.say(f"stopped after step {step}; the same command goes on from here")
                break
            self.save_where_asked(None)
        self.saver.finish()

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
        watch, look = Stopwatch(self.session.progress), self.instruments.plan(step)
        sampled = self.rollout(step, watch, routes=self.update.replay.replays_rollout or look.close)
        self.write_rollouts(step, sampled)
        batch = sampled.kept
        minibatches = self.update.prepare(batch.rollouts, self.config.run.seed, step, batch.routes)
        metrics = reward_metrics(sampled.everything) | sampled.metrics
        metrics |= self.score(minibatches, batch.rollouts, look, watch)
        metrics |= self.credit.assign(minibatches, batch.rollouts, self.progress.kl_coefficient)
        return StepState(step, look, watch, sampled, minibatches, metrics, self.optimizer.lr)

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
