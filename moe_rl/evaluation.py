"""pass@1 and pass@k on held-out problems."""

import math
from collections.abc import Sequence
from pathlib import Path

from moe_rl import checkpoint, checkpoint_paths
from moe_rl.config import RunConfig
from moe_rl.rollouts.collect import collect
from moe_rl.session import Session, opened
from moe_rl.stopwatch import Stopwatch
from moe_rl.types import Problem
from parallel.errors import UsageError


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k responses is correct (Chen et al., arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def evaluate_policy(session: Session, problems: Sequence[Problem] | None = None) -> dict[str, float]:
    """`eval/...` of the present weights (collective). The problems and the seeds are the same at every call.

    problems: those held out, where none are given; the first eval.problems of them.
    """
    section, watch = session.config.eval, Stopwatch()
    problems = (session.task.heldout if problems is None else problems)[: section.problems]
    batch = collect(session, problems, section.samples, session.sampling(section.temperature), "eval", 0, watch)
    correct = [
        sum(score.correct for score in batch.scores[i : i + section.samples])
        for i in range(0, len(batch.scores), section.samples)
    ]
    share = [c / section.samples for c in correct]
    mean = sum(share) / len(share)
    variance = sum((s - mean) ** 2 for s in share) / max(1, len(share) - 1)
    metrics = {
        "eval/pass_at_1": mean,
        "eval/pass_at_1_stderr": math.sqrt(variance / len(share)),
        "eval/reward_mean": sum(r.reward for r in batch.rollouts) / len(batch.rollouts),
        "eval/response_length_mean": batch.tokens / len(batch.rollouts),
        "eval/problems": float(len(problems)),
        "time/eval_seconds": sum(watch.seconds.values()),
    }
    if section.samples > 1:
        k = section.samples
        metrics[f"eval/pass_at_{k}"] = sum(pass_at_k(k, c, k) for c in correct) / len(correct)
    return metrics


def evaluate(config: RunConfig) -> None:
    """The command `moe-rl eval`."""
    path = config.checkpoint.load or config.directory
    if config.checkpoint.load is None and not Path(path).is_dir():
        raise UsageError(f"checkpoint.load: not given, and {path} holds no run; name a checkpoint or a run")
    found = checkpoint_paths.find(path)
    with opened(config, {"eval": 1}, only_reads=True) as session:
        checkpoint.load_weights(found, session.model)
        metrics = evaluate_policy(session)
        session.log(0, metrics, "eval")
        session.say(f"{found}: held-out pass@1 {metrics['eval/pass_at_1']:.3f} +- {metrics['eval/pass_at_1_stderr']:.3f}")
        if config.eval.samples > 1:
            session.say(f"pass@{config.eval.samples} {metrics[f'eval/pass_at_{config.eval.samples}']:.3f}")
