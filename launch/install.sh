#!/usr/bin/env bash
# Makes .venv beside setup.py and installs the package into it, unless that was done since setup.py last changed.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/install.sh [EXTRAS]

Makes the virtual environment .venv in the repository and installs varuna-capslog into it with the given extras
(test, dev or test,dev; none by default). Does nothing when that is already done.

  PYTHON   the interpreter that makes the environment (default python3; 3.10 or newer)
TEXT
}

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
extras="${1:-}"
# a stamp per set of extras that was installed; a larger set serves a smaller wish
for done in "$root"/.venv/.installed-*; do
    [[ -f "$done" && "$done" -nt "$root/setup.py" ]] || continue
    missing=no
    for extra in ${extras//,/ }; do
        [[ "${done##*.installed}-" == *"-$extra-"* ]] || missing=yes
    done
    if [[ $missing == no ]]; then
        exit 0
    fi
done
stamp="$root/.venv/.installed-${extras//,/-}"
if [[ ! -x "$root/.venv/bin/python" ]]; then
    "${PYTHON:-python3}" -m venv "$root/.venv"
fi
echo "installing varuna-capslog${extras:+ with $extras} into $root/.venv"
"$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root${extras:+[$extras]}"
touch "$stamp"
