#!/usr/bin/env bash
# Measures on this machine's GPUs what is otherwise only estimated or tried on CPUs: one command, at most five minutes.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/gpu.sh [--only PART ...] [--devices cuda|cpu ...] [--seconds S] [-o FILE]
       launch/gpu.sh --pack [PYTHON_VERSION]

Runs benchmarks/gpu in this clone and prints one table, the most valuable rows first: equality of a step, estimates beside the
allocator, eight ranks on one GPU, seconds of operators by class, what CUDA itself takes, changes of an elastic run, overheads,
NCCL. A row that was not run says why; without a GPU those of the GPU are not, and those of the CPU are. FILE
(build/gpu/result.json) gets all numbers, again after every row.

Nothing is installed, and no network is needed. The interpreter must have torch (2.11 or newer), torchvision, numpy, scipy and
PyYAML. Where it has no pydantic or no cryptography, the wheels in build/wheels are unpacked and used: --pack downloads them, on
a machine with a network, for Linux on x86-64 and that version of Python (3.12). Take build/wheels along; git ignores it.

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
if [[ "${1:-}" == --pack ]]; then
    [[ $# -le 2 ]] || { usage >&2; exit 2; }
    rm -rf "$root/build/wheels"
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --only-binary=:all: --implementation cp \
        --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --python-version "${2:-3.12}" \
        --dest "$root/build/wheels" pydantic cryptography
    echo "build/wheels has $(find "$root/build/wheels" -name '*.whl' | wc -l) wheels for Python ${2:-3.12}"
    exit 0
fi
packages="$root/build/gpu/packages"
if ! "$PYTHON" -c "import cryptography, pydantic" 2> /dev/null; then
    shopt -s nullglob
    wheels=("$root"/build/wheels/*.whl)
    if [[ ${#wheels[@]} -eq 0 ]]; then
        echo "$PYTHON has no pydantic or no cryptography, and build/wheels has no wheels: run \`launch/gpu.sh --pack\` first, where there is a network" >&2
        exit 2
    fi
    mkdir -p "$packages"
    for wheel in "${wheels[@]}"; do
        "$PYTHON" -m zipfile -e "$wheel" "$packages"
    done
    export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}"
    if ! "$PYTHON" -c "import cryptography, pydantic" 2> /dev/null; then
        echo "the wheels in build/wheels are not for $("$PYTHON" -V) on this machine: run \`launch/gpu.sh --pack\` with its version" >&2
        exit 2
    fi
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" "$root/benchmarks/gpu/gpu.py" "$@"
