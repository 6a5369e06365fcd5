"""Real jobs: what they compute, how they end when a part of them is lost, and how they go on."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.runs import Runs
from tests.slurm.cluster import SETTINGS, Cluster, Job

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

# Whether a run ends with that code: until it does, a stand-in shows what the script makes of it.
LAYOUT = ("parallel.expert=2", "slurm.nodes=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    found = Runs(tmp_path_factory.mktemp("runs"))
    found.yaml.write_text(found.yaml.read_text() + SETTINGS)
    return found


@pytest.fixture(scope="module")
def alone(runs: Runs, cluster: Cluster) -> list[dict[str, float]]:
    """The steps of the same run in two processes on this machine, without Slurm."""
    done = cluster.moe_rl(runs.folder, "train", "run.yaml", *runs.shared, "run.name=alone", "parallel.expert=2", "run.steps=4")
    assert done.returncode == 0, done.stderr
    return runs.steps("alone")


def submit(runs: Runs, cluster: Cluster, name: str, *overrides: str) -> Job:
    return cluster.submit(runs.folder, *runs.shared, f"run.name={name}", *overrides)


def steps_so_far(runs: Runs, name: str) -> int:
    path = runs.folder / name / "metrics.jsonl"
    return path.read_text().count("\n") - 1 if path.exists() else -1


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_two_nodes_compute_what_two_processes_do(
    runs: Runs, cluster: Cluster, alone: list[dict[str, float]], launcher: str
) -> None:
    extra = [] if launcher == "torchrun" else ["slurm.torchrun=[]"]
    job = submit(runs, cluster, launcher, *LAYOUT, "run.steps=4", f"slurm.launcher={launcher}", *extra)
    shown = job.wait("COMPLETED")
    assert shown["NumNodes"] == "2"
    assert runs.steps(launcher) == alone
    assert "step 4/4" in job.text()
    assert (job.log.with_suffix("") / "rank_1.log").is_file()


def test_a_killed_rank_ends_the_job_and_is_named(runs: Runs, cluster: Cluster) -> None:
    job = submit(runs, cluster, "killed", *LAYOUT, "run.steps=500")
    job.wait_for("step 1", lambda: steps_so_far(runs, "killed") >= 1)
    job.rank(1).send_signal(signal.SIGKILL)
    began = time.monotonic()
    shown = job.wait("FAILED", seconds=60)
    assert time.monotonic() - began < 60
    assert shown["ExitCode"] == "137:0"  # 128 + SIGKILL
    assert "rank 1 failed first: killed by signal SIGKILL (out of memory?)" in job.text()
    assert job.text().count("failed first") == 1


def test_a_lost_node_queues_the_job_again_and_it_goes_on(runs: Runs, cluster: Cluster, alone: list[dict[str, float]]) -> None:
    job = submit(runs, cluster, "lost", *LAYOUT, "run.steps=4", "checkpoint.every=1")
    job.wait_for("step 2", lambda: steps_so_far(runs, "lost") >= 2)
    cluster.slurm("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    try:
        job.wait_for("its place in the queue", lambda: job.state == "PENDING", seconds=60)
    finally:
        cluster.slurm("scontrol", "update", "nodename=n2", "state=resume")
    shown = job.wait("COMPLETED")
    assert shown["Restarts"] == "1"
    assert "(start 2)" in job.text() and "continuing after step" in job.text()
    assert runs.steps("lost") == alone


def test_an_array_trains_its_seeds_and_the_report_reads_them(runs: Runs, cluster: Cluster) -> None:
    job = submit(runs, cluster, "seeds", "run.steps=2", "slurm.array.seeds=[3,4]")
    job.wait_for("both ends", lambda: not cluster.slurm("squeue", "--noheader", f"--jobs={job.number}").strip())
    assert {runs.steps("seeds-s3")[-1]["step"], runs.steps("seeds-s4")[-1]["step"]} == {2}
    assert runs.steps("seeds-s3") != runs.steps("seeds-s4")
    assert "run directory:" in job.text()
    page = runs.folder / "page.html"
    paths = [str(runs.folder / name) for name in ("seeds-s3", "seeds-s4")]
    done = cluster.moe_rl(runs.folder, "report", *paths, "--output", str(page))
    assert done.returncode == 0, done.stderr
    assert "seeds-s3" in page.read_text() and "seeds-s4" in page.read_text()


@pytest.fixture
def awkward(tmp_path: Path) -> Path:
    """A folder whose name needs quotes everywhere."""
    folder = tmp_path / 'it\'s a "100%" $HOME'
    folder.mkdir()
    python = folder / "python"
    stand_in = Path(__file__).with_name("stand_in.py")
    python.write_text(
        f'#!/usr/bin/env bash\ncase "$*" in *parallel.torchrun*) exec {sys.executable} "$@" ;;\n'
        f'*) exec {sys.executable} "{stand_in}" "$@" ;;\nesac\n'
    )
    python.chmod(0o755)
    settings = SETTINGS.replace("setup: [head=127.0.0.1]", 'setup: [head=127.0.0.1, "python=$PWD/python"]')
    model = "model: {preset: tiny_moe}\ntask: {name: addition}\n"
    (folder / "run.yaml").write_text(model + settings.replace("exports: {", 'exports: {SAID: "it\'s", '))
    return folder


@pytest.mark.parametrize("way", ["scancel --signal=USR1 --batch", "scancel --signal=TERM"])
def test_a_signal_saves_and_queues_the_job_again(awkward: Path, cluster: Cluster, way: str) -> None:
    """The script's side alone: a stand-in counts in place of the run."""
    job = cluster.submit(awkward, "run.name=signalled", *LAYOUT)
    ranks = [awkward / f"progress_{rank}.txt" for rank in (0, 1)]
    job.wait_for("the first step", lambda: "after step 0" in job.text())
    time.sleep(1)
    cluster.slurm(*way.split(), job.number)
    job.wait_for("both saved", lambda: all(path.exists() for path in ranks), seconds=30)
    saved = int(ranks[0].read_text())
    assert 0 < saved < 40
    shown = job.wait("COMPLETED")
    assert shown["Restarts"] == "1"
    text = job.text()
    assert "saved, and queued again" in text and f"after step {saved}\n" in text and text.count("done\n") == 1
    assert "failed first" not in text
    assert f"{awkward}/slurm/signalled/job_001.yaml" in text
    again = job.log.with_name(f"{job.number}-restart1")
    assert "done" in (again / "rank_1.log").read_text()


