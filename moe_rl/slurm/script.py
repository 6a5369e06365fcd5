"""A job script as text. Pure: what it says depends on the `Job` alone."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_rl.slurm.config import SlurmSection
from parallel.conclusion import ENDED
from parallel.failures import SAVED

_PLAIN = re.compile(r"[\w./:,%=@+\[\]&|()*#-]+")
_DEAF = """bash -c 'trap "" TERM; exec "$0" "$@"'"""  # one that comes before the launcher listens must not end it
_PORTS = range(20000, 30000)  # below those that the kernel gives to outgoing connections


@dataclass(frozen=True)
class Job:
    """What a script is made of. All paths are absolute.

    words: the command line that made it. processes: on each node. cpus: of each. cwd: where it was submitted and runs.
    path: of the script; its logs lie beside it. settings: the file of the run's settings, in an array one a task.
    python: the interpreter, where the job runs.
    """

    name: str
    words: tuple[str, ...]
    section: SlurmSection
    processes: int
    cpus: int
    threads: int
    cwd: Path
    path: Path
    settings: tuple[Path, ...]
    python: str

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def is_array(self) -> bool:
        return self.section.array.size > 0


def script(job: Job) -> str:
    """The whole script."""
    blocks = [_head(job), _options(job), _signal(job), _environment(job), _meeting(job)]
    if job.section.setup:
        blocks.append(["# The site's own lines (slurm.setup); they may change any variable above.", *job.section.setup])
    blocks += [_rank(job), _run(job), _end(job)]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _head(job: Job) -> list[str]:
    section = job.section
    gpus = f"{section.gpus_per_node} GPUs a node" if section.gpus_per_node else "no GPUs"
    runs = f"{section.array.size} runs, each on " if job.is_array else ""
    one = job.settings[0].name
    files = f"{one} to {job.settings[-1].name}" if job.is_array else one
    return [
        "#!/usr/bin/env bash",
        f"# {job.name}: {runs}{section.nodes} node{'s' * (section.nodes > 1)} x {job.processes} "
        f"process{'es' * (job.processes > 1)}, {gpus}.",
        f"# Made by: {' '.join(shlex.join(job.words).split())}",
        f"# The settings are those that were checked then, in {files} beside this script: a later edit of the",
        "# configuration changes nothing here. Make another script rather than edit this one.",
    ]


def _options(job: Job) -> list[str]:
    section = job.section
    by_srun = section.launcher == "srun"
    log = f"{_pattern(job.folder)}/{'%A_%a' if job.is_array else '%j'}.log"
    options: dict[str, str | int | None] = {
        "--job-name": job.name,
        "--nodes": section.nodes,
        "--ntasks-per-node": job.processes if by_srun else 1,
        "--cpus-per-task": job.cpus if by_srun else job.cpus * job.processes,
        "--gpus-per-node": section.gpus_per_node or None,
        "--mem": section.memory,
        "--time": section.time,
        "--account": section.account,
        "--partition": section.partition,
        "--qos": section.qos,
        "--constraint": section.constraint,
        "--reservation": section.reservation,
        "--exclusive": "" if section.exclusive else None,
        "--chdir": str(job.cwd),
        "--output": log,
        "--open-mode": "append",
        "--requeue" if section.requeue else "--no-requeue": "",
        "--signal": f"B:USR1@{section.signal_seconds}" if section.signal_seconds else None,
        "--array": _array(job),
    }
    lines = [f"#SBATCH {key}{'=' * (value != '')}{_quoted(value)}" for key, value in options.items() if value is not None]
    return [*lines, *(f"#SBATCH {line.removeprefix('#SBATCH').strip()}" for line in section.sbatch)]


def _array(job: Job) -> str | None:
    array = job.section.array
    limit = f"%{array.concurrency}" if array.concurrency else ""
    return f"0-{array.size - 1}{limit}" if job.is_array else None


def _environment(job: Job) -> list[str]:
    section = job.section
    lines = ["# The environment. Paths of the run are relative to the folder that this was made in."]
    lines += [f"module load {shlex.quote(name)} || exit" for name in section.modules]
    lines.append(f"export OMP_NUM_THREADS={job.threads}")
    if "/" in job.python and section.container is None:
        lines.append(f'export PATH={shlex.quote(str(Path(job.python).parent))}:"$PATH"')
    lines += [f"export {name}={shlex.quote(value)}" for name, value in section.exports.items()]
    return [*lines, f"python={shlex.quote(job.python)}"]


def _meeting(job: Job) -> list[str]:
    own = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.is_array else "$SLURM_JOB_ID"
    settings = shlex.quote(str(job.settings[0]))
    if job.is_array:
        stem = str(job.settings[0]).removesuffix("_0.yaml")
        settings = f"{shlex.quote(stem)}_$SLURM_ARRAY_TASK_ID.yaml"
    lines = [
        "# Where the ranks meet: at the first node, at a port of this job's own.",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"port=$(({_PORTS.start} + SLURM_JOB_ID % {len(_PORTS)}))",
        "",
        "# The settings, and a folder for what ranks other than the main one print: a new one when the job is started again.",
        f"job={own}",
        f"settings={settings}",
        f"logs={shlex.quote(str(job.folder))}/$job${{SLURM_RESTART_COUNT:+-restart$SLURM_RESTART_COUNT}}",
    ]
    return lines


def _rank(job: Job) -> list[str]:
    lines = [
        "# What each rank runs: the main one prints into the job's log, every other one into a file of its own.",
        """rank='[ "${RANK:=$SLURM_PROCID}" = 0 ] || exec >>"$0/rank_$RANK.log" 2>&1; exec "$@"'""",
        'mkdir -p "$logs" || exit',
        f'rm -f "$logs"/{{{ENDED},telling,saved,agent_of_*,node_*,rank_*.json}}  # where another cluster had this number too',
    ]
    if job.section.launcher == "srun":
        lines.append("export MASTER_ADDR=$head MASTER_PORT=$port")
    start = "${SLURM_RESTART_COUNT:+ (start $((SLURM_RESTART_COUNT + 1)))}"
    return [*lines, f'echo "job $job on $SLURM_JOB_NODELIST{start}: $settings, ranks\' output in $logs"']


def _signal(job: Job) -> list[str]:
    by_hand = "by `scancel --signal=USR1 --batch JOB`"
    seconds = job.section.signal_seconds
    when = f"{seconds} seconds before the time limit, or {by_hand}" if seconds else by_hand
    return [
        f"# SIGUSR1 comes {when}. It is passed on: the run saves",
        f"# at its next minibatch and ends with code {SAVED}. Of SIGTERM (preemption) Slurm tells the ranks itself.",
        "step= signalled= heard=",
        """trap 'signalled=yes heard=yes; [ -z "$step" ] || kill -USR1 "$step"' USR1""",
    ]


def _run(job: Job) -> list[str]:
    section = job.section
    by_srun = section.launcher == "srun"
    tasks = job.processes if by_srun else 1
    cpus = job.cpus if by_srun else job.cpus * job.processes
    words = [
        f"--nodes={section.nodes} --ntasks-per-node={tasks} --cpus-per-task={cpus}",
        "--kill-on-bad-exit=1 --wait=0",
        *_container(job),
        *map(shlex.quote, section.srun),
    ]
    if not by_srun:
        words += [
            f'{_DEAF} "$python" -P -m parallel.torchrun "$logs"',
            f"--nnodes={section.nodes} --nproc-per-node={job.processes} --max-restarts=0",
            '--rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="$job"',
            *map(shlex.quote, section.torchrun),
            "--no-python",
        ]
    else:
        words.append(f'{_DEAF} "$python" -P -m parallel.one_rank "$logs"')
    words += ['bash -c "$rank" "$logs"', f'"$python" -P -m moe_rl.cli {section.command} "$settings" &']
    lines = [
        f"# One task a {'rank' if by_srun else 'node, which starts its ranks'}. One that fails says why, and ends the others.",
        *(
            f"{'' if i == 0 else '    '}{'srun ' * (i == 0)}{word}{' \\' * (i < len(words) - 1)}"
            for i, word in enumerate(words)
        ),
        "step=$!",
        "# A signal ends `wait` early; 127: it had already been told.",
        "code=0",
        "while :; do",
        "    signalled=",
        '    wait "$step"',
        "    ended=$?",
        '    [ "$ended" -eq 127 ] || code=$ended',
        '    [ -n "$signalled" ] || break',
        '    echo "job $job: SIGUSR1, passed on to the run"',
        "done",
        "# What the ranks say of it, where they could: the code of the one that failed first, and why.",
        f'if [ -s "$logs/{ENDED}" ]; then',
        f'    read -r code why <"$logs/{ENDED}"',
        'elif [ -n "$heard" ] && [ "$code" -ge 128 ]; then',
        f"    code={SAVED}  # before anything listened",
        'elif [ "$code" -ne 0 ]; then',
        '    why="see what srun says first, above"',
        "fi",
    ]
    return [
        f"code={SAVED} why=  # there is nothing to save yet",
        'if [ -z "$heard" ]; then',
        *(f"    {line}" for line in lines),
        "fi",
    ]


def _container(job: Job) -> Iterator[str]:
    section = job.section
    if section.container is not None:
        mounts = ",".join([f"{path}:{path}" for path in (job.cwd, job.folder)] + section.mounts)
        yield f"--container-image={shlex.quote(section.container)}"
        yield f"--container-mounts={shlex.quote(mounts)} --container-workdir={shlex.quote(str(job.cwd))}"


def _end(job: Job) -> list[str]:
    then = (
        [
            '    echo "job $job: saved, and queued again; it goes on from there"',
            '    scontrol requeue "$SLURM_JOB_ID" ||',
            '        echo "job $job: Slurm does not queue it again; submit this script again and it goes on from there"',
        ]
        if job.section.requeue
        else ['    echo "job $job: saved; submit this script again and it goes on from there"']
    )
    return [
        f'if [ "$code" -eq {SAVED} ]; then',
        *then,
        'elif [ "$code" -ne 0 ]; then',
        '    echo "job $job: ended with code $code${why:+: $why}"',
        "fi",
        'exit "$code"',
    ]


def _quoted(value: str | int) -> str:
    """A value on a #SBATCH line, which knows double quotes alone."""
    text = str(value)
    return text if not text or _PLAIN.fullmatch(text) else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _pattern(path: Path) -> str:
    """A path in --output, where % begins a pattern."""
    return str(path).replace("%", "%%")
