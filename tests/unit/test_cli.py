"""The command line: quick help, one line for bad input, and who starts which processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import moe_rl.cli as cli
from models.convert import manifest
from moe_rl.config import RunConfig

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "MOE_RL_ERROR_DIR")
FILE = """\
run: {name: one}
model: {preset: tiny_moe}
task: {name: addition}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with one.yaml, outside any launcher."""
    (tmp_path / "one.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def moe_rl(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return python("-P", "-m", "moe_rl.cli", *arguments, **env)


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_help_is_quick_and_shows_examples() -> None:
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        done = moe_rl("--help")
        seconds.append(time.monotonic() - began)
        assert done.returncode == 0
        assert all(command in done.stdout for command in ("train", "sft", "eval", "doctor"))
    assert min(seconds) < 0.5
    for command in ("train", "sft", "eval", "doctor"):
        assert f"moe-rl {command}" in moe_rl(command, "--help").stdout.split("example")[1]


def test_nothing_heavy_is_imported_for_help_nor_torch_for_bad_input(folder: Path) -> None:
    script = (
        "import sys\nfrom moe_rl.cli import main\n"
        "heavy = {'torch', 'pydantic', 'rich', 'yaml', 'megatron', 'wandb', 'transformers'}\n"
        "assert main(['nonsense']) == 2 and not heavy & set(sys.modules)\n"
        "assert main(['train', 'one.yaml', 'rollout.max_response_tokens=126']) == 2\n"
        "assert not {'torch', 'megatron', 'wandb', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "exceed model.max_positions=128" in done.stderr


def test_version() -> None:
    done = moe_rl("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("moe-rl 0.")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the following arguments are required: COMMAND; see moe-rl --help"),
        (["trian", "one.yaml"], "invalid choice: 'trian' (choose from"),
        (["train"], "the following arguments are required: CONFIG; see moe-rl train --help"),
        (["train", "one.yaml", "--steps=3"], "unrecognized arguments: --steps=3 (settings are written key.path=value"),
        (["train", "two.yaml"], "two.yaml: no such file; did you mean one.yaml?"),
        (["train", "one.yaml", "rollout.promts=3"], "unknown key rollout.promts; did you mean rollout.prompts?"),
        (["train", "one.yaml", "run.steps=x"], "run.steps=x: must be a valid integer"),
        (["train", "one.yaml", "run.steps"], "override run.steps: must be key.path=value"),
        (["sft", "one.yaml", "parallel.expert=3"], "parallel.expert=3: must divide model.experts=8"),
        (["train", "one.yaml", "parallel.tensor=2", "run.processes=3"], "run.processes=3: must be a multiple of 2"),
        (["train", "one.yaml", "task.name=addtion"], "did you mean addition?"),
        (["train", "one.yaml", "task.name=jsonl", "task.train_path=none.jsonl"], "none.jsonl"),
        (["train", "one.yaml", "task.name=no_such_module:task"], "no_such_module"),
        (["train", "one.yaml", "rollout.max_response_tokens=126"], "exceed model.max_positions=128"),
        (["train", "one.yaml", "model.tokenizer=nowhere"], "model.tokenizer=nowhere: there is no such directory"),
        (["train", "one.yaml", "model.vocab_size=10"], "model.vocab_size=10: must be at least 259"),
        (["eval", "one.yaml", "checkpoint.load=nowhere"], "checkpoint.load=nowhere: no such directory"),
        (["eval", "one.yaml", "checkpoint.load=."], "checkpoint.load=.: holds no complete checkpoint; name a run"),
        (["eval", "one.yaml"], "checkpoint.load: not given, and runs/one holds no checkpoint; name a checkpoint or a run"),
        (["eval", "one.yaml", "eval.samples=4", "eval.k=[8]"], "eval.k=[8]: must be at most eval.samples=4"),
        (["eval", "one.yaml", "eval.problems=0"], "eval.problems=0: must be greater than 0"),
        (
            ["train", "one.yaml", "algorithm.name=ppo", "critic.load=nowhere"],
            "critic.load=nowhere: holds no complete checkpoint; name a run, its checkpoints/, or a step_NNNNNN in it",
        ),
        (["train", "one.yaml", "run.dir=one.yaml"], "one.yaml is a file"),
    ],
)
def test_bad_input_is_one_line(folder: Path, arguments: list[str], says: str) -> None:
    done = moe_rl(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("moe-rl: error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (folder / "runs").exists()


def test_of_the_ranks_of_a_node_one_speaks(folder: Path) -> None:
    for rank, lines in (("0", 1), ("1", 0)):
        done = moe_rl("train", "one.yaml", "run.steps=x", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
        assert done.returncode == 2
        assert done.stderr.count("\n") == lines


def look_like_a_checkpoint(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "metadata.json").touch()
    manifest.write(directory, manifest.listed(directory, {}))


class Started:
    """Stands in for the trainer and for `launch`, and notes what they were called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> None:
        self.ran: list[tuple[str, RunConfig]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.error = error
        monkeypatch.setattr(cli, "_entry", lambda command: lambda config: self._run(command, config))
        monkeypatch.setattr("parallel.launch.launch", self._launch)

    def _run(self, command: str, config: RunConfig) -> None:
        self.ran.append((command, config))
        if self.error:
            raise self.error

    def _launch(self, *arguments: Any) -> int:
        self.launched.append(arguments)
        return 7


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_one_process_runs_here(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    started = Started(monkeypatch)
    look_like_a_checkpoint(folder / "runs/one/checkpoints/step_000001")  # for eval to look at
    assert cli.main([command, "one.yaml", "run.steps=3"]) == 0
    assert [(name, config.run.steps) for name, config in started.ran] == [(command, 3)]
    assert not started.launched


@pytest.mark.parametrize(
    ("named", "overrides", "processes", "to_save"),
    [
        ("train", ["parallel.expert=2"], 2, 300),
        ("sft", ["run.processes=2", "run.threads=3", "run.saving_seconds=7"], 2, 7),
        ("eval", ["run.processes=2"], 2, 0),  # has nothing to save
    ],
)
def test_several_processes_are_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch, named: str, overrides: list[str], processes: int, to_save: float
) -> None:
    started = Started(monkeypatch)
    look_like_a_checkpoint(folder / "runs/one/checkpoints/step_000001")  # for eval to look at
    assert cli.main([named, "one.yaml", *overrides]) == 7
    (command, count, threads, saving_seconds), *more = started.launched
    assert (count, threads, more, started.ran) == (processes, 3 if "run.threads=3" in overrides else 1, [], [])
    assert saving_seconds == to_save
    assert command == [sys.executable, "-P", "-m", "moe_rl.cli", named, "one.yaml", *overrides]


def test_inside_a_launcher_nothing_more_is_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "one.yaml", "parallel.expert=2"]) == 0
    assert len(started.ran) == 1 and not started.launched


