"""Who may go on in a run's directory, and who finds it moved aside."""

import errno
import json
import os
from pathlib import Path

import pytest

from moe_rl import config, rundir, yaml_text
from moe_rl.config import RunConfig
from moe_rl.session import one_line_for_files_of
from moe_rl.tracking import read_summary
from moe_rl.types import Problem, Response, Rollout
from parallel.errors import UsageError

YAML = """
run: {name: mine, steps: 10}
model: {preset: tiny_moe}
"""


def settings(folder: Path, *overrides: str) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(YAML, encoding="utf-8")
    return config.load(path, [f"run.dir={folder}", *overrides])


def left_behind(folder: Path, *overrides: str, step: int = 4) -> Path:
    """A run's directory as it is once step `step` has been saved."""
    run = settings(folder, *overrides)
    checkpoint = run.directory / "checkpoints" / f"step_{step:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_text("dear", encoding="utf-8")
    (run.directory / "config.yaml").write_text(config.dump(run), encoding="utf-8")
    (run.directory / "metrics.jsonl").write_text('{"step": 0}\n', encoding="utf-8")
    return run.directory


def still_there(directory: Path, step: int = 4, inside: str = "checkpoints") -> bool:
    return (directory / inside / f"step_{step:06d}" / "weights").exists()


def test_where_nothing_was_saved_nothing_is_moved(tmp_path: Path) -> None:
    run = settings(tmp_path)
    assert rundir.make_room(run, phase="train") is None
    assert not run.directory.exists()
    (run.directory / "checkpoints" / ".step_000004.part").mkdir(parents=True)  # a save that was cut off
    assert rundir.make_room(run, phase="train") is None
    assert rundir.make_room(run, phase=None) is None
    assert (run.directory / "checkpoints" / ".step_000004.part").exists()


@pytest.mark.parametrize(
    "change",
    [
        "run.steps=20",
        "run.processes=2",
        "run.threads=2",
        "parallel.expert=2",
        "checkpoint.every=3",
        "checkpoint.keep=1",
        "checkpoint.keep_every=5",
        "checkpoint.asynchronous=true",
        "eval.problems=3",
        "tracking.tensorboard=true",
        "rollout.max_batch=7",
        "algorithm.microbatch_tokens=77",
        "model.recompute=full",
        "model.logprob_chunk=5",
        "drift.watch.reward.action=stop",
    ],
)
def test_a_run_goes_on_whatever_changes_no_result(tmp_path: Path, change: str) -> None:
    directory = left_behind(tmp_path)
    assert rundir.make_room(settings(tmp_path, change), phase="train") is None
    assert still_there(directory)


@pytest.mark.parametrize(
    "change",
    [
        "run.seed=1",
        "model.layers=2",
        "task.options={digits: 1}",
        "rollout.temperature=0.9",
        "rollout.stop=[x]",
        "task.chat=false",
        "task.system=Be terse.",
        "task.template_options={enable_thinking: false}",
        "task.answer_column=solution",
        "sft.train_on=all",
        "algorithm.name=grpo",
        "optimizer.lr=1e-3",
        "sft.steps=3",
        "checkpoint.load=/elsewhere",
        "drift.enabled=false",
    ],
)
def test_another_run_is_moved_aside_and_said_to_be(tmp_path: Path, change: str) -> None:
    directory = left_behind(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "metadata.json").touch()  # a checkpoint
    note = rundir.make_room(settings(tmp_path, change.replace("/elsewhere", str(tmp_path / "elsewhere"))), phase="train")
    assert note == f"note: {directory} held another run; it is now {tmp_path / 'mine.1'}"
    assert not directory.exists() and still_there(tmp_path / "mine.1")


def test_a_run_from_before_a_setting_came_is_the_same_run(tmp_path: Path) -> None:
    """Its file lacks the key, and a section; what this run asks of them is what they default to, or not."""
    directory = left_behind(tmp_path)
    path = directory / "config.yaml"
    found = yaml_text.parse(path.read_text(encoding="utf-8"), "config.yaml")
    del found["rollout"]["top_p"], found["shaping"]
    path.write_text(yaml_text.dump(found), encoding="utf-8")
    assert rundir.make_room(settings(tmp_path), phase="train") is None
    assert rundir.make_room(settings(tmp_path, "rollout.top_p=0.5"), phase="train") is not None


def test_a_run_with_a_setting_that_is_no_more_is_another_run(tmp_path: Path) -> None:
    directory = left_behind(tmp_path)
    path = directory / "config.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("rollout:", "rollout:\n  luck: 7"), encoding="utf-8")
    assert rundir.make_room(settings(tmp_path), phase="train") is not None
    assert still_there(tmp_path / "mine.1")


