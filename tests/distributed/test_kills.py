"""Runs that are killed wherever it hurts and go on end as if nothing had been: weights, optimizer and metrics to the bit."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_rl import checkpoint_paths
from tests.distributed.kills import Kill, run_killed, work_of
from tests.distributed.runs import Runs, differing, read, tensors

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
STEPS = 3
SHARED = [f"run.steps={STEPS}", "checkpoint.every=1", "rollout.max_response_tokens=4", "model.layers=2", "eval.problems=4"]
LOOKED_AT = ["drift.probe_every=1", "drift.trace_every=2", "tracking.rollouts_every=1"]
CASES: dict[str, tuple[int, str, list[str]]] = {
    "gspo": (1, "train", ["algorithm.name=gspo", *LOOKED_AT]),
    "ppo in the background": (1, "train", ["algorithm.name=ppo", "checkpoint.asynchronous=true", "checkpoint.keep_every=2"]),
    "warm start": (
        1,
        "train",
        [
            *("run.steps=1", "sft.steps=4", "sft.batch=8", "sft.stop_at=1.0", "sft.check_every=2"),
            "task.scorer=tests.distributed.rewards:half_luck",
        ],
    ),
    "sft in the background, EP2": (
        2,
        "sft",
        [
            *("parallel.expert=2", "checkpoint.asynchronous=true", "sft.steps=4", "sft.batch=8", "sft.schedule=linear"),
            *("sft.stop_at=1.0", "sft.check_every=2"),
        ],
    ),
    "dynamic sampling, EP2": (
        2,
        "train",
        [
            *("parallel.expert=2", "algorithm.name=dapo", "task.scorer=tests.distributed.rewards:share_of_even"),
            *("algorithm.kl_coefficient=0.1", "algorithm.kl_target=0.001", "algorithm.kl_horizon=50", *LOOKED_AT),
        ],
    ),
    "in the background, EP2": (2, "train", ["parallel.expert=2", "checkpoint.asynchronous=true", "checkpoint.keep=1"]),
}
SAVING, SUPERVISED = "moe_rl.checkpoint", "moe_rl.sft:_step"
KILLS: dict[str, list[Kill]] = {
    "gspo": [
        Kill("moe_rl.evaluation:collect"),  # before there is anything
        Kill("moe_rl.trainer:sample_step", after=True),
        Kill("moe_rl.update:PolicyUpdate.score_old", call=2, after=True),
        Kill("moe_rl.update:PolicyUpdate.step", call=3),
        Kill(f"{SAVING}.shards:Shards.write", after=True),
        Kill("models.convert.manifest:write"),
        Kill(f"{SAVING}.files:publish"),
        Kill(f"{SAVING}.files:publish", after=True),
        Kill(f"{SAVING}.files:_set_aside", after=True),  # of one that is to be removed
        Kill("moe_rl.rundir:write_summary"),
    ],
    "ppo in the background": [
        Kill("moe_rl.critic:Critic.step", call=2),
        Kill(f"{SAVING}.shards:Shards.write", call=2),  # of the critic, in the thread
        Kill(f"{SAVING}.files:to_disk", call=3),
        Kill(f"{SAVING}.saving:_Pending.publish", after=True),
    ],
    "warm start": [
        Kill(f"{SAVING}.files:publish"),  # before there is anything
        Kill(SUPERVISED, call=3),
        Kill("moe_rl.run:evaluate_policy", after=True),
        Kill(f"{SAVING}.files:remove"),  # of the warm start, once step 0 is saved
    ],
    "sft in the background, EP2": [
        Kill("moe_rl.tracking:StepFile.append", ranks=(0,), after=True),
        Kill(f"{SAVING}.files:publish", ranks=(0,)),
        Kill("moe_rl.sft:evaluate_policy", call=2, ranks=(1,)),
    ],
    "dynamic sampling, EP2": [
        Kill("moe_rl.rollouts.step:collect", call=2, ranks=(1,)),
        Kill("models.optimizer:Optimizer.step", call=2, ranks=(0,)),
        Kill(f"{SAVING}.shards:Shards.write", ranks=(1,)),
        Kill(f"{SAVING}.files:publish", ranks=(0,)),
        Kill("moe_rl.tracking:StepFile.append", ranks=(0,), after=True),
    ],
    "in the background, EP2": [
        Kill(f"{SAVING}.shards:Shards.write", call=1, ranks=(0,)),
        Kill("moe_rl.update:PolicyUpdate.step", call=6, ranks=(1,)),
        Kill(f"{SAVING}.files:retire", ranks=(0,)),
    ],
}
AT_RANDOM = 4  # more of them in each case


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def outcome(runs: Runs, name: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Everything in the last checkpoint, and the lines of metrics without times."""
    directory = runs.folder / name
    last = checkpoint_paths.newest(directory / "checkpoints")
    assert last is not None
    state = read(last)
    if (last / "critic").exists():
        state |= {f"critic/{key}": value for key, value in read(last / "critic").items()}
    lines = {}
    for file in ("metrics.jsonl", "sft.jsonl"):
        if (directory / file).exists():
            found = [json.loads(line) for line in (directory / file).read_text(encoding="utf-8").splitlines()]
            lines[file] = [{key: value for key, value in line.items() if not key.startswith("time/")} for line in found]
    return {"name": last.name, **state}, lines