def test_the_launchers_world_must_fit_the_layout(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = Started(monkeypatch)
    for name, value in {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "one.yaml", "parallel.expert=2"]) == 2
    assert "run.processes=3: must be a multiple of 2" in capsys.readouterr().err
    assert not started.ran


def test_only_eval_does_without_problems_to_train_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = Started(monkeypatch)
    look_like_a_checkpoint(folder / "runs/one/checkpoints/step_000001")
    (folder / "test.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    settings = ["one.yaml", "task.name=jsonl", "task.eval_path=test.jsonl"]
    assert cli.main(["eval", *settings]) == 0
    assert [command for command, _ in started.ran] == ["eval"]
    for command in ("train", "sft"):
        assert cli.main([command, *settings]) == 2
        assert "task.train_path: missing; task.name=jsonl reads its problems from it" in capsys.readouterr().err
    (folder / "test.jsonl").write_text("")
    assert cli.main(["eval", *settings]) == 2
    assert "task.eval_path=test.jsonl: the file has no problems" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_signal_that_comes_before_there_is_anything_to_save(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr(cli, "_entry", lambda command: lambda config: signal.raise_signal(number))
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "one.yaml"])
    assert ended.value.code == 75
    assert signal.getsignal(number) is before


def test_a_signal_ends_eval_as_any_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, during = signal.getsignal(signal.SIGTERM), []
    look_like_a_checkpoint(folder / "runs/one/checkpoints/step_000001")
    monkeypatch.setattr(cli, "_entry", lambda command: lambda config: during.append(signal.getsignal(signal.SIGTERM)))
    assert cli.main(["eval", "one.yaml"]) == 0
    assert during == [before]


def test_an_interrupt_is_130(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Started(monkeypatch, KeyboardInterrupt())
    assert cli.main(["train", "one.yaml"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "moe-rl: stopped by SIGINT\n"


def test_a_defect_keeps_its_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Started(monkeypatch, ValueError("a defect"))
    with pytest.raises(ValueError, match="a defect"):
        cli.main(["train", "one.yaml"])
