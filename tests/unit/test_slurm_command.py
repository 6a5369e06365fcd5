"""`moe-rl slurm`: what it refuses, what it remarks on, and what it leaves."""

import json
import sys
from pathlib import Path

import pytest

from moe_rl import cli, config
from moe_rl.slurm import checks, command
from moe_rl.slurm.config import SlurmSection
from moe_rl.slurm.times import seconds
from parallel.errors import UsageError

FILE = """\
run: {name: one}
model: {preset: tiny_moe}
task: {name: addition}
checkpoint: {every: 10}
slurm: {time: 60}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with one.yaml and an empty PATH."""
    (tmp_path / "one.yaml").write_text(FILE)
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def slurm(*arguments: str) -> int:
    return cli.main(["slurm", "one.yaml", *arguments])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("12:00:00", 43200),
        ("2-0", 172800),
        ("1-12:30", 131400),
        ("1-00:00:01", 86401),
        ("unlimited", None),
    ],
)
def test_times_as_slurm_writes_them(text: str, wanted: int | None) -> None:
    assert seconds(text) == wanted


@pytest.mark.parametrize("text", ["0", "1h", "1:2:3:4", "-5", "", "1-", "00:00"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^slurm\.time=.*must be above 0 and written as Slurm does"):
        seconds(text)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["slurm.node=2"], "unknown key slurm.node; did you mean slurm.nodes?"),
        (["slurm.array.seed=[1]"], "unknown key slurm.array.seed; did you mean slurm.array.seeds?"),
        (["slurm.time=1h"], "slurm.time=1h: must be above 0 and written as Slurm does"),
        (["slurm.time=5"], "slurm.time=5: is over before slurm.signal_seconds=300 before its end; raise slurm.time"),
        (["slurm.signal_seconds=65536"], "slurm.signal_seconds=65536: must be less than or equal to 65535"),
        (["run.name=.."], "run.name=..: must match"),
        ([f"run.name={'x' * 201}"], "must have at most 200 characters"),
        (["slurm.memory=lots"], "slurm.memory=lots: must be a whole number with K, M, G or T, such as 200G"),
        (["slurm.exports={A-B: x}"], "slurm.exports.A-B: is no name of an environment variable"),
        (["slurm.sbatch=[mail-type=END]"], "slurm.sbatch: 'mail-type=END' is no option of sbatch; write it as --mail-type=END"),
        (["slurm.partition=a b"], "slurm.partition='a b': must not be empty or hold blanks"),
        (["slurm.mounts=[/a:/b]"], "slurm.mounts=['/a:/b']: needs slurm.container"),
        (["slurm.container=x", "slurm.mounts=[a:/b]"], "slurm.mounts: a:/b must be SOURCE:TARGET, both absolute"),
        (["slurm.container=x", "slurm.mounts=[/no/such:/b]"], "slurm.mounts: /no/such:/b: there is no /no/such"),
        (["slurm.container=./none.sqsh"], "slurm.container=./none.sqsh: no such file"),
        (["slurm.launcher=srun", "slurm.torchrun=[--x]"], "slurm.torchrun=['--x']: needs slurm.launcher=torchrun"),
        (["slurm.venv=nowhere"], "nowhere/bin/python; name the directory of a virtual environment"),
        (["slurm.gpus_per_node=4", "slurm.processes_per_node=8"], "must be at most slurm.gpus_per_node=4"),
        (["parallel.expert=3"], "parallel.expert=3: must divide model.experts=8"),
        (
            ["parallel.pipeline=4", "slurm.nodes=3", "slurm.gpus_per_node=2"],
            "slurm.nodes=3 x 2 processes a node = 6: must be a multiple of 4, what tensor=1 x pipeline=4 x context=1 with "
            "expert=1 x expert_tensor=1 needs; set slurm.nodes=4",
        ),
        (["parallel.expert_tensor=2", "parallel.tensor=2"], "uneven all-gather, which gloo (CPU) lacks"),
        (["run.dir=file"], "run.dir: file/one/checkpoints cannot be made"),
        (["slurm.dir=file"], "slurm.dir: file cannot be made"),
        (["checkpoint.load=nowhere"], "checkpoint.load=nowhere: no such directory"),
        (["task.name=file", "task.train_path=none.jsonl"], "none.jsonl"),
        (["--submit"], "sbatch: is not on the PATH"),
        (["slurm.array.overrides=[[slurm.nodes=2]]"], "slurm.array.overrides[0]: slurm.nodes=2 cannot differ"),
        (["slurm.array.overrides=[[run.step=2]]"], "slurm.array.overrides[0]: unknown key run.step"),
        (["slurm.array.overrides=[[run.name=a], [run.name=a]]"], "slurm.array: two of its runs are runs/a"),
        (["slurm.array.seeds=[1, 1]"], "slurm.array: two of its runs are runs/one-s1"),
        (["--submit", "--dry-run"], "not allowed with argument"),
    ],
)
def test_what_cannot_run_is_one_line_and_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], says: str
) -> None:
    assert slurm(*overrides) == 2
    out, err = capsys.readouterr()
    assert says in err and err.startswith("moe-rl: error: ") and err.count("\n") == 1 and out == ""
    assert sorted(path.name for path in folder.iterdir()) == ["file", "one.yaml"]


