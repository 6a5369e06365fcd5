#!/usr/bin/env bash
# A real Slurm on this machine alone: virtual nodes on 127.0.0.1 from Debian's packages, to try job scripts and for tests/slurm.
#   scripts/slurm_sandbox.sh install                    the packages, through apt-get
#   scripts/slurm_sandbox.sh up FOLDER [NODES [PORT]]   starts it (again: nothing); then: export SLURM_CONF=FOLDER/slurm.conf
#   scripts/slurm_sandbox.sh down FOLDER                ends its jobs and daemons
# NODES: 2 by default, two CPUs each. PORT: the first of NODES + 1 ports, 17000 by default. Needs root, as slurmd does.
# It has an authentication daemon, a key and folders of its own, below FOLDER, and touches nothing outside.
set -euo pipefail

fail() { echo "slurm_sandbox: $*" >&2; exit 1; }

running() { # PIDFILE PROGRAM: whether the process of that file is alive and is that program
    [ -s "$1" ] && [ "$(cat "/proc/$(cat "$1")/comm" 2>/dev/null)" = "$2" ]
}

stop() { # PIDFILE PROGRAM
    running "$1" "$2" || return 0
    local pid
    pid=$(cat "$1")
    kill "$pid"
    for _ in $(seq 100); do [ -d "/proc/$pid" ] || return 0; sleep 0.05; done
    kill -KILL "$pid"
}

start_munge() {
    running "$folder/munged.pid" munged && return
    [ -f "$folder/munge.key" ] || (umask 077 && dd if=/dev/urandom of="$folder/munge.key" bs=128 count=1 status=none)
    munged --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
        --log-file="$folder/log/munged.log" --seed-file="$folder/munge.seed"
}

configure() {
    # cred_expire: a requeued job starts again a second later; at less than 5, after two minutes. KillWait: SIGTERM to SIGKILL.
    cat >"$folder/slurm.conf" <<CONF
ClusterName=sandbox
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=cred_expire=5,socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=1
JobRequeue=1
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
CONF
    local i
    for i in $(seq "$nodes"); do
        echo "NodeName=n$i NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((port + i)) CPUs=2 RealMemory=4000 State=UNKNOWN"
    done >>"$folder/slurm.conf"
    local common="Nodes=n[1-$nodes] MaxTime=INFINITE State=UP OverSubscribe=NO"
    echo "PartitionName=debug Default=YES $common GraceTime=60" >>"$folder/slurm.conf"
    echo "PartitionName=urgent $common PriorityTier=10 PreemptMode=off" >>"$folder/slurm.conf"
}

up() {
    for program in slurmctld slurmd munged sbatch; do
        command -v "$program" >/dev/null || fail "$program is not installed; run: $0 install"
    done
    [ "$(id -u)" = 0 ] || fail "needs root"
    mkdir -p "$folder/state" "$folder/log"
    chmod 755 "$folder" "$folder/log"
    start_munge
    if ! running "$folder/slurmctld.pid" slurmctld; then
        configure
        slurmctld -f "$SLURM_CONF"
    fi
    local i
    for i in $(seq "$nodes"); do
        mkdir -p "$folder/spool/n$i"
        running "$folder/slurmd-n$i.pid" slurmd || slurmd -N "n$i" -f "$SLURM_CONF"
    done
    for _ in $(seq 100); do
        [ "$(sinfo --noheader --format=%T 2>/dev/null | sort -u | grep -cv '^\(idle\|mixed\|allocated\)$')" = 0 ] &&
            [ -n "$(sinfo --noheader 2>/dev/null)" ] && break
        sleep 0.1
    done
    sinfo --Node || fail "slurmctld does not answer; see $folder/log"
    echo "export SLURM_CONF=$SLURM_CONF"
}

down() {
    if running "$folder/slurmctld.pid" slurmctld && scontrol ping >/dev/null 2>&1; then
        squeue --noheader --format=%A | sort -u | xargs --no-run-if-empty scancel --full || true
        for _ in $(seq 100); do [ -z "$(squeue --noheader 2>/dev/null)" ] && break; sleep 0.1; done
    fi
    local file
    stop "$folder/slurmctld.pid" slurmctld
    for file in "$folder"/slurmd-*.pid; do stop "$file" slurmd; done
    stop "$folder/munged.pid" munged
}

case ${1:-} in
install)
    command -v sbatch >/dev/null && command -v slurmctld >/dev/null && command -v slurmd >/dev/null && exit 0
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge
    ;;
up | down)
    [ -n "${2:-}" ] || fail "$1 needs a folder"
    mkdir -p "$2"
    folder=$(cd "$2" && pwd -P) nodes=${3:-2} port=${4:-17000}
    export SLURM_CONF=$folder/slurm.conf
    "$1"
    ;;
*) fail "usage: $0 install | up FOLDER [NODES [PORT]] | down FOLDER" ;;
esac
