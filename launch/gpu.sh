#!/usr/bin/env bash
# Measures on this machine's GPUs what is otherwise only estimated or tried on CPUs: one command, at most eight minutes.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/gpu.sh [--only PART ...] [--seconds S] [-o FILE]

Runs benchmarks/gpu in this clone and prints one table: equality of a step, estimates beside the allocator, eight ranks on one
GPU, NCCL, changes of an elastic run, overheads, and what CUDA itself takes. A row that was not run says why; without a
GPU those of the GPU are not, and those of the CPU are. FILE (build/gpu/result.json) gets all numbers, again after every part.

Nothing is installed. The interpreter must have torch (2.11 or newer), torchvision, numpy, scipy and PyYAML. Where it has no
pydantic or no cryptography, the wheels in build/wheels are unpacked and used; `pip download pydantic cryptography -d
build/wheels` puts them there, with --platform, --python-version and --only-binary=:all: if the GPU is in another machine.

  PYTHON   the interpreter (default .venv/bin/python if it is there, else python3)
TEXT
}

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ ! -f "$root/benchmarks/gpu/gpu.py" ]]; then
    echo "launch/gpu.sh needs a clone of the repository: $root has no benchmarks/gpu" >&2
    exit 2
fi
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python3
    [[ -x "$root/.venv/bin/python" ]] && PYTHON="$root/.venv/bin/python"
fi
packages="$root/build/gpu/packages"
if ! "$PYTHON" -c "import cryptography, pydantic" 2> /dev/null; then
    shopt -s nullglob
    wheels=("$root"/build/wheels/*.whl)
    if [[ ${#wheels[@]} -eq 0 ]]; then
        echo "$PYTHON has no pydantic or no cryptography, and build/wheels has no wheels: run \`pip download pydantic cryptography -d build/wheels\` first" >&2
        exit 2
    fi
    mkdir -p "$packages"
    for wheel in "${wheels[@]}"; do
        "$PYTHON" -m zipfile -e "$wheel" "$packages"
    done
    export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}"
    if ! "$PYTHON" -c "import cryptography, pydantic" 2> /dev/null; then
        echo "the wheels in build/wheels are not for $("$PYTHON" -V) on this machine: download them again, with --python-version and --platform" >&2
        exit 2
    fi
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" "$root/benchmarks/gpu/gpu.py" "$@"
