#!/usr/bin/env bash
# One machine's part of an elastic run: the same command on each machine, each with its own --node-rank.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/elastic.sh [OPTIONS] CONFIG [KEY=VALUE ...]

Starts `capslog host` on this machine. Machines may leave, die and come back while the run trains; see docs/elastic.md.
Node 0 profiles, plans and serves the store, and stays to the end; a machine that was lost rejoins by the same command,
and further ones join with a --node-rank from --nnodes on. run_dir must be a folder that all machines share.

  --nnodes N         machines that begin together (default 1)
  --node-rank R      this machine's number (default 0)
  --master HOST      address of node 0 as the others reach it (needed when --nnodes is above 1)
  --port PORT        port of the store on node 0 (default 29400)
  --nproc K          workers of this machine (default: the config's workers, spread evenly over --nnodes)
  --name NAME        this machine's name in the run (default: the system's)
  --wait SECONDS     longest wait for node 0 (default 600)
  --dry-run          print the command and stop
  -h, --help         print this text

  PYTHON             interpreter with varuna-capslog installed (default: .venv of the repository, else python3)
TEXT
}

fail() {
    echo "launch/elastic.sh: $1" >&2
    exit 2
}

need() { # flag value: a whole number
    [[ "$2" =~ ^[0-9]+$ ]] || fail "$1 is '$2'; give a whole number"
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
nnodes=1 node_rank=0 master="" port=29400 dry_run=no
host_options=()
while [[ $# -gt 0 ]]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --dry-run) dry_run=yes; shift ;;
        --nnodes | --node-rank | --master | --port | --nproc | --name | --wait)
            [[ $# -ge 2 ]] || fail "$1 needs a value; see --help"
            case "$1" in
                --nnodes) need "$1" "$2"; nnodes="$2" ;;
                --node-rank) need "$1" "$2"; node_rank="$2" ;;
                --master) master="$2" ;;
                --port) need "$1" "$2"; port="$2" ;;
                --nproc | --wait) need "$1" "$2"; host_options+=("$1" "$2") ;;
                --name) host_options+=("$1" "$2") ;;
            esac
            shift 2
            ;;
        -*) fail "unknown option $1; see --help" ;;
        *) break ;;
    esac
done
[[ $# -ge 1 ]] || fail "no CONFIG given; see --help"
[[ "$nnodes" -ge 1 ]] || fail "--nnodes is $nnodes; there is at least one machine"
[[ -n "$master" || ( "$nnodes" -eq 1 && "$node_rank" -eq 0 ) ]] || fail "give --master HOST, the address of node 0"

python="${PYTHON:-}"
if [[ -z "$python" ]]; then
    python=python3
    [[ -x "$root/.venv/bin/python" ]] && python="$root/.venv/bin/python"
fi
address="${master:-127.0.0.1}:$port"
role=(--store "$address")
[[ "$node_rank" -eq 0 ]] && role=(--serve "$address")
command=("$python" -m varuna_capslog.cli host "$@" --nnodes "$nnodes" "${role[@]}" ${host_options[@]+"${host_options[@]}"})
if [[ "$dry_run" == yes ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
exec "${command[@]}"