@pytest.mark.parametrize(("change", "moved"), [("sft.steps=9", False), ("sft.lr=0.5", True)])
def test_supervised_training_goes_on_as_rl_does_but_neither_in_the_others_place(
    tmp_path: Path, change: str, moved: bool
) -> None:
    directory = left_behind(tmp_path, "sft.steps=6")
    (directory / "metrics.jsonl").rename(directory / "sft.jsonl")
    assert (rundir.make_room(settings(tmp_path, "sft.steps=6", change), phase="sft") is not None) == moved
    assert still_there(tmp_path / "mine.1" if moved else directory)
    if not moved:
        assert rundir.make_room(settings(tmp_path, "sft.steps=6"), phase="train") is not None


def in_warm_start(folder: Path) -> Path:
    """A run's directory as it is once a step of its warm start has been saved."""
    directory = left_behind(folder, "sft.steps=6")
    (directory / "metrics.jsonl").rename(directory / "sft.jsonl")
    (directory / "checkpoints").rename(directory / "warm_start")
    (directory / "checkpoints").mkdir()
    (directory / "warm_start").rename(directory / "checkpoints" / "warm_start")
    return directory


@pytest.mark.parametrize(
    ("change", "moved"), [("checkpoint.every=3", False), ("run.steps=0", False), ("sft.steps=9", True), ("sft.lr=0.5", True)]
)
def test_a_run_in_its_warm_start_has_begun(tmp_path: Path, change: str, moved: bool) -> None:
    directory = in_warm_start(tmp_path)
    assert (rundir.make_room(settings(tmp_path, "sft.steps=6", change), phase="train") is not None) == moved
    assert still_there(tmp_path / "mine.1" if moved else directory, inside="checkpoints/warm_start")


def test_supervised_training_alone_does_not_go_on_in_a_warm_start(tmp_path: Path) -> None:
    in_warm_start(tmp_path)
    assert rundir.make_room(settings(tmp_path, "sft.steps=6"), phase="sft") is not None


def test_what_a_killed_save_has_left_of_a_warm_start_is_none(tmp_path: Path) -> None:
    """The checkpoints beside it are those of supervised training."""
    directory = left_behind(tmp_path, "sft.steps=6")
    (directory / "metrics.jsonl").rename(directory / "sft.jsonl")
    (directory / "checkpoints" / "warm_start" / ".step_000002.part").mkdir(parents=True)
    assert rundir.make_room(settings(tmp_path, "sft.steps=6"), phase="sft") is None


def test_runs_that_were_moved_aside_are_not_written_over(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        left_behind(tmp_path, step=number)
        rundir.make_room(settings(tmp_path, "run.seed=1"), phase="train")
    assert [still_there(tmp_path / f"mine.{number}", step=number) for number in (1, 2, 3)] == [True] * 3


def test_a_command_that_cannot_go_on_moves_even_its_own_earlier_run(tmp_path: Path) -> None:
    left_behind(tmp_path)
    assert "mine.1" in (rundir.make_room(settings(tmp_path), phase=None) or "")


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ("run.steps=4", False),
        ("run.steps=3", True),
        ("run.steps=5", False),  # not finished then: goes on
        ("eval.problems=3", True),  # would show another evaluation than the one it had
        ("tracking.tensorboard=true", False),
        ("checkpoint.every=2", False),
        ("run.seed=1", True),
    ],
)
def test_a_finished_run_is_kept_unless_something_else_is_asked_of_it(tmp_path: Path, change: str, moved: bool) -> None:
    directory = left_behind(tmp_path, "run.steps=4", step=4)
    assert (rundir.make_room(settings(tmp_path, "run.steps=4", change), phase="train") is not None) == moved
    assert still_there(tmp_path / "mine.1" if moved else directory)


@pytest.mark.parametrize("key", ["checkpoint.load", "critic.load", "task.train_path", "model.tokenizer"])
def test_what_a_run_would_begin_from_is_not_moved_away_from_it(tmp_path: Path, key: str) -> None:
    directory = left_behind(tmp_path)
    named = directory / "checkpoints" / "step_000004"
    changed = settings(tmp_path, "run.seed=1", f"{key}={named}", *(["task.name=file"] if key.startswith("task") else []))
    with pytest.raises(UsageError, match=rf"^{key}={named}: lies in {directory}, which .*; choose another run\.name"):
        rundir.make_room(changed, phase="train")
    assert still_there(directory)


def test_a_run_that_could_not_begin_moves_nothing(tmp_path: Path) -> None:
    directory = left_behind(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"checkpoint\.load=.*empty: holds no complete checkpoint"):
        rundir.make_room(settings(tmp_path, f"checkpoint.load={tmp_path / 'empty'}"), phase="train")
    assert still_there(directory)


def test_checkpoints_of_which_nothing_says_what_made_them_are_not_touched(tmp_path: Path) -> None:
    directory = left_behind(tmp_path)
    (directory / "metrics.jsonl").unlink()
    with pytest.raises(UsageError, match=r"holds checkpoints, and neither metrics\.jsonl nor sft\.jsonl: put back"):
        rundir.make_room(settings(tmp_path), phase="train")
    assert still_there(directory)


def test_checkpoints_without_settings_are_not_touched(tmp_path: Path) -> None:
    directory = left_behind(tmp_path)
    (directory / "config.yaml").unlink()
    with pytest.raises(
        UsageError, match=r"config\.yaml: No such file.*holds checkpoints but no settings: choose another run\.name"
    ):
        rundir.make_room(settings(tmp_path), phase="train")
    assert still_there(directory)


