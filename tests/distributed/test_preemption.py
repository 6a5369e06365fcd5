"""A signal asks a run to save between two updates and end; given again, it ends as if it had never been asked: to the bit."""

import signal
from typing import Any

import pytest

from moe_rl import before_start, checkpoint_paths
from moe_rl.cli import main
from tests.distributed.kills import Kill, run_killed
from tests.distributed.runs import Runs
from tests.distributed.test_kills import CASES, SHARED, assert_same_end, undisturbed

pytestmark = pytest.mark.distributed

STEP, SUPERVISED = "moe_rl.update:PolicyUpdate.step", "moe_rl.sft:_step"


def asked(point: str, **when: Any) -> Kill:
    return Kill(point, by=signal.SIGUSR1, **when)


# the signal comes in the middle of these; the run goes on to the next update's end, or the supervised step's
ASKED: dict[str, list[Kill]] = {
    "gspo": [
        asked("moe_rl.trainer:sample_step"),
        asked(STEP, call=2),
        Kill("moe_rl.update:PolicyUpdate.score_old", call=2, by=signal.SIGTERM),
        asked(STEP, call=4),
    ],
    "ppo in the background": [asked("moe_rl.critic:Critic.step", call=2), asked("moe_rl.critic:Critic.step", call=4)],
    "warm start": [
        asked(SUPERVISED, call=2),
        asked("moe_rl.run:evaluate_policy"),
        asked("moe_rl.trainer:sample_step"),  # which the one before has not come to
    ],
    "sft in the background, EP2": [
        asked(SUPERVISED, ranks=(1,)),
        asked("moe_rl.sft:evaluate_policy", ranks=(0,)),  # within the steps
        asked("moe_rl.sft:evaluate_policy", call=2),  # after them, where nobody waits for it to end
    ],
    "dynamic sampling, EP2": [
        asked("moe_rl.rollouts.step:collect", ranks=(1,)),
        asked(STEP, call=1, ranks=(0,)),
        asked(STEP, call=3, ranks=(1,)),
    ],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("case", ASKED)
def test_a_run_that_is_asked_to_end_goes_on_within_its_step(runs: Runs, case: str) -> None:
    world, command, settings = CASES[case]
    wanted = undisturbed(runs, case)
    name = wanted.replace("-whole", "-asked")
    assert run_killed(runs.config(name, *SHARED, *settings), world, ASKED[case], command) == len(ASKED[case])
    assert_same_end(runs, name, wanted)


def test_a_step_goes_on_only_in_its_layout(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    _, command, settings = CASES["dynamic sampling, EP2"]
    config = runs.config("moved", *SHARED, *settings)
    assert run_killed_once(runs, config, asked(STEP, call=1)) == "step_000000_1"
    words = [
        "train",
        str(runs.yaml),
        *runs.shared,
        "run.name=moved",
        *SHARED,
        *[s for s in settings if s != "parallel.expert=2"],
    ]
    assert main(words) == 2
    says = (
        "was saved within a step, which goes on only in the layout that began it: parallel.expert=2 run.processes=2; use that"
    )
    assert says in capsys.readouterr().err
    # under other settings it is another run, and nothing of this one
    before_start.check(
        config.model_copy(update={"rollout": config.rollout.model_copy(update={"top_k": 3})}), "train", 4, launched=False
    )


def run_killed_once(runs: Runs, config: Any, kill: Kill) -> str:
    from tests.distributed.kills import _attempt

    assert not _attempt(config, 2, kill, "train")
    last = checkpoint_paths.newest(config.directory / "checkpoints")
    assert last is not None
    return last.name
