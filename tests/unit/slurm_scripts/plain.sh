#!/usr/bin/env bash
# one: 2 nodes x 1 process, no GPUs.
# Made by: moe-rl slurm run.yaml slurm.nodes=2
# The settings are those that were checked then, in job_001.yaml beside this script: a later edit of the
# configuration changes nothing here. Make another script rather than edit this one.

#SBATCH --job-name=one
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --chdir=/home/me/runs
#SBATCH --output=/home/me/runs/slurm/one/%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300

# SIGUSR1 comes 300 seconds before the time limit, or by `scancel --signal=USR1 --batch JOB`. It is passed on: the run saves
# at its next minibatch and ends with code 75. Of SIGTERM (preemption) Slurm tells the ranks itself.
step= signalled= heard=
trap 'signalled=yes heard=yes; [ -z "$step" ] || kill -USR1 "$step"' USR1

# The environment. Paths of the run are relative to the folder that this was made in.
export OMP_NUM_THREADS=1
export PATH=/home/me/.venv/bin:"$PATH"
python=/home/me/.venv/bin/python

# Where the ranks meet: at the first node, at a port of this job's own.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

# The settings, and a folder for what ranks other than the main one print: a new one when the job is started again.
job=$SLURM_JOB_ID
settings=/home/me/runs/slurm/one/job_001.yaml
logs=/home/me/runs/slurm/one/$job${SLURM_RESTART_COUNT:+-restart$SLURM_RESTART_COUNT}

# What each rank runs: the main one prints into the job's log, every other one into a file of its own.
rank='[ "${RANK:=$SLURM_PROCID}" = 0 ] || exec >>"$0/rank_$RANK.log" 2>&1; exec "$@"'
mkdir -p "$logs" || exit
rm -f "$logs"/{ended,telling,saved,agent_of_*,node_*,rank_*.json}  # where another cluster had this number too
echo "job $job on $SLURM_JOB_NODELIST${SLURM_RESTART_COUNT:+ (start $((SLURM_RESTART_COUNT + 1)))}: $settings, ranks' output in $logs"

code=75 why=  # there is nothing to save yet
if [ -z "$heard" ]; then
    # One task a node, which starts its ranks. One that fails says why, and ends the others.
    srun --nodes=2 --ntasks-per-node=1 --cpus-per-task=8 \
        --kill-on-bad-exit=1 --wait=0 \
        bash -c 'trap "" TERM; exec "$0" "$@"' "$python" -P -m parallel.torchrun "$logs" \
        --nnodes=2 --nproc-per-node=1 --max-restarts=0 \
        --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="$job" \
        --no-python \
        bash -c "$rank" "$logs" \
        "$python" -P -m moe_rl.cli train "$settings" &
    step=$!
    # A signal ends `wait` early; 127: it had already been told.
    code=0
    while :; do
        signalled=
        wait "$step"
        ended=$?
        [ "$ended" -eq 127 ] || code=$ended
        [ -n "$signalled" ] || break
        echo "job $job: SIGUSR1, passed on to the run"
    done
    # What the ranks say of it, where they could: the code of the one that failed first, and why.
    if [ -s "$logs/ended" ]; then
        read -r code why <"$logs/ended"
    elif [ -n "$heard" ] && [ "$code" -ge 128 ]; then
        code=75  # before anything listened
    elif [ "$code" -ne 0 ]; then
        why="see what srun says first, above"
    fi
fi

if [ "$code" -eq 75 ]; then
    echo "job $job: saved, and queued again; it goes on from there"
    scontrol requeue "$SLURM_JOB_ID" ||
        echo "job $job: Slurm does not queue it again; submit this script again and it goes on from there"
elif [ "$code" -ne 0 ]; then
    echo "job $job: ended with code $code${why:+: $why}"
fi
exit "$code"
