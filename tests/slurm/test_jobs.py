"""Real jobs: what they compute, how they end when a part of them is lost, and how they go on."""

import json
import signal
import time

import pytest

from tests.distributed.runs import Runs
from tests.slurm.cluster import SETTINGS, Cluster, Job

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

LAYOUT = ("parallel.expert=2", "slurm.nodes=2")
LAUNCHERS = {"torchrun": [], "srun": ["slurm.launcher=srun", "slurm.torchrun=[]"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """In a folder whose name needs quotes everywhere."""
    folder = tmp_path_factory.mktemp("jobs") / 'it\'s a "100%" $HOME'
    folder.mkdir()
    found = Runs(folder)
    found.yaml.write_text(found.yaml.read_text() + SETTINGS)
    return found


@pytest.fixture(scope="module")
def alone(runs: Runs, cluster: Cluster) -> list[dict[str, float]]:
    """Ten steps of the same run in two processes on this machine, without Slurm."""
    settings = ["run.name=alone", "parallel.expert=2", "run.steps=10"]
    done = cluster.moe_rl(runs.folder, "train", "run.yaml", *runs.shared, *settings)
    assert done.returncode == 0, done.stderr
    return runs.steps("alone")


def submit(runs: Runs, cluster: Cluster, name: str, *overrides: str) -> Job:
    return cluster.submit(runs.folder, *runs.shared, f"run.name={name}", *overrides)


def steps_so_far(runs: Runs, name: str) -> int:
    path = runs.folder / name / "metrics.jsonl"
    return path.read_text().count("\n") - 1 if path.exists() else -1


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_nodes_compute_what_two_processes_do(
    runs: Runs, cluster: Cluster, alone: list[dict[str, float]], launcher: str
) -> None:
    job = submit(runs, cluster, launcher, *LAYOUT, "run.steps=4", *LAUNCHERS[launcher])
    shown = job.wait("COMPLETED")
    assert shown["NumNodes"] == "2"
    assert runs.steps(launcher) == alone[:5]
    preflight = runs.folder / launcher / "preflight.txt"
    assert f"preflight: 2 ranks on 2 nodes, every group works; {preflight}\n" in job.text() and "step 4/4" in job.text()
    assert [line.split()[:2] for line in preflight.read_text().splitlines()[1:3]] in (
        [["0", "n1"], ["1", "n2"]],
        [["0", "n2"], ["1", "n1"]],
    )
    assert (job.log.with_suffix("") / "rank_1.log").is_file()


def last_line(job: Job) -> str:
    return job.text().splitlines()[-1]


def test_a_killed_rank_ends_the_job_and_is_named(runs: Runs, cluster: Cluster) -> None:
    job = submit(runs, cluster, "killed", *LAYOUT, "run.steps=500")
    job.wait_for("step 1", lambda: steps_so_far(runs, "killed") >= 1)
    job.rank(1).send_signal(signal.SIGKILL)
    began = time.monotonic()
    shown = job.wait("FAILED", seconds=60)
    assert time.monotonic() - began < 30
    assert shown["ExitCode"] == "137:0"  # 128 + SIGKILL
    why = "rank 1 failed first: killed by signal SIGKILL (out of memory?)"
    assert last_line(job) == f"job {job.number}: ended with code 137: {why}"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_failed_rank_ends_one_that_hangs_elsewhere(runs: Runs, cluster: Cluster, launcher: str) -> None:
    """The other node's rank waits in a call that no broken connection ends, as those of NCCL do."""
    settings = ["task.scorer=tests.distributed.rewards:fails_on_rank_1", *LAUNCHERS[launcher]]
    job = submit(runs, cluster, f"failed-{launcher}", *LAYOUT, *settings)
    sign = runs.folder / "failed_on_rank_1"
    job.wait_for("the failure", sign.exists)
    shown = job.wait("FAILED", seconds=60)
    assert time.time() - sign.stat().st_mtime < 30
    sign.unlink()
    assert shown["ExitCode"] == "2:0"
    assert last_line(job).startswith(f"job {job.number}: ended with code 2: moe-rl: error: ")
    assert "ValueError: no answer from the judge" in last_line(job)


def test_a_job_that_hangs_ends_with_all_stacks(runs: Runs, cluster: Cluster) -> None:
    settings = ["task.scorer=tests.distributed.rewards:waits_on_rank_1", "run.hang_seconds=3"]
    job = submit(runs, cluster, "hangs", *LAYOUT, *settings)
    shown = job.wait("FAILED")
    assert shown["ExitCode"] == "70:0"
    assert last_line(job).startswith(
        f"job {job.number}: ended with code 70: rank 1 failed first: hang: no rank got anywhere for 3 s"
    )
    assert "rank 1 reward: in wait_for_ever (rewards.py:" in last_line(job)
    stacks = runs.folder / "hangs" / "stacks"
    assert "wait_for_ever" in (stacks / "rank_00001.txt").read_text() and (stacks / "rank_00000.txt").is_file()


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
    assert runs.steps("lost") == alone[:5]


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


def test_preempted_again_and_again_it_ends_as_if_undisturbed(
    runs: Runs, cluster: Cluster, alone: list[dict[str, float]]
) -> None:
    """While it starts, by a job of a partition that goes before, and by the signal that comes before a time limit."""
    job = submit(runs, cluster, "preempted", *LAYOUT, "run.steps=10")
    job.wait_for("its first line", job.text)
    cluster.slurm("scancel", "--signal=USR1", "--batch", job.number)
    job.wait_for("step 1", lambda: steps_so_far(runs, "preempted") >= 1)
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"]
    cluster.slurm("sbatch", *urgent)  # SIGTERM to the ranks
    job.wait_for("a step of its third start", lambda: "\nstep " in job.text().partition("(start 3)")[2])
    cluster.slurm("scancel", "--signal=USR1", "--batch", job.number)
    shown = job.wait("COMPLETED")
    assert shown["Restarts"] == "3"
    text = job.text()
    assert text.count("saved, and queued again") == 3 and text.count("continuing after step") == 2
    assert "SIGUSR1, passed on to the run" in text and "failed" not in text
    assert runs.steps("preempted") == alone
    assert (job.log.with_name(f"{job.number}-restart3") / "rank_1.log").is_file()


def test_cancelled_is_not_queued_again(runs: Runs, cluster: Cluster) -> None:
    job = submit(runs, cluster, "cancelled", *LAYOUT, "run.steps=500")
    job.wait_for("step 1", lambda: steps_so_far(runs, "cancelled") >= 1)
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
