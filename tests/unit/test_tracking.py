"""The run directory, wandb, TensorBoard and the terminal."""

import io
from pathlib import Path

import pytest
import wandb
from rich.console import Console

from moe_rl import sinks, tracking
from moe_rl.config import TrackingSection
from moe_rl.tracking import Tracker, read_steps
from parallel.errors import UsageError


def tracker(folder: Path, console: Console | None = None, **settings: bool) -> Tracker:
    section = TrackingSection.model_validate(settings)
    return Tracker(section, folder / "run", "run: {name: run}\n", {"train": 20, "sft": 40}, console or plain_console())


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=80, soft_wrap=True)


def test_one_object_a_step_in_full_precision_and_fixed_order(tmp_path: Path) -> None:
    with tracker(tmp_path) as track:
        track.log(0, {"eval/pass_at_1": 0.5})
        track.log(1, {"z": 0.1 + 0.2, "a": 3, "time/step_seconds": 1e-7, "m": float("nan"), "n": float("-inf")})
        # flushed at once: a run that is killed keeps its steps
        text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text == (
        '{"step": 0, "eval/pass_at_1": 0.5}\n'
        '{"step": 1, "a": 3.0, "m": null, "n": null, "time/step_seconds": 1e-07, "z": 0.30000000000000004}\n'
    )
    assert (tmp_path / "run" / "config.yaml").read_text() == "run: {name: run}\n"


def test_steps_rise(tmp_path: Path) -> None:
    with tracker(tmp_path) as track:
        track.log(1, {"a": 1.0})
        with pytest.raises(ValueError, match="step=1: must be above 1, the last one in .*metrics.jsonl"):
            track.log(1, {"a": 1.0})
        track.log(1, {"sft/loss": 1.0}, phase="sft")  # phases count apart


def test_resume_drops_what_lies_beyond(tmp_path: Path) -> None:
    with tracker(tmp_path) as track:
        for step in range(1, 6):
            track.log(step, {"a": step / 3})
    path = tmp_path / "run" / "metrics.jsonl"
    before = path.read_text().splitlines()
    with path.open("a") as file:
        file.write('{"step": 6, "a": 0.')  # killed in the middle of a line
    with tracker(tmp_path) as track:
        track.resume(3)
        assert path.read_text().splitlines() == before[:3]
        track.log(4, {"a": 9.0})
    assert [line["step"] for line in read_steps(path)] == [1, 2, 3, 4]
    assert read_steps(path)[3] == {"step": 4, "a": 9.0}
    assert {entry.name for entry in path.parent.iterdir()} == {"config.yaml", "log.txt", "metrics.jsonl"}


def test_a_run_that_is_not_resumed_begins_anew(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with tracker(tmp_path) as track:
            track.log(1, {"a": value})
    assert read_steps(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "a": 2.0}]
    assert read_steps(tmp_path / "run" / "metrics.previous.jsonl") == [{"step": 1, "a": 1.0}]


