"""Supervised training on a task's own answers: a command of its own, and the warm start of RL."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from models.config import OptimizerConfig
from models.model import Loss, Scores
from models.optimizer import Optimizer
from moe_rl import checkpoint, checkpoint_paths, weights
from moe_rl.checkpoint import Progress, Saver
from moe_rl.collectives import reduce_metrics
from moe_rl.config import RunConfig
from moe_rl.data import ProblemOrder
from moe_rl.evaluation import evaluate_policy
from moe_rl.identity import checked
from moe_rl.metrics import Metrics
from moe_rl.microbatches import Scored, cut
from moe_rl.session import Session, opened
from moe_rl.stopwatch import Stopwatch
from moe_rl.tasks import example_that_fits, fitting
from moe_rl.types import Problem
from parallel.interruption import Interruption, end_after_saving


class Supervised:
    """`sft.steps` steps of next-token loss on the answers, the mean over a step's tokens that are trained; fewer where
    `sft.stop_at` ends them. Every method is collective.

    directory: of its checkpoints. It goes on from the newest there, and saves the last one as that of step `sft.steps`.
    interruption: listening; where a signal asks for it, the steps are saved and the process ends.
    """

    def __init__(self, session: Session, directory: Path, interruption: Interruption) -> None:
        self.session, self.section, self.interruption = session, session.config.sft, interruption
        self.directory, self.saver = directory, Saver(directory, session.config.checkpoint, session.still_owned)
        section = self.section
        settings = OptimizerConfig(
            lr=section.lr, warmup_updates=section.warmup_updates, schedule=section.schedule, weight_decay=section.weight_decay
        )
        self.optimizer = session.model.optimizer(settings, section.steps)
        self.order = ProblemOrder(self._problems(), session.config.run.seed, "sft")
        self.progress = Progress(0, 0, 0, 0.0, **session.identity)
        self.last_saved = -1

    def run(self) -> None:
        self.begin()
        batch, every = self.section.batch, self.session.config.checkpoint.every
        for step in range(self.progress.step + 1, self.section.steps + 1):
            self.save_where_asked()
            watch = Stopwatch(self.session.progress)
            with watch("update"):
                metrics = _step(self.session, self.optimizer, self.order.take((step - 1) * batch, batch))
            self.session.log(step, metrics | watch.metrics(), "sft")
            self.progress = replace(self.progress, step=step)
            if self.answers_enough():
                break
            self.saver.publish_finished()
            if every and step % every == 0 and step < self.section.steps:
                self.save()
        self.progress = replace(self.progress, step=max(self.progress.step, self.section.steps))  # what stop_at ended is done
        if self.last_saved < self.progress.step:
            self.save()
        self.saver.finish()
        self.save_where_asked()

    def begin(self) -> None:
        """Weights and optimizer: as saved, or from checkpoint.load, or fresh."""
        session, config = self.session, self.session.config
        if (found := checkpoint.intact(self.directory, session.say)) is not None:
            self.progress = checked(checkpoint.load(found, session.model, self.optimizer), session.identity, config)
            self.last_saved = self.progress.step
            session.say(f"continuing after step {self.progress.step} from {found}")
            if session.tracker is not None:
                session.tracker.resume(self.progress.step, "sft")
        elif (source := weights.initial(config)) is not None:
            weights.load(source, session.model)

    def answers_enough(self) -> bool:
        """Whether `sft.stop_at` ends the training after this step."""
        wanted, step = self.section.stop_at, self.progress.step
        if wanted is None or step % self.section.check_every:
            return False
        passed = evaluate_policy(self.session, self.session.task.train)["eval/pass_at_1"]
        if passed < wanted:
            return False
        self.session.say(f"supervised step {step}: {passed:.3f} of training problems answered, sft.stop_at={wanted}")
        return True

    def save(self) -> None:
        """Written in the background, it is visible after `saver.finish`."""
        self.session.progress("save")
        self.saver.save(self.progress, self.session.model, self.optimizer)
        self.last_saved = self.progress.step
        self.session.progress("after save")

    def save_where_asked(self) -> None:
        """Between two steps: where a signal asked for it, saves and ends the run."""
        if not self.interruption.agreed(self.session.model.device):
            return
        if self.progress.step not in (0, self.last_saved):
            self.save()
        self.saver.finish()
        self.session.say(
            f"ended after supervised step {self.progress.step}, as a signal asked; the same command goes on from here"
        )
        end_after_saving()

    def _problems(self) -> Sequence[Problem]:
        """Those to train on: where `sft.too_long` says so, without those that do not fit."""
        session, section, problems = self.session, self.section, self.session.task.train
        if section.too_long != "skip":
            return problems
        fit = fitting(problems, session.encoder, session.config.model.max_positions, section.train_on, section.too_long)
        if left_out := len(problems) - len(fit):
            session.say(f"{left_out} of {len(problems)} examples exceed model.max_positions and are left out")
        return fit


def _step(session: Session, optimizer: Optimizer, problems: list[Problem]) -> dict[str, float]:
    model, config = session.model, session.config
    examples = [
        example
        for problem in problems
        if (example := example_that_fits(problem, session.encoder, config.model.max_positions, config.sft.train_on, "error"))
    ]
    sequences = [Scored(e.ids[: e.prompt], e.ids[e.prompt :]) for e in examples]
    microbatches = cut(model, sequences, range(len(sequences)), config.algorithm.microbatch_tokens)
    targets = sum(sum(e.trained) for e in examples)
    optimizer.zero_grad()
    losses = [
        _loss(torch.tensor([t for i in m.members for t in examples[i].trained], dtype=torch.bool, device=model.device), targets)
        for m in microbatches
    ]
    tokens = sum(s.entering for s in sequences)
    results = model.accumulate_gradients([m.stream for m in microbatches], losses, tokens)
    lr, norm = optimizer.lr, optimizer.step()
    metrics = None
    if results:
        metrics = Metrics()
        for result in results:
            metrics.merge(result)
    return reduce_metrics(metrics, session.groups) | {"optimizer/grad_norm": norm, "optimizer/lr": lr}


def _loss(trained: Tensor, targets: int) -> Loss:
    """trained: which of a microbatch's scored tokens count. targets: how many do in the step, on all ranks."""

    def loss(scores: Scores) -> tuple[Tensor, Metrics]:
        negative = -scores.logprobs.where(trained, 0.0).sum()
        metrics = Metrics()
        metrics.add("sft/loss", negative.detach(), trained.sum())
        return negative / targets, metrics

    return loss


def sft(config: RunConfig) -> None:
    """The command `moe-rl sft`: from fresh weights or checkpoint.load to a checkpoint; continues from the newest complete one
    of the run, if there is one."""
    with opened(config, {"sft": config.sft.steps}, resumable="sft") as session:
        directory, interruption = config.directory / "checkpoints", Interruption()
        with interruption.listening():
            Supervised(session, directory, interruption).run()
        metrics = evaluate_policy(session)
        path = checkpoint_paths.newest(directory)
        session.say(f"held-out pass@1 {metrics['eval/pass_at_1']:.3f}; checkpoint: {path}")
