"""The script of the routing study: what it skips, and that nothing that fails hides the rest."""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType

import pytest

from moe_rl import config, yaml_text
from moe_rl.study import grid
from tests.study_runs import broken, killed

ROOT = Path(__file__).parents[2]


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("study_routing", ROOT / "scripts" / "study_routing.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["study_routing"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SCRIPT = loaded()


def test_a_failed_run_does_not_hide_the_others(tmp_path: Path) -> None:
    done = dict(grid.as_done(broken, [1, 2, 3], 2, 8))
    assert {number: future.result() for number, future in done.items() if number != 2} == {1: 0.25, 3: 0.75}
    assert grid.failure(done[1], tmp_path / "one") == ""
    assert not (tmp_path / "one").exists()
    assert grid.failure(done[2], tmp_path / "two") == "ValueError: two"
    written = (tmp_path / "two" / "output.txt").read_text()
    assert "in broken" in written and "is out" in written


def test_a_killed_process_is_a_failure_and_not_a_wait(tmp_path: Path) -> None:
    ((_, done),) = grid.as_done(killed, [9], 1, 8)
    assert grid.failure(done, tmp_path).startswith("BrokenProcessPool: ")


def test_a_run_is_not_made_again_under_the_same_settings(tmp_path: Path) -> None:
    point = SCRIPT.Point("grpo_r2", 4, 2e-4, 1)
    assert point.name == "grpo_r2-m4-lr0.0002-s1"
    settings = SCRIPT._settings([*point.overrides(), f"run.dir={tmp_path}"])
    assert (settings.replay.mode, settings.algorithm.minibatches, settings.optimizer.lr) == ("r2", 4, 2e-4)
    assert settings.optimizer.warmup_updates == 8 * 4
    assert str(settings.checkpoint.load) == "runs/study/base-s1"
    settings.directory.mkdir()
    assert not grid.finished(settings)
    (settings.directory / "config.yaml").write_text(config.dump(settings))
    assert not grid.finished(settings)
    (settings.directory / "summary.json").write_text('{"step": 3')
    assert not grid.finished(settings)
    (settings.directory / "summary.json").write_text('{"step": 31}')
    assert not grid.finished(settings)
    (settings.directory / "summary.json").write_text(f'{{"step": {settings.run.steps}}}')
    assert grid.finished(settings)
    # settings that only a later version knows do not count; another value does
    known = yaml_text.parse(config.dump(settings), "")
    del known["drift"]["watch"], known["eval"]
    (settings.directory / "config.yaml").write_text(yaml_text.dump(known))
    assert grid.finished(settings)
    known["rollout"]["prompts"] += 1
    (settings.directory / "config.yaml").write_text(yaml_text.dump(known))
    assert not grid.finished(settings)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--methods", "grpo,ppo"], "'ppo': must be among grpo, grpo_r2, gspo"),
        (["--seeds", "0,x"], "'0,x': must be integers with commas between them"),
        (["--lrs", "fast"], "'fast': must be numbers with commas between them"),
        (["--processes", "0"], "'0': must be an integer from 1 on"),
        (["--minibatches", "0"], "algorithm.minibatches=0: must be greater than 0"),
    ],
)
def test_bad_arguments_end_with_a_line_before_anything_is_trained(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["study_routing.py", *arguments])
    monkeypatch.setattr(grid, "train_all", lambda *_: pytest.fail("trained"))
    try:
        code = SCRIPT.main()
    except SystemExit as ended:  # argparse
        code = ended.code
    assert code == 2
    assert capsys.readouterr().err.rstrip().endswith(said)


def test_each_value_is_trained_once_and_failures_are_named_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: list[str] = []

    def train_all(warm: Sequence[grid.Job], jobs: Sequence[grid.Job], processes: int, runs_a_worker: int) -> dict[str, str]:
        assert [job.name for job in warm] == ["warm start of seed 1"] == list({job.base for job in jobs})
        seen.extend(job.name for job in jobs)
        return {jobs[0].name: "ValueError: no"}

    monkeypatch.chdir(tmp_path)  # holds no run: the study has nothing to show
    monkeypatch.setattr(grid, "train_all", train_all)
    monkeypatch.setattr(sys, "argv", ["study_routing.py", "--seeds", "1,1", "--minibatches", "2", "--methods", "gspo,gspo"])
    assert SCRIPT.main() == 1
    assert seen == ["gspo-m2-lr5e-05-s1", "gspo-m2-lr0.0002-s1", "gspo-m2-lr0.0006-s1"]
    assert capsys.readouterr().out.splitlines() == [
        "failed: gspo-m2-lr5e-05-s1: ValueError: no",
        "failed: study: runs/study: holds no complete run of 3; the first: gspo-m2-lr5e-05-s1: not begun",
        "the same command tries again what failed; errors in full: runs/study/NAME/output.txt",
    ]


def test_help_names_every_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["study_routing.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        SCRIPT.main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--methods", "--minibatches", "--lrs", "--seeds", "--processes"))


def test_a_job_without_its_warm_start_is_not_made(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two warm starts one fails; the job of the other one is made, and fails by itself."""
    settings = SCRIPT._settings([])
    warm = [grid.Job("one", settings), grid.Job("two", settings)]
    jobs = [grid.Job("a", settings, "one"), grid.Job("b", settings, "two"), grid.Job("c", settings, "two")]
    why = {"one": "ValueError: one", "b": "ValueError: b"}
    made: list[str] = []

    def as_done(make: object, items: Sequence[grid.Job], *_: int) -> Iterator[tuple[grid.Job, Future[float]]]:
        for job in items:
            made.append(job.name)
            future: Future[float] = Future()
            future.set_result(0.25)
            yield job, future

    monkeypatch.setattr(grid, "as_done", as_done)
    monkeypatch.setattr(grid, "failure", lambda done, directory: why.get(made[-1], ""))
    assert grid.train_all(warm, jobs, 1, 1) == why
    assert made == ["one", "two", "b", "c"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["one: ValueError: one", "two: is there"]
    assert lines[2].startswith("1/2 b: failed: ValueError: b (") and lines[3].startswith("2/2 c: pass@1 0.250 (")
