#!/usr/bin/env bash
#SBATCH --job-name=capslog
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@90
# An elastic run as a Slurm job: one task per node, each of them a `capslog host`.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: sbatch [SBATCH OPTIONS] launch/slurm.sh [OPTIONS] CONFIG [KEY=VALUE ...]
       launch/slurm.sh --dry-run [OPTIONS] CONFIG [KEY=VALUE ...]

Submit it from the repository's folder. Every node runs one `capslog host`; the first one serves the store. The job goes on
when other nodes fail (--no-kill). 90 seconds before its time limit it writes what it holds, ends and is put into the queue
again (--requeue), where it goes on from there; so it does after a preemption. run_dir must lie on a shared file system.
A second job joins the run of a first one with --store (see workers/store.json in its run_dir).

  --nproc K           workers of each node (default: the config's workers, spread evenly over the nodes)
  --port PORT         port of the store on the first node (default 20000 + job number modulo 10000)
  --store HOST:PORT   join the run whose store is served there
  --dry-run           print the commands and stop
  -h, --help          print this text

  PYTHON              interpreter with varuna-capslog installed (default: .venv of the repository, else python3)
TEXT
}

fail() {
    echo "launch/slurm.sh: $1" >&2
    exit 2
}

need() { # flag value: a whole number
    [[ "$2" =~ ^[0-9]+$ ]] || fail "$1 is '$2'; give a whole number"
}

# Slurm runs a copy of this file from a folder of its own
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[[ -x "$root/launch/elastic.sh" ]] || root="${SLURM_SUBMIT_DIR:-$PWD}"
[[ -x "$root/launch/elastic.sh" ]] || fail "$root is not the repository; submit the job from there"

nproc="" port="" store="" dry_run=no
given=("$@")
while [[ $# -gt 0 ]]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --dry-run) dry_run=yes; shift ;;
        --nproc | --port | --store)
            [[ $# -ge 2 ]] || fail "$1 needs a value; see --help"
            case "$1" in
                --nproc) need "$1" "$2"; nproc="$2" ;;
                --port) need "$1" "$2"; port="$2" ;;
                --store) [[ "$2" =~ ^.+:[0-9]+$ ]] || fail "$1 is '$2'; give HOST:PORT"; store="$2" ;;
            esac
            shift 2
            ;;
        -*) fail "unknown option $1; see --help" ;;
        *) break ;;
    esac
done
[[ $# -ge 1 ]] || fail "no CONFIG given; see --help"

if [[ -z "${SLURM_JOB_ID:-}" ]]; then
    [[ "$dry_run" == yes ]] || fail "this is no Slurm job; submit it: sbatch --nodes=N launch/slurm.sh ..., or see --dry-run"
    sent=()
    for word in "${given[@]}"; do [[ "$word" == --dry-run ]] || sent+=("$word"); done
    printf '%q ' sbatch "$root/launch/slurm.sh" "${sent[@]}"
    echo
    # what the job would run, with a job's variables
    export SLURM_JOB_ID=0 SLURM_NNODES=2 SLURM_JOB_NODELIST="FIRST,SECOND" SLURM_SUBMIT_DIR="$root"
    nodes="FIRST"
else
    nodes="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
fi
master="${nodes%%$'\n'*}"
port="${port:-$((20000 + SLURM_JOB_ID % 10000))}"

# A task: node 0 serves, unless all join another job's run. Its name is the node's.
options=(--nnodes "$SLURM_NNODES")
[[ -z "$nproc" ]] || options+=(--nproc "$nproc")
if [[ -n "$store" ]]; then
    options+=(--master "${store%:*}" --port "${store##*:}")
    rank='$((SLURM_PROCID + 1))'
else
    options+=(--master "$master" --port "$port")
    rank='$SLURM_PROCID'
fi
task="exec $(printf '%q ' "$root/launch/elastic.sh" "${options[@]}")"
task+="--node-rank $rank --name \"\$SLURMD_NODENAME\" $(printf '%q ' "$@")"
command=(srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0
    bash -c "$task")
if [[ "$dry_run" == yes ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi

# sbatch's --signal reaches this shell alone: srun passes it on to all tasks, for each host to hear.
near_end=no
"${command[@]}" &
srun=$!
trap 'near_end=yes; kill -USR1 $srun' USR1
trap 'kill -TERM $srun' TERM
status=0
while kill -0 "$srun" 2>/dev/null; do
    wait "$srun" && status=0 || status=$?
done
if [[ "$near_end" == yes && "$status" -eq 143 ]]; then
    echo "launch/slurm.sh: the time limit is near and the run is parked; it goes on when the job runs again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