def test_progress_without_steps_is_shown_and_leaves_a_line_in_the_log_alone(tmp_path: Path) -> None:
    console = plain_console()
    with Tracker(TrackingSection(), tmp_path / "eval", None, console=console) as track:
        track.progress("eval", 8, 20, {"eval/pass_at_1": 0.25, "eval/problems": 8.0})
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "eval problem 8/20 pass@1 0.250\n"
    assert [path.name for path in (tmp_path / "eval").iterdir()] == ["log.txt"]


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UsageError, match="metrics.jsonl:2: is not a JSON object"):
        read_steps(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"step": 1}\n[2]\n', "metrics.jsonl:2: is no step: must be an object"),
        (b'{"reward/mean": 1}\n', "metrics.jsonl:1: is no step: must be an object"),
        (b"\xe1\x01\n", "metrics.jsonl: cannot be read: 'utf-8' codec"),
    ],
)
def test_what_is_no_step_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=reason):
        read_steps(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(("left", "says"), [(3, False), (2, True), (0, True)])
def test_steps_that_a_run_has_lost_are_said_to_be(tmp_path: Path, left: int, says: bool) -> None:
    with tracker(tmp_path) as track:
        for step in range(1, left + 1):
            track.log(step, {"a": 1.0})
        track.to_disk()
    with tracker(tmp_path) as track:
        track.resume(3)
    said = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert ("metrics.jsonl: lacks step 3" in said) == says


def test_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    console = plain_console()
    with tracker(tmp_path, console) as track:
        track.print("starting [bold]plain[/bold]")
        for step in (1, 20, 21, 40):
            track.log(step, {"sft/loss": 2.0}, phase="sft")
        track.log(12, {"reward/mean": 0.43, "ratio/clip_fraction": 0.0215, "kl/old_new": float("nan"), "other": 1.0})
    expected = [
        "starting [bold]plain[/bold]",
        "sft step 20/40 loss 2.000",
        "sft step 40/40 loss 2.000",
        "step 12/20 reward 0.430 clip 0.021 kl nan",
    ]
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == expected
    assert (tmp_path / "run" / "log.txt").read_text().splitlines() == expected


def test_one_live_line_on_a_terminal(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with tracker(tmp_path, console) as track:
        for step in (1, 2):
            track.log(step, {"reward/mean": step / 10})
        track.print("held-out pass@1 0.5")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "2/20 reward 0.200" in shown and "held-out pass@1 0.5\n" in shown
    assert "step 2/20" not in shown
    assert (tmp_path / "run" / "log.txt").read_text().splitlines() == [
        "step 1/20 reward 0.100",
        "step 2/20 reward 0.200",
        "held-out pass@1 0.5",
    ]


def test_wandb_without_a_key_is_offline_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with tracker(tmp_path, wandb=True) as track:
        track.log(1, {"sft/loss": 1.0, "optimizer/lr": 0.5}, phase="sft")
        assert wandb.run is not None and wandb.run.step == 1
        track.log(1, {"reward/mean": 0.5})
        track.log(2, {"reward/mean": 0.5})
        assert wandb.run.step == 43
    (line,) = [line for line in (tmp_path / "run" / "log.txt").read_text().splitlines() if line.startswith("wandb:")]
    assert line.startswith("wandb: no API key (WANDB_API_KEY or `wandb login`), so offline; to upload: wandb sync 'run/wandb/")
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert line.endswith(f"{folder.relative_to(tmp_path)}'")
    wandb.teardown()  # waits until wandb's own process has written everything
    (recorded,) = folder.glob("run-*.wandb")
    assert b"reward/mean" in recorded.read_bytes() and b"sft/optimizer/lr" in recorded.read_bytes()
    identity = (tmp_path / "run" / "wandb" / "run-id.txt").read_text().strip()
    assert folder.name.endswith(identity)
    with tracker(tmp_path, wandb=True) as track:  # a resumed run goes on under the same id
        track.resume(1)
        track.log(2, {"reward/mean": 0.5})
        assert wandb.run is not None and wandb.run.step == 43  # after 40 of supervised training, and 0 and 1: also made again
    assert len(list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{identity}"))) >= 1
    assert (tmp_path / "run" / "wandb" / "run-id.txt").read_text().strip() == identity


def test_where_a_wandb_key_may_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not sinks.wandb_account()
    (tmp_path / "netrc").write_text("machine elsewhere.example login user password abc\n")
    assert not sinks.wandb_account()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password abc\n")
    assert sinks.wandb_account()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example:8080")
    assert not sinks.wandb_account()
    monkeypatch.setenv("WANDB_API_KEY", "abc")
    assert sinks.wandb_account()


def test_tensorboard_gets_every_scalar(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tracker(tmp_path, tensorboard=True) as track:
        for step in (1, 2):
            track.log(step, {"reward/mean": step / 4})
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_tensorboard_has_no_step_twice_and_keeps_those_of_the_other_phase(tmp_path: Path) -> None:
    """A warm start that is killed after its last save, and again once RL has begun."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tracker(tmp_path, tensorboard=True) as track:  # killed before anything was saved
        track.log(1, {"optimizer/lr": 7.0}, phase="sft")
    with tracker(tmp_path, tensorboard=True) as track:
        for step in (1, 2, 3):
            track.log(step, {"optimizer/lr": step}, phase="sft")
        track.log(0, {"eval/pass_at_1": 0.5})
    with tracker(tmp_path, tensorboard=True) as track:
        track.resume(2, "sft")
        track.log(3, {"optimizer/lr": 3}, phase="sft")
        track.log(0, {"eval/pass_at_1": 0.5})
        for step in (1, 2):
            track.log(step, {"optimizer/lr": 10 + step})
    with tracker(tmp_path, tensorboard=True) as track:
        track.resume(1)
        track.log(2, {"optimizer/lr": 12})
    folder = tmp_path / "run" / "tensorboard"
    train, sft = (EventAccumulator(str(place)).Reload() for place in (folder, folder / "sft"))
    assert [(event.step, event.value) for event in train.Scalars("optimizer/lr")] == [(1, 11.0), (2, 12.0)]
    assert [(event.step, event.value) for event in train.Scalars("eval/pass_at_1")] == [(0, 0.5)]
    assert [(event.step, event.value) for event in sft.Scalars("optimizer/lr")] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_what_cannot_be_written_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    tracking.check(TrackingSection(), tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match="run.dir and run.name: .*run cannot be made: .*file is a file"):
        tracking.check(TrackingSection(), tmp_path / "file" / "run")
    with pytest.raises(UsageError, match="run.dir and run.name: .*run cannot be written: Not a directory"):
        tracker(tmp_path / "file")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"tracking.tensorboard=true: .*pip install 'moe-rl\[tensorboard\]'"):
        tracking.check(TrackingSection.model_validate({"tensorboard": True}), tmp_path)
