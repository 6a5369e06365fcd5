"""What the RL layer adds to Megatron's own forward and backward, as ratios taken in turn within one process.

    .venv/bin/python scripts/benchmark.py [key=value ...]

Rows: an update (loss, drift and metrics included) against a bare forward, cross-entropy, backward and optimizer step of the
same model on the same tokens; routing replay; the losses, and RSPO's router shift; what a reference and a critic add in memory;
the instruments in whole training steps, in most of them, in those that are looked at closely, and with everything on every
token; checkpoints; and log-probabilities in chunks against all at once, by time and by peak memory. A ratio is the median over
rounds of the ratio of neighbours in time.
"""

import gc
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from models.logprobs import Vocabulary, logprobs_and_entropy
from models.model import MoEModel
from models.optimizer import Optimizer
from moe_rl import config as configuration
from moe_rl.algorithms.config import AlgorithmSection
from moe_rl.algorithms.table import ALGORITHMS
from moe_rl.checkpoint import Saver, intact
from moe_rl.config import CheckpointSection, DriftSection, ReplaySection, RunConfig
from moe_rl.critic import Critic
from moe_rl.preparation import prepare
from moe_rl.reference import Reference
from moe_rl.router_shift import measure_router_shift
from moe_rl.session import opened
from moe_rl.trainer import Trainer
from moe_rl.types import Problem, Response, Rollout
from moe_rl.update import Minibatch, PolicyUpdate
from parallel.groups import Groups, process_groups
from parallel.runtime import started
from parallel.schedule import run_microbatches

# Without a GPU the CPU seconds of this process, which other work on the machine changes little
CLOCK = time.perf_counter if torch.cuda.is_available() else time.process_time
ROUNDS, SEQUENCES, PROMPT, RESPONSE = 15, 64, 8, 64
OFF = DriftSection(enabled=False)
# all scores and all sequences in the traces, and the extra passes, over their 16 sequences, in every step
EVERYTHING = [
    "drift.scores_share=1",
    "drift.probe_every=1",
    "drift.trace_every=1",
    "drift.trace_sequences=1000000",
]
TOKENS, HIDDEN, VOCABULARY = 2048, 256, 32768


def main() -> None:
    root = Path(__file__).parent.parent
    overrides = ["parallel.expert=1", *sys.argv[1:]]
    config = configuration.load(root / "configs" / "quickstart.yaml", overrides)
    table = Table("what", "median", "of", "median", "ratio", title=f"updates: {SEQUENCES} x {PROMPT + RESPONSE} tokens")
    updates(config, table)
    steps(root, overrides, table)
    saves(root, overrides, table)
    logprob_memory(table)
    Console(width=120).print(table)


def updates(config: RunConfig, table: Table) -> None:
    with (
        started(config.run.seed, config.run.threads, config.parallel.timeout_seconds) as here,
        process_groups(config.parallel) as groups,
    ):
        model, optimizer = state(config, groups, here.device, table)

        def update(drift: DriftSection, mode: str = "off", algorithm: AlgorithmSection = config.algorithm) -> Callable[[], Any]:
            replay = ReplaySection.model_validate({"mode": mode})
            policy = PolicyUpdate(model, algorithm, config.rollout, drift, replay)
            minibatch = prepared(policy, config)
            return lambda: policy.step(minibatch, optimizer, None)

        on, blind, r2 = update(config.drift), update(OFF), update(config.drift, "r2")
        r2_blind = update(OFF, "r2")
        minibatch = prepared(PolicyUpdate(model, config.algorithm, config.rollout, OFF, ReplaySection()), config)
        row(table, "update", on, "bare Megatron step", lambda: bare_step(model, optimizer, minibatch))
        row(table, "update, drift measured", on, "drift off", blind)
        row(table, "update, r2", r2, "replay off", on)
        row(table, "update, r2, drift off", r2_blind, "replay off, drift off", blind)
        for name in ALGORITHMS:  # the loss alone differs
            other = AlgorithmSection(name=name, entropy_coefficient=0.01 if name == "ppo" else 0.0)
            what = f"update, {name}{' with an entropy bonus' * bool(other.entropy_coefficient)}"
            row(table, what, update(OFF, algorithm=other), f"update, {config.algorithm.name}", blind, rounds=5)
        section = config.algorithm.model_copy(update={"router_shift": True})
        staged = PolicyUpdate(model, section, config.rollout, OFF, ReplaySection())
        parts = prepared(staged, config)

        def pass_of_its_own() -> None:  # as several pipeline stages need it
            measure_router_shift(staged.observer, parts.parts, None, section.router_shift_floor)
            staged.step(parts, optimizer, None, moved=False)

        shifted = update(OFF, algorithm=section)
        row(table, "update, router shift, drift off", shifted, "without", blind)
        row(table, "update, router shift by a pass of its own", pass_of_its_own, "without", blind)


