"""Job scripts, whole. `python tests/unit/test_slurm_script.py` writes tests/unit/slurm_scripts anew: then read what changed."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_rl.slurm.config import SlurmSection
from moe_rl.slurm.script import Job, script

FOLDER = Path(__file__).with_name("slurm_scripts")
HOME = Path("/home/me/runs")


def job(**section: Any) -> Job:
    folder = HOME / "slurm" / "one"
    return Job(
        name="one",
        words=("moe-rl", "slurm", "run.yaml", "slurm.nodes=2"),
        section=SlurmSection(**{"nodes": 2, **section}),
        processes=section.get("gpus_per_node", 1),
        cpus=8,
        threads=1,
        cwd=HOME,
        path=folder / "job_001.sh",
        settings=(folder / "job_001.yaml",),
        python="/home/me/.venv/bin/python",
    )


SITE: dict[str, Any] = {
    "nodes": 4,
    "gpus_per_node": 8,
    "memory": "900G",
    "time": "2-00:00:00",
    "account": "project7",
    "partition": "h100,h200",
    "qos": "high",
    "constraint": "nvlink&ib",
    "reservation": "mine",
    "exclusive": True,
    "modules": ["cuda/13", "nccl"],
    "exports": {"NCCL_IB_HCA": "mlx5", "GREETING": "it's $HOME"},
    "setup": ['head="$head-ib0"'],
    "sbatch": ["--mail-type=END", "#SBATCH --gpus-per-node=h100:8"],
    "srun": ["--cpu-bind=none", "--comment=a job"],
    "torchrun": ["--log-line-prefix-template=[${rank}] "],
}
JOBS = {
    "plain": job(),
    "site": job(**SITE),
    "array_in_container": replace(
        job(
            container="registry#moe:1",
            mounts=["/data:/data:ro"],
            gpus_per_node=8,
            signal_seconds=0,
            requeue=False,
            array={"seeds": [0, 1, 2], "concurrency": 2},
        ),
        settings=tuple(HOME / "slurm" / "one" / f"job_001_{task}.yaml" for task in range(3)),
        python="python",
    ),
    "by_srun": job(launcher="srun", gpus_per_node=4),
}


@pytest.mark.parametrize("name", JOBS)
def test_scripts_are_as_they_were_read(name: str) -> None:
    assert script(JOBS[name]) == (FOLDER / f"{name}.sh").read_text(), "tests/unit/test_slurm_script.py writes it anew"


@pytest.mark.parametrize("name", JOBS)
def test_bash_can_read_them_and_options_come_before_commands(name: str) -> None:
    text = script(JOBS[name])
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]  # sbatch would not see it
    assert max(map(len, lines)) <= 160


def test_a_sites_options_come_last_so_that_they_win() -> None:
    lines = script(JOBS["site"]).splitlines()
    assert lines.index("#SBATCH --gpus-per-node=h100:8") > lines.index("#SBATCH --gpus-per-node=8")
    assert lines.index("export NCCL_IB_HCA=mlx5") > lines.index("export OMP_NUM_THREADS=1")
    assert "#SBATCH --mail-type=END" in lines


FAKE = {
    "scontrol": 'echo "scontrol $*" >>"$CALLS"; [ "$1" != show ] || printf "n1\\nn2\\n"; [ "$1 $REFUSE" != "requeue yes" ]',
    "srun": 'printf "%s\\n" "$@" >"$WORDS"; [ -z "$TRAP" ] || trap "exit 75" USR1; '
    'for i in $(seq ${SECONDS_TENTHS:-0}); do sleep 0.1; done; exit "$CODE"',
    "module": 'echo "module $*" >>"$CALLS"',
}


def play(tmp_path: Path, job: Job, code: int, **env: str) -> tuple[subprocess.CompletedProcess[str], list[str], list[str]]:
    """Runs the script where Slurm's commands only note what they are called with: how it ends, srun's words, other calls."""
    for name, body in FAKE.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    folder = tmp_path / "my jobs"
    folder.mkdir(exist_ok=True)
    job = replace(job, path=folder / "job_001.sh", settings=tuple(folder / path.name for path in job.settings))
    job.path.write_text(script(job))
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "WORDS": str(tmp_path / "words"),
        "TRAP": "",
        "REFUSE": "",
        "CODE": str(code),
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }
    done = subprocess.run(["bash", job.path], env=environment | env, capture_output=True, text=True, timeout=30)
    words, calls = tmp_path / "words", tmp_path / "calls"
    return done, words.read_text().splitlines() if words.exists() else [], calls.read_text().splitlines()


@pytest.mark.parametrize(("code", "requeue"), [(0, True), (1, True), (137, True), (75, True), (75, False)])
def test_only_a_saved_run_is_queued_again(tmp_path: Path, code: int, requeue: bool) -> None:
    done, _, calls = play(tmp_path, job(requeue=requeue), code)
    assert done.returncode == code
    assert ("scontrol requeue 12345" in calls) == (code == 75 and requeue)
    assert ("ended with code" in done.stdout) == (code not in (0, 75))


def test_the_signal_is_passed_on_and_the_runs_own_code_counts(tmp_path: Path) -> None:
    """The shell signals itself while the run goes on; `wait` then ends early with another code."""
    setup = ["( sleep 1; kill -USR1 $$ ) &"]
    done, _, calls = play(tmp_path, job(setup=setup), 3, TRAP="yes", SECONDS_TENTHS="80")
    assert done.returncode == 75 and "scontrol requeue 12345" in calls
    assert "SIGUSR1, passed on to the run" in done.stdout


def test_a_signal_is_heard_from_the_first_line_on(tmp_path: Path) -> None:
    """While modules are loaded, or before srun listens: the job is queued again, as there is nothing to save."""
    done, words, calls = play(tmp_path, job(setup=["kill -USR1 $$"]), 0)
    assert done.returncode == 75 and words == [] and "scontrol requeue 12345" in calls
    assert "ended with code" not in done.stdout


def test_a_signal_of_which_srun_died_came_before_anything_listened(tmp_path: Path) -> None:
    done, _, calls = play(tmp_path, job(setup=["( sleep 1; kill -USR1 $$ ) &"]), 138, SECONDS_TENTHS="20")
    assert done.returncode == 75 and "scontrol requeue 12345" in calls


def test_what_a_job_of_the_same_number_left_is_not_this_ones(tmp_path: Path) -> None:
    """A cluster that was set up anew counts from 1 again."""
    logs = tmp_path / "my jobs" / "12345"
    logs.mkdir(parents=True)
    for name in ("ended", "telling", "saved", "agent_of_0", "rank_1.json", "rank_1.log"):
        (logs / name).write_text("137 rank 1 failed first: killed by signal SIGKILL\n")
    done, _, _ = play(tmp_path, job(), 0)
    assert done.returncode == 0 and "ended with code" not in done.stdout
    assert [path.name for path in logs.iterdir()] == ["rank_1.log"]


def test_where_slurm_does_not_queue_it_again_that_is_said(tmp_path: Path) -> None:
    done, _, _ = play(tmp_path, job(), 75, REFUSE="yes")
    assert done.returncode == 75
    assert "Slurm does not queue it again; submit this script again and it goes on from there" in done.stdout


def test_words_arrive_as_they_were_written(tmp_path: Path) -> None:
    site = {key: value for key, value in SITE.items() if key != "setup"}
    done, words, calls = play(tmp_path, job(**site, setup=['echo "$GREETING at $head"']), 0)
    assert "it's $HOME at n1" in done.stdout
    assert "--comment=a job" in words and "--log-line-prefix-template=[${rank}] " in words
    assert "--rdzv-endpoint=n1:22345" in words and "--rdzv-id=12345" in words
    assert words[-1] == str(tmp_path / "my jobs" / "job_001.yaml")
    assert calls[:2] == ["module load cuda/13", "module load nccl"]


def test_a_task_of_an_array_has_its_own_settings_logs_and_port(tmp_path: Path) -> None:
    env = {"SLURM_ARRAY_JOB_ID": "12340", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "1"}
    _, words, _ = play(tmp_path, JOBS["array_in_container"], 0, **env)
    assert words[-1] == str(tmp_path / "my jobs" / "job_001_2.yaml")
    assert str(tmp_path / "my jobs" / "12340_2-restart1") in words
    assert "--rdzv-endpoint=n1:22345" in words
    mounts = f"--container-mounts={HOME}:{HOME},{tmp_path}/my jobs:{tmp_path}/my jobs,/data:/data:ro"
    assert mounts in words


def test_a_name_is_no_pattern_of_slurms() -> None:
    text = script(replace(job(), path=Path('/a 100%/"b"/job_001.sh')))
    assert re.search(r'^#SBATCH --output="/a 100%%/\\"b\\"/%j\.log"$', text, re.MULTILINE)


if __name__ == "__main__":
    for name, one in JOBS.items():
        (FOLDER / f"{name}.sh").write_text(script(one))