def test_a_signalled_run_goes_on_to_the_same_end(runs: Runs, cluster: Cluster, alone: list[dict[str, float]]) -> None:
    job = submit(runs, cluster, "signalled", *LAYOUT, "run.steps=4")
    job.wait_for("step 1", lambda: steps_so_far(runs, "signalled") >= 1)
    cluster.slurm("scancel", "--signal=USR1", "--batch", job.number)
    shown = job.wait("COMPLETED")
    assert shown["Restarts"] == "1"
    assert "saved, and queued again" in job.text() and "continuing after step" in job.text()
    assert runs.steps("signalled") == alone


def test_cancelled_is_not_queued_again(awkward: Path, cluster: Cluster) -> None:
    job = cluster.submit(awkward, "run.name=cancelled", *LAYOUT)
    job.wait_for("the first step", lambda: "after step 0" in job.text())
    cluster.slurm("scancel", job.number)
    shown = job.wait("CANCELLED")
    assert shown["Restarts"] == "0"
    assert "queued again" not in job.text()


def test_what_slurm_refuses_is_said_in_one_line(runs: Runs, cluster: Cluster) -> None:
    done = cluster.moe_rl(runs.folder, "slurm", "run.yaml", *runs.shared, "slurm.partition=nowhere", "--submit")
    assert done.returncode == 2 and done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert line == (
        "moe-rl: error: sbatch refused slurm/run/job_001.sh: invalid partition specified: nowhere; "
        "Batch job submission failed: Invalid partition name specified"
    )


def test_the_settings_are_those_that_were_checked(runs: Runs, cluster: Cluster) -> None:
    """The configuration is edited while the job waits."""
    cluster.slurm("scontrol", "update", "nodename=n[1-2]", "state=drain", "reason=test")
    before = runs.yaml.read_text()
    try:
        job = submit(runs, cluster, "edited", "run.steps=1")
        runs.yaml.write_text(before.replace("lr: 1e-3", "lr: 1e-9"))
    finally:
        cluster.slurm("scontrol", "update", "nodename=n[1-2]", "state=resume")
    job.wait("COMPLETED")
    runs.yaml.write_text(before)
    assert json.loads((runs.folder / "edited" / "metrics.jsonl").read_text().splitlines()[1])["optimizer/lr"] == 1e-3
