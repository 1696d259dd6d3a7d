#!/usr/bin/env bash
# Runs all tests, after installing what they need.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/test.sh [PYTEST ARGUMENTS ...]

Installs the package with its extras all and test into .venv (unless that was done) and runs the tests. At the end the skipped
tests are listed, one line per reason, those that need outside data by name. Four files at a time are run: many tests
start processes and wait for them.

  CAPSLOG_DATA   folder with outside data sets (bccd/, coco-eval-100/); tests that need one are skipped without it
TEXT
}

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
launch/install.sh all,test
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# hundreds of processes import the package, each of which would compile it first
unset PYTHONDONTWRITEBYTECODE
.venv/bin/python -m compileall -q -j 2 varuna_capslog detr_pipeline tests
# and four processes would each rewrite the asserts of a fresh clone
if [[ -z "$(find tests -name 'test_house.*-pytest-*.pyc' -print -quit)" ]]; then
    .venv/bin/python -m pytest --collect-only -q "$@" >/dev/null || true # the run itself says what is wrong
fi
exec .venv/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder "$@"