def noted(*overrides: str) -> str:
    settings = config.load("one.yaml", overrides)
    return "\n".join(checks.notes(settings, settings.slurm.per_node(settings.parallel, settings.run.processes)))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["checkpoint.every=0"], "checkpoint.every=0: the run saves at its end, or 300 seconds before the time limit; a crash"),
        (["checkpoint.every=0", "slurm.signal_seconds=0"], "every step is lost when slurm.time=60 is over"),
        (["slurm.signal_seconds=0"], "up to checkpoint.every=10 steps are lost when slurm.time=60 is over"),
        (["slurm.time=null"], "slurm.time: not set, so the limit is the partition's own"),
        (["run.processes=3"], "run.processes=3 counts where moe-rl starts the processes itself"),
        (["slurm.gpus_per_node=4", "slurm.processes_per_node=3"], "leaves 1 GPUs of every node idle"),
        (
            ["slurm.nodes=4", "parallel.tensor=4"],
            "parallel.tensor=4 with 1 processes a node: tensor-parallel groups lie across",
        ),
        (["slurm.nodes=2", "run.dir=/tmp/x"], "run.dir=/tmp/x: lies on a disk that other nodes do not share, as a rule"),
        (["slurm.container=x", "run.dir=/data"], "run.dir=/data: is not mounted in the container; add it to slurm.mounts"),
        (
            ["slurm.sbatch=[--nodes=4]"],
            "slurm.sbatch: --nodes=4 is known to sbatch alone; the checks and the rest of the script go",
        ),
        (["slurm.sbatch=['#SBATCH -N4']"], "go by slurm.nodes: set that"),
        (["slurm.gpus_per_node=1"], "memory of a GPU: about "),
        (["slurm.gpus_per_node=8", "model.preset=deepseek_v3", "parallel.expert=8"], "it does not fit; moe-rl plan shows"),
    ],
)
def test_what_may_not_be_meant_is_noted(overrides: list[str], says: str) -> None:
    overrides = [*overrides, *(["slurm.processes_per_node=1"] if "run.processes=3" in overrides else [])]
    assert says in noted(*overrides)


def test_a_save_interval_beyond_the_limit_is_noted_from_the_runs_own_steps(folder: Path) -> None:
    """10 steps of 400 seconds are 4000; the limit is 3600, of which the last 300 are the signal's."""
    run = folder / "runs" / "one"
    run.mkdir(parents=True)
    lines = [{"step": 0}, *({"step": step, "time/step_seconds": 400} for step in (1, 2))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    says = "at 400 seconds a step, as runs/one took, the first checkpoint comes after 4000 of the 3600 seconds of slurm.time=60"
    assert says in noted("run.dir=runs")
    assert "the first checkpoint" not in noted("checkpoint.every=8")  # 3200 of 3300


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], 1),
        (["parallel.expert=4", "slurm.nodes=2"], 2),
        (["run.processes=6", "slurm.nodes=2"], 3),
        (["slurm.gpus_per_node=8"], 8),
        (["slurm.gpus_per_node=8", "slurm.processes_per_node=4"], 4),
    ],
)
def test_processes_a_node(overrides: list[str], wanted: int) -> None:
    settings = config.load("one.yaml", overrides)
    assert settings.slurm.per_node(settings.parallel, settings.run.processes) == wanted


