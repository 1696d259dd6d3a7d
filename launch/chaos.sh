#!/usr/bin/env bash
# Injects faults into a training, or into a script, and checks that its results are unchanged. It needs a clone.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/chaos.sh [OPTIONS] [CONFIG] [KEY=VALUE ...]
       launch/chaos.sh script [OPTIONS] FILE [ARGS ...]

The first trains CONFIG (a small built-in model without one) on several hosts and workers of this machine, injects faults drawn
from a seed, and compares all losses, gradient norms and weights with an uninterrupted run of one process. The second does so
with a program that calls elastic.script.train. The exit status is 0 when all results are equal. The rig that does it is
tests/rig, which no wheel has; docs/chaos.md describes faults and judge. Linux only.

  PYTHON   interpreter with varuna-capslog's requirements (default: .venv of the repository, else python3)

TEXT
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ ! -f "$root/tests/rig/commands/program.py" ]]; then
    echo "launch/chaos.sh needs a clone of the repository: $root has no tests/rig" >&2
    exit 2
fi
python="${PYTHON:-}"
if [[ -z "$python" ]]; then
    python=python3
    [[ -x "$root/.venv/bin/python" ]] && python="$root/.venv/bin/python"
fi
case "${1:-}" in
    -h | --help) usage ;; # the options follow
esac
# the clone first: its tests, not those of an installed package or of the current folder
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -c 'import sys; sys.path[:] = filter(None, sys.path); from tests.rig.commands.program import main; main()' "$@"
