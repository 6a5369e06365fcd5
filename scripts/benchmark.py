"""What the RL layer adds to Megatron's own forward and backward, as ratios taken in turn within one process.

    .venv/bin/python scripts/benchmark.py [key=value ...]

Rows: an update (loss, drift and metrics included) against a bare forward, cross-entropy, backward and optimizer step of the
same model on the same tokens; recording of routes; and the peak memory of chunked log-probabilities against full ones.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from models.model import MoEModel
from models.optimizer import Optimizer
from moe_rl import config as configuration
from moe_rl.config import RunConfig
from moe_rl.types import Problem, Response, Rollout
from moe_rl.update import Minibatch, PolicyUpdate
from parallel.groups import process_groups
from parallel.runtime import started
from parallel.schedule import run_microbatches

ROUNDS, SEQUENCES, PROMPT, RESPONSE = 15, 64, 8, 64


def main() -> None:
    root = Path(__file__).parent.parent
    config = configuration.load(root / "configs" / "quickstart.yaml", ["parallel.expert=1", *sys.argv[1:]])
    with (
        started(config.run.seed, config.run.threads, config.parallel.timeout_seconds) as here,
        process_groups(config.parallel) as groups,
    ):
        model = MoEModel(config.model, groups, here.device, config.run.seed)
        optimizer = model.optimizer(config.optimizer, 1000)
        table = Table("what", "median", "of", "median", "ratio", title=f"{SEQUENCES} x {PROMPT + RESPONSE} tokens")
        update = PolicyUpdate(model, config.algorithm, 1.0, measure_drift=True)
        blind = PolicyUpdate(model, config.algorithm, 1.0, measure_drift=False)
        minibatch = prepared(update, config)
        bare = lambda: bare_step(model, optimizer, minibatch)  # noqa: E731
        row(table, "update", lambda: update.step(minibatch, optimizer, None), "bare Megatron step", bare)
        row(
            table,
            "update with drift",
            lambda: update.step(minibatch, optimizer, None),
            "update without",
            lambda: blind.step(minibatch, optimizer, None),
        )
        row(table, "old log-probabilities", lambda: update.score_old([minibatch]), "bare Megatron step", bare)
        Console(width=100).print(table)
        print(f"peak resident memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


def prepared(update: PolicyUpdate, config: RunConfig) -> Minibatch:
    """A minibatch of random sequences, scored."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, config.model.vocab_size, (SEQUENCES, PROMPT + RESPONSE), generator=generator).tolist()
    problem = Problem("", "", "")
    rollouts = [
        Rollout(i, problem, t[:PROMPT], Response(t[PROMPT:], [0.0] * RESPONSE, "stop"), "", 0.0) for i, t in enumerate(tokens)
    ]
    single = PolicyUpdate(update.model, config.algorithm.model_copy(update={"minibatches": 1}), 1.0, True)
    (minibatch,) = single.prepare(rollouts, torch.randn(SEQUENCES, generator=generator), seed=0, step=0)
    update.score_old([minibatch])
    return minibatch


def bare_step(model: MoEModel, optimizer: Optimizer, minibatch: Minibatch) -> None:
    """Megatron alone: its cross-entropy over the same streams."""

    def step(iterator: Any, chunk: Any) -> tuple[Any, Any]:
        stream = next(iterator)
        labels = stream.tokens[None].roll(-1)
        output = chunk(
            input_ids=stream.tokens[None], position_ids=None, attention_mask=None, packed_seq_params=stream, labels=labels
        )
        return output, lambda losses: (losses.float().sum(), torch.tensor(stream.real, dtype=torch.int), None)

    streams = minibatch.streams
    for stream in streams:
        stream.routes = None
    optimizer.zero_grad()
    longest = max(stream.size for stream in streams)
    run_microbatches(model.chunks, step, streams, model.groups, longest=longest, forward_only=False)
    optimizer.step()


def row(table: Table, name: str, first: Callable[[], Any], other: str, second: Callable[[], Any]) -> None:
    """Times the two in turn, so that a machine that slows down slows both."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS + 2):
        for kept, work in zip(times, (first, second), strict=True):
            start = time.perf_counter()
            work()
            if turn >= 2:
                kept.append(time.perf_counter() - start)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    cells = [f"{statistics.median(t) * 1e3:.0f} ms" for t in times]
    table.add_row(name, cells[0], other, cells[1], f"{ratio:.2f}")


if __name__ == "__main__":
    main()