def state(config: RunConfig, groups: Groups, device: torch.device, table: Table) -> tuple[MoEModel, Optimizer]:
    """What a policy holds from step to step: weights, gradients, moments; and what a reference and a critic add."""
    before = held()
    model = MoEModel(config.model, groups, device, config.run.seed)
    optimizer = model.optimizer(config.optimizer, 1000)
    policy = held() - before
    kept: list[Any] = [Reference(model)]
    reference = held() - before
    kept = [Critic(model, config.critic, config.run.seed, 1000)]
    critic = held() - before
    for name, size in (("with a reference (KL)", reference), ("with a critic (PPO)", critic)):
        cells = [f"{b / 2**20:.1f} MiB" for b in (size, policy)]
        table.add_row(f"state of a policy {name}", cells[0], "without", cells[1], f"{size / policy:.2f}")
    del kept
    return model, optimizer


def held() -> int:
    """Bytes of all tensors that are alive."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def steps(root: Path, overrides: list[str], table: Table) -> None:
    """Whole steps: rollout, reward, old log-probabilities, updates, instruments."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [
            *overrides,
            "sft.steps=0",
            "task.options={partial_credit: true, min_letters: 3, max_letters: 6}",
            "rollout.prompts=16",
            "run.steps=100000",
            "run.name=steps",
            f"run.dir={folder}",
        ]
        load = lambda *more: configuration.load(root / "configs" / "quickstart.yaml", [*shared, *more])  # noqa: E731
        plain, close = ["drift.probe_every=0", "drift.trace_every=0"], ["drift.probe_every=1", "drift.trace_every=1"]
        with opened(load(), {}) as session:
            optimizer = session.model.optimizer(session.config.optimizer, 100000)

            def step(*more: str) -> Callable[[], Any]:
                trainer = Trainer(replace(session, config=load(*more)))
                trainer.optimizer = optimizer
                return lambda: trainer.step(trainer.begin_step(trainer.progress.step + 1))

            off = step("drift.enabled=false", "drift.watch.enabled=false")
            between = row(table, "step, drift at defaults, not looked at closely", step(*plain), "drift off", off)
            looked = row(table, "step looked at closely", step(*close), "drift off", off)
            row(table, "step, everything on every token", step(*EVERYTHING), "drift off", off)
            every = session.config.drift.probe_every
            table.add_row(
                f"so, one in {every} looked at closely", "", "", "", f"{((every - 1) * between + looked) / every:.2f}"
            )


