#!/usr/bin/env bash
# From a fresh clone to a trained detector and its report: one command, a few minutes, no GPU and no data set needed.
# While it trains, one device leaves after a notice and one is killed: training goes on.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/quickstart.sh [KEY=VALUE ...]

Makes a virtual environment, installs the package, trains configs/digits.yaml (a small DETR over two pipeline stages, on
handwritten digits that come with scikit-learn) and writes a report. KEY=VALUE pairs change config keys, for example
train.max_seconds=60.

While it trains, its devices (here: processes) change, as machines do that a cloud takes away:

  after 25 s of training   one gets 30 seconds' notice; it hands its layers over and leaves
  after 50 s               a device is offered again, and joins
  after 85 s               one is killed without a word (SIGKILL), and a new one takes its place

No loss or weight is another one than without all this, but for how many steps the time allows. elastic.enabled=false
trains without changes.

  PYTHON   the interpreter that makes the environment (default python3; 3.10 or newer)
TEXT
}

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
launch/install.sh all
run=runs/quickstart
capslog=.venv/bin/capslog

last_step() { # of the run so far
    local found
    found="$(tail -n 1 "$run/metrics.jsonl" 2>/dev/null | grep -o '^{"step": [0-9]*' | grep -o '[0-9]*$')" || found=0
    echo "$found"
}
members() { # of the newest generation, one a line
    grep -o '"members": \[[^]]*\]' "$run/events.jsonl" 2>/dev/null | tail -n 1 | grep -o '"[^"]*"' | tail -n +2 | tr -d '"'
}
reach() { # SECONDS MEMBERS: waits until the run has trained so long, now with so many members
    until [[ $((SECONDS - began)) -ge "$1" && "$(members | wc -l)" -eq "$2" ]]; do sleep 0.3; done
}
tell() { # over the line that holds the progress bar, which is drawn again below
    [[ -t 1 ]] && printf '\r\033[K'
    echo "quickstart: $*"
}
lose_and_find_devices() {
    local from="$1" began who
    until [[ "$(last_step)" -gt "$from" ]]; do sleep 0.3; done
    began=$SECONDS
    reach 25 2
    who="$(members | tail -n 1)"
    tell "$who gets notice to leave within 30 seconds; it hands over what it holds, and no step is lost"
    "$capslog" notice "$run" --member "$who" --seconds 30 > /dev/null
    reach 50 1
    tell "a device is offered again; it prepares beside the training and joins between two steps"
    "$capslog" morph "$run" --devices 2 > /dev/null
    reach 85 2
    who="$(members | tail -n 1)"
    tell "$who is killed without a word; the other one holds copies of its layers, and another takes its place"
    kill -KILL "$(grep -o '"pid": [0-9]*' "$run/workers/$who.json" | grep -o '[0-9]*$')"
}

lose_and_find_devices "$(last_step)" &
trap 'kill $! 2>/dev/null || true' EXIT
"$capslog" train configs/digits.yaml run_dir="$run" elastic.enabled=true elastic.replace_lost=true "$@"
"$capslog" report "$run"
