#!/usr/bin/env bash
# Makes .venv beside setup.py and installs the package into it, unless that was done since setup.py last changed.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/install.sh [EXTRAS]

Makes the virtual environment .venv in the repository and installs varuna-capslog into it with the given extras
(all, test, dev, docs or several with commas; none by default: it then plans and estimates, and names what it lacks). Does nothing when that is already done.
Warns where less than the 9 GB are free that torch with its CUDA libraries takes meanwhile.

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
# measured with torch 2.15 and its CUDA libraries: 8.8 GB at the most, of which 2.6 are pip's own for a while
warn_if_short() {
    local free
    free="$(df -Pk "$1" | awk 'NR == 2 {print int($4 / 1048576)}')"
    if [[ "$free" =~ ^[0-9]+$ && "$free" -lt "$2" ]]; then
        echo "warning: $free GB are free in $1; installing torch with its CUDA libraries takes about $2 GB there" >&2
    fi
}
warn_if_short "$root" 9
warn_if_short "${TMPDIR:-/tmp}" 3
echo "installing varuna-capslog${extras:+ with $extras} into $root/.venv"
"$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root${extras:+[$extras]}"
touch "$stamp"
