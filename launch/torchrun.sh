#!/usr/bin/env bash
# Trains over torchrun: on this machine, or as one of several nodes that all run this script.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/torchrun.sh [OPTIONS] CONFIG [KEY=VALUE ...]

Runs `python -m detr_pipeline.train CONFIG` in every worker that torchrun starts. Without options all workers run here.
With several nodes, run the same command on each with its own --node-rank; run_dir must be a folder that all nodes share.
torchrun restarts everybody from the last checkpoint when a worker is lost: with it elastic.enabled is ignored. For a run that
goes on live see launch/elastic.sh.

  --nnodes N         number of nodes (default 1)
  --node-rank R      this node's number, 0 to N-1 (default 0)
  --master HOST      address of node 0 (needed when --nnodes is above 1)
  --port PORT        port on node 0 (default 29500)
  --nproc N          workers on this node (default: pipeline.devices x pipeline.replicas of CONFIG over the nodes)
  --dry-run          print the command and stop
  -h, --help         print this text

  PYTHON             interpreter with varuna-capslog installed (default: .venv of the repository, else python3)
TEXT
}

fail() {
    echo "launch/torchrun.sh: $1" >&2
    exit 2
}

need() { # flag value: a whole number
    [[ "$2" =~ ^[0-9]+$ ]] || fail "$1 is '$2'; give a whole number"
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
nnodes=1 node_rank=0 master="" port=29500 nproc="" dry_run=no
while [[ $# -gt 0 ]]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --dry-run) dry_run=yes; shift ;;
        --nnodes | --node-rank | --master | --port | --nproc)
            [[ $# -ge 2 ]] || fail "$1 needs a value; see --help"
            case "$1" in
                --nnodes) need "$1" "$2"; nnodes="$2" ;;
                --node-rank) need "$1" "$2"; node_rank="$2" ;;
                --master) master="$2" ;;
                --port) need "$1" "$2"; port="$2" ;;
                --nproc) need "$1" "$2"; nproc="$2" ;;
            esac
            shift 2
            ;;
        -*) fail "unknown option $1; see --help" ;;
        *) break ;;
    esac
done
[[ $# -ge 1 ]] || fail "no CONFIG given; see --help"
[[ "$nnodes" -ge 1 ]] || fail "--nnodes is $nnodes; there is at least one node"
[[ "$node_rank" -lt "$nnodes" ]] || fail "--node-rank $node_rank is not below --nnodes $nnodes"
[[ "$nnodes" -eq 1 || -n "$master" ]] || fail "--nnodes $nnodes needs --master HOST, the address of node 0"

python="${PYTHON:-}"
if [[ -z "$python" ]]; then
    python=python3
    [[ -x "$root/.venv/bin/python" ]] && python="$root/.venv/bin/python"
fi
if [[ -z "$nproc" ]]; then
    world="$("$python" - "$@" <<'PYTHON'
import sys

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.start.choices import load_run_config

try:
    print(load_run_config(sys.argv[1], [*sys.argv[2:], "elastic.enabled=false"]).world_size)
except CapslogError as error:
    print(f"launch/torchrun.sh: {error}", file=sys.stderr)
    sys.exit(error.exit_status)
PYTHON
)"
    [[ $((world % nnodes)) -eq 0 ]] || fail "$world workers cannot be spread evenly over $nnodes nodes; give --nproc"
    nproc=$((world / nnodes))
fi

command=("$python" -m torch.distributed.run --nnodes "$nnodes" --nproc-per-node "$nproc")
if [[ "$nnodes" -eq 1 ]]; then
    command+=(--standalone)
else
    command+=(--node-rank "$node_rank" --master-addr "$master" --master-port "$port")
fi
command+=(-m detr_pipeline.train "$@")
if [[ "$dry_run" == yes ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
exec "${command[@]}"