def assert_same_end(runs: Runs, name: str, wanted: str) -> None:
    (ours, our_lines), (theirs, their_lines) = outcome(runs, name), outcome(runs, wanted)
    assert ours["name"] == theirs["name"]
    assert len(tensors(theirs)) > 50 and not differing(ours, theirs)
    assert our_lines == their_lines and our_lines
    for folder in ("traces", "rollouts", "checkpoints"):
        here, there = ([*sorted(p.name for p in (runs.folder / n / folder).glob("[!.]*"))] for n in (name, wanted))
        assert here == there


def undisturbed(runs: Runs, case: str) -> str:
    """The name of the run of this case that nobody kills."""
    world, command, settings = CASES[case]
    name = f"{case.replace(' ', '-').replace(',', '')}-whole"
    if not (runs.folder / name).exists():
        assert run_killed(runs.config(name, *SHARED, *settings), world, [], command) == 0
    return name


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(runs: Runs, case: str) -> None:
    world, command, settings = CASES[case]
    wanted = undisturbed(runs, case)
    name = wanted.replace("-whole", "-killed")
    config = runs.config(name, *SHARED, *settings)
    assert run_killed(config, world, KILLS[case], command) == len(KILLS[case])  # each point was reached
    assert_same_end(runs, name, wanted)


@pytest.mark.parametrize("case", ["gspo", "dynamic sampling, EP2"])
def test_kills_at_random_moments(runs: Runs, case: str) -> None:
    world, command, settings = CASES[case]
    wanted = undisturbed(runs, case)
    name, draw = wanted.replace("-whole", "-random"), random.Random(world)
    whole = work_of(runs.folder / wanted)
    moments = [draw.uniform(0.05, 0.9) * whole for _ in range(AT_RANDOM)]
    kills = [Kill(cpu=moment, ranks=draw.choice([None, (0,), (world - 1,)])) for moment in moments]
    # the first comes in any case; one that goes on has less to do, and may be done before its own
    assert run_killed(runs.config(name, *SHARED, *settings), world, kills, command) >= 1
    assert_same_end(runs, name, wanted)


def the_launcher(launcher: psutil.Process) -> None:
    launcher.kill()


def one_rank(launcher: psutil.Process) -> None:
    launcher.children()[-1].kill()


def all_ranks(launcher: psutil.Process) -> None:
    for rank in launcher.children():
        rank.kill()


def by_sigterm(launcher: psutil.Process) -> None:
    launcher.terminate()


def by_sigusr1(launcher: psutil.Process) -> None:
    launcher.send_signal(signal.SIGUSR1)


def test_the_command_is_killed_and_given_again(runs: Runs) -> None:
    """`moe-rl train` in two processes that it starts itself; a moment after each step that it has written."""
    case = "in the background, EP2"
    wanted = undisturbed(runs, case)
    name, lines = wanted.replace("-whole", "-command"), runs.folder / "command"
    settings = [*runs.shared, f"run.name={name}", *SHARED, *CASES[case][2]]
    command = [sys.executable, "-m", "moe_rl.cli", "train", str(runs.yaml), *settings]
    draw, metrics = random.Random(0), runs.folder / name / "metrics.jsonl"
    for kill, step in ((the_launcher, 0), (by_sigterm, 1), (one_rank, 1), (by_sigusr1, 2), (all_ranks, 2)):
        began = time.time()
        with lines.open("wb") as output, subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output) as process:
            launcher = psutil.Process(process.pid)
            while process.poll() is None and not has_written(metrics, step, began):
                time.sleep(0.02)
            time.sleep(draw.uniform(0, 0.5))
            assert process.poll() is None, lines.read_text()[-3000:]
            ranks = launcher.children()
            kill(launcher)
            assert process.wait(60) != 0
            _, alive = psutil.wait_procs(ranks, timeout=60)
            assert not alive  # none outlives the launcher, even one that is killed
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert_same_end(runs, name, wanted)


def has_written(metrics: Path, step: int, began: float) -> bool:
    """Whether this start of the run has this step, made or kept."""
    try:
        return metrics.stat().st_mtime > began and f'{{"step": {step},' in metrics.read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