def saves(root: Path, overrides: list[str], table: Table) -> None:
    """Checkpoints of the quickstart's model, in seconds on the clock: they wait for the disk."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        shared = [*overrides, "sft.steps=0", "run.name=saves", f"run.dir={folder}"]
        with opened(configuration.load(root / "configs" / "quickstart.yaml", shared), {}) as session:
            trainer = Trainer(session)
            trainer.optimizer = session.model.optimizer(session.config.optimizer, 100000)
            state = (trainer.progress, session.model, trainer.optimizer)
            waits = Saver(Path(folder, "waits"), CheckpointSection())
            behind = Saver(Path(folder, "behind"), CheckpointSection(asynchronous=True))
            works: dict[str, Callable[[], Any]] = {
                "step": lambda: trainer.step(trainer.begin_step(trainer.progress.step + 1)),
                "save": lambda: waits.save(*state),
                "save in the background, until the run goes on": lambda: behind.save(*state),
                "check of all hashes before a checkpoint is loaded": lambda: intact(Path(folder, "waits"), print),
            }
            seconds: dict[str, list[float]] = {name: [] for name in works}
            for _ in range(ROUNDS):
                for name, work in works.items():
                    start = time.perf_counter()
                    work()
                    seconds[name].append(time.perf_counter() - start)
                    behind.finish()
            size = sum(path.stat().st_size for path in Path(folder, "waits").rglob("*")) / 2**20
    for name in [name for name in works if name != "step"]:
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["step"], strict=True))
        cells = [f"{statistics.median(seconds[each]) * 1e3:.0f} ms" for each in (name, "step")]
        table.add_row(f"{name} ({size:.0f} MiB)", cells[0], "step", cells[1], f"{ratio:.2f}")


def logprob_memory(table: Table) -> None:
    """Each in a process of its own: peak resident memory above what it had before."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        whole, chunked = (pool.apply(score, (chunk,)) for chunk in (TOKENS, 256))
    name = f"{TOKENS} log-probabilities of {VOCABULARY} ids, in chunks of 256"
    for unit, i in (("MiB", 0), ("ms", 1)):
        table.add_row(name, f"{chunked[i]:.0f} {unit}", "at once", f"{whole[i]:.0f} {unit}", f"{chunked[i] / whole[i]:.2f}")


def score(chunk: int) -> tuple[float, float]:
    """MiB and milliseconds of a forward and backward."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    before, start = _peak(), CLOCK()
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, 1.0, chunk, Vocabulary(0, VOCABULARY, None))
    (logprobs.sum() + entropy.sum()).backward()
    return (_peak() - before) / 2**20, (CLOCK() - start) * 1e3


def _peak() -> int:
    """Bytes. Not getrusage's: a new process inherits that of the one that started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024


def prepared(update: PolicyUpdate, config: RunConfig) -> Minibatch:
    """A minibatch of random sequences, scored."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, config.model.vocab_size, (SEQUENCES, PROMPT + RESPONSE), generator=generator).tolist()
    problem = Problem("", "", "")
    rollouts = [
        Rollout(i, problem, t[:PROMPT], Response(t[PROMPT:], [0.0] * RESPONSE, "stop"), "", 0.0) for i, t in enumerate(tokens)
    ]
    single = config.algorithm.model_copy(update={"minibatches": 1})
    (minibatch,) = prepare(update.model, rollouts, single, 1.0, seed=0, step=0)
    for part in minibatch.parts:
        update.observer.mark(part.microbatch.stream, 0)
        part.advantages = torch.randn(len(part.microbatch.members), generator=generator).to(part.sequence.device)[part.sequence]
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


def row(
    table: Table,
    name: str,
    first: Callable[[], Any],
    other: str,
    second: Callable[[], Any],
    rounds: int = ROUNDS,
    warm: int = 2,
) -> float:
    """Times the two in turn, so that a machine that slows down slows both. Returns the ratio."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + warm):
        for kept, work in zip(times, (first, second), strict=True):
            start = CLOCK()
            work()
            if turn >= warm:
                kept.append(CLOCK() - start)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    cells = [f"{statistics.median(t) * 1e3:.0f} ms" for t in times]
    table.add_row(name, cells[0], other, cells[1], f"{ratio:.2f}")
    return ratio


if __name__ == "__main__":
    main()
