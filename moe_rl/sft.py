"""Supervised training on a task's own answers: a command of its own, and the warm start of RL."""

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


def supervise(session: Session, saver: Saver | None = None, found: Path | None = None) -> None:
    """`sft.steps` steps of next-token loss on the answers, mean over a step's tokens that are trained (collective); fewer
    where `sft.stop_at` ends them.

    saver: of a run that is supervised alone, which saves checkpoints, the last one as that of step `sft.steps`. found: the one
    that it goes on from.
    """
    section, problems = session.config.sft, session.task.train
    if section.too_long == "skip":
        problems = fitting(problems, session.encoder, session.config.model.max_positions, section.train_on, section.too_long)
        if left_out := len(session.task.train) - len(problems):
            session.say(f"{left_out} of {len(session.task.train)} examples exceed model.max_positions and are left out")
    settings = OptimizerConfig(
        lr=section.lr, warmup_updates=section.warmup_updates, schedule=section.schedule, weight_decay=section.weight_decay
    )
    optimizer = session.model.optimizer(settings, section.steps)
    order = ProblemOrder(problems, session.config.run.seed, "sft")
    progress = Progress(0, 0, 0, 0.0, **session.identity)
    if found is not None:
        progress = checked(checkpoint.load(found, session.model, optimizer), session.identity, session.config)
        session.say(f"continuing after step {progress.step} from {found}")
        if session.tracker is not None:
            session.tracker.resume(progress.step, "sft")
    for step in range(progress.step + 1, section.steps + 1):
        watch = Stopwatch(session.progress)
        with watch("update"):
            metrics = _step(session, optimizer, order.take((step - 1) * section.batch, section.batch))
        session.log(step, metrics | watch.metrics(), "sft")
        if section.stop_at is not None and step % section.check_every == 0:
            passed = evaluate_policy(session, session.task.train)["eval/pass_at_1"]
            if passed >= section.stop_at:
                session.say(
                    f"supervised step {step}: {passed:.3f} of training problems answered, sft.stop_at={section.stop_at}"
                )
                break
        if saver is not None:
            saver.publish_finished()
            if session.config.checkpoint.every and step % session.config.checkpoint.every == 0 and step < section.steps:
                saver.save(replace(progress, step=step), session.model, optimizer)
    if saver is not None:
        if found is None or progress.step < section.steps:
            saver.save(replace(progress, step=section.steps), session.model, optimizer)
        saver.finish()


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
        directory = config.directory / "checkpoints"
        found = checkpoint.intact(directory, session.say)
        if found is None and (source := weights.initial(config)) is not None:
            weights.load(source, session.model)
        supervise(session, Saver(directory, config.checkpoint), found)
        metrics = evaluate_policy(session)
        path = checkpoint_paths.newest(directory)
        session.say(f"held-out pass@1 {metrics['eval/pass_at_1']:.3f}; checkpoint: {path}")
