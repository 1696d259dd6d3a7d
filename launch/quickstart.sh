#!/usr/bin/env bash
# From a fresh clone to a trained detector and its report: one command, a few minutes, no GPU and no data set needed.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/quickstart.sh [KEY=VALUE ...]

Makes a virtual environment, installs the package, trains configs/digits.yaml (a small DETR over two pipeline stages, on
handwritten digits that come with scikit-learn) and writes a report. KEY=VALUE pairs change config keys, for example
train.max_seconds=60.

  PYTHON   the interpreter that makes the environment (default python3; 3.10 or newer)
TEXT
}

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
launch/install.sh
.venv/bin/capslog train configs/digits.yaml run_dir=runs/quickstart "$@"
.venv/bin/capslog report runs/quickstart