@pytest.mark.parametrize("text", [b"", b"run: {name: mi", b"- 1", b"\x9b\xff"])
def test_settings_that_cannot_be_read_are_named(tmp_path: Path, text: bytes) -> None:
    directory = left_behind(tmp_path)
    (directory / "config.yaml").write_bytes(text)
    with pytest.raises(UsageError, match=r"config\.yaml"):
        rundir.make_room(settings(tmp_path), phase="train")
    assert still_there(directory)


def test_a_summary_is_read_back_at_full_precision(tmp_path: Path) -> None:
    assert read_summary(tmp_path) == {}
    rundir.write_summary(tmp_path, {"step": 3, "eval/pass_at_1": 1 / 3})
    assert read_summary(tmp_path) == {"step": 3, "eval/pass_at_1": 1 / 3}


def test_rollouts_are_written_a_line_each(tmp_path: Path) -> None:
    problem = Problem("train/3", "1+2=", "3")
    first = Rollout(0, problem, [4], Response([5, 2], [-0.1, -0.2], "stop"), "3", 1.0, {"exact": 1.0})
    odd = Rollout(1, problem, [4], Response([5], [-0.1], "length"), "\ud800 \n\N{SNOWMAN}", 0.0)  # half a surrogate pair
    rundir.write_rollouts(tmp_path, 12, [first, odd])
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000012.jsonl"]
    lines = (tmp_path / "rollouts" / "step_000012.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == {
        "index": 0,
        "problem": "train/3",
        "prompt": "1+2=",
        "answer": "3",
        "response": "3",
        "reward": 1.0,
        "parts": {"exact": 1.0},
        "finish_reason": "stop",
        "tokens": 2,
    }
    assert len(lines) == 2 and json.loads(lines[1])["response"].endswith("\n\N{SNOWMAN}")


def traced(directory: Path, *steps: int) -> None:
    (directory / "traces").mkdir(parents=True, exist_ok=True)
    for step in steps:
        (directory / "traces" / f"step_{step:06d}.parquet").write_text("rows")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_that_goes_on_makes_later_traces_again(tmp_path: Path) -> None:
    traced(tmp_path, 1, 10, 20)
    (tmp_path / "traces" / "step_of_mine.parquet").write_text("not ours")
    rundir.sort_out(tmp_path, after=10)
    assert names(tmp_path / "traces") == ["step_000001.parquet", "step_000010.parquet", "step_of_mine.parquet"]
    rundir.sort_out(tmp_path / "without", after=10)


def test_a_run_that_begins_does_not_take_over_the_traces_of_one_that_saved_nothing(tmp_path: Path) -> None:
    rundir.sort_out(tmp_path, after=None)
    assert names(tmp_path) == []
    for step in (10, 20):  # the second time what was put aside makes room
        traced(tmp_path, step)
        rundir.sort_out(tmp_path, after=None)
        assert names(tmp_path) == ["traces.previous"]
        assert names(tmp_path / "traces.previous") == [f"step_{step:06d}.parquet"]


def test_a_run_that_begins_shows_no_summary_and_no_rollouts_of_one_whose_checkpoints_are_gone(tmp_path: Path) -> None:
    rundir.write_summary(tmp_path, {"step": 10, "eval/pass_at_1": 1.0})
    (tmp_path / "rollouts").mkdir()
    for step in (5, 10):
        (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").touch()
    rundir.sort_out(tmp_path, after=5)
    assert names(tmp_path / "rollouts") == ["step_000005.jsonl"] and read_summary(tmp_path)["step"] == 10
    rundir.sort_out(tmp_path, after=None)
    assert names(tmp_path) == ["rollouts.previous", "summary.previous.json"] and read_summary(tmp_path) == {}


def test_a_summary_that_is_no_text_is_none(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_bytes(b"\xe1\x01")
    assert read_summary(tmp_path) == {}


@pytest.mark.parametrize(
    ("number", "name", "line"),
    [
        (errno.ENOSPC, None, r"^{run}: cannot be written: No space left on device; make room or mend it, and the same command"),
        (errno.EACCES, "metrics.jsonl", r"^{run}/metrics\.jsonl: cannot be used: Permission denied; mend it, and the same"),
        (errno.EISDIR, "traces", r"^{run}/traces: cannot be used: Is a directory; mend it"),
        (errno.EACCES, "../others", None),
        (errno.ECONNRESET, None, None),
    ],
)
def test_what_goes_wrong_with_a_runs_own_files_is_one_line(
    tmp_path: Path, number: int, name: str | None, line: str | None
) -> None:
    """And what goes wrong with a user's is not taken for it."""
    run = tmp_path / "run"
    error = OSError(number, os.strerror(number), *([str((run / name).resolve())] if name else []))
    with pytest.raises(OSError if line is None else UsageError, match=line and line.format(run=run)):
        with one_line_for_files_of(run):
            raise error