def test_numbers_of_yaml_are_texts() -> None:
    section = SlurmSection.model_validate({"time": 30, "memory": 0, "exports": {"A": 1}})
    assert (section.time, section.memory, section.exports) == ("30", "0", {"A": "1"})


def test_a_dry_run_prints_the_script_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm("--dry-run", "checkpoint.every=0") == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/usr/bin/env bash\n") and "note: " not in out and err.startswith("note: checkpoint.every=0")
    assert not (folder / "slurm").exists() and not (folder / "runs").exists()


def test_the_settings_lie_beside_the_script_and_every_call_makes_new_ones(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert slurm("run.seed=7") == 0
    assert "written: slurm/one/job_001.sh\nsubmit it: sbatch slurm/one/job_001.sh" in capsys.readouterr().out
    assert slurm("run.seed=8") == 0
    made = folder / "slurm" / "one"
    assert sorted(path.name for path in made.iterdir()) == ["job_001.sh", "job_001.yaml", "job_002.sh", "job_002.yaml"]
    assert [config.load(made / f"job_00{number}.yaml").run.seed for number in (1, 2)] == [7, 8]
    text = (made / "job_001.sh").read_text()
    assert f"settings={made}/job_001.yaml" in text and f"python={sys.executable}" in text
    assert (made / "job_001.sh").stat().st_mode & 0o111


def test_two_calls_at_once_do_not_write_into_each_other(folder: Path) -> None:
    """Of the other one the settings are there, and not yet the script."""
    settings = config.load("one.yaml", [])
    job = command.make_job(settings, 0, [])
    assert slurm() == 0
    before = job.settings[0].read_text()
    with pytest.raises(
        UsageError, match=r"one/job_001.yaml: was made just now, by another moe-rl slurm of this run; call this"
    ):
        command._write(job, "", [config.load("one.yaml", ["run.seed=9"])])
    assert job.settings[0].read_text() == before
    job.path.unlink()
    assert command.make_job(settings, 0, []).path.name == "job_002.sh"


def test_a_variant_of_an_array_is_loaded_anew_so_that_presets_count(folder: Path) -> None:
    dapo = "run.name=dapo, run.preset=dapo_32b, rollout.max_response_tokens=8, shaping.overlong_buffer=2"
    variants = f"slurm.array.overrides=[[model.preset=small_moe], [{dapo}]]"
    assert slurm(variants, "slurm.array.seeds=[5, 6]") == 0
    runs = [config.load(folder / "slurm" / "one" / f"job_001_{task}.yaml") for task in range(4)]
    assert [run.run.name for run in runs] == ["one-v0-s5", "one-v0-s6", "dapo-s5", "dapo-s6"]
    assert [run.run.seed for run in runs] == [5, 6, 5, 6]
    assert runs[0].model == config.load("one.yaml", ["model.preset=small_moe"]).model != runs[2].model
    assert runs[2].algorithm.name == "dapo"


@pytest.mark.parametrize("array", [False, True])
def test_what_sbatch_says_of_a_submission(folder: Path, capsys: pytest.CaptureFixture[str], array: bool) -> None:
    """Slurm's part is played by two lines; tests/slurm has the real one."""
    (folder / "sbatch").write_text('#!/bin/sh\n[ "$1" = --parsable ] && [ -f "$2" ] && echo \'77;cluster\'\n')
    (folder / "sbatch").chmod(0o755)
    assert slurm("--submit", *(["slurm.array.seeds=[0, 1]"] if array else [])) == 0
    out = capsys.readouterr().out
    assert out.startswith("submitted: job 77, slurm/one/job_001.sh\n")
    assert f"tail -F slurm/one/{'77_0' if array else '77'}.log\n" in out
    assert f"moe-rl report {'runs/one-s0 runs/one-s1' if array else 'runs/one'}\n" in out
    assert f"save now  {'timeout 2 ' * array}scancel --signal=USR1 --batch 77   (it saves, ends, and is queued again)" in out


def test_writing_where_one_may_not(folder: Path) -> None:
    checks.check_writable("run.dir", folder / "new" / "deeper")
    with pytest.raises(UsageError, match=r"run\.dir: .*file/x cannot be made, .*file is a file; choose another run\.dir"):
        checks.check_writable("run.dir", folder / "file" / "x")
