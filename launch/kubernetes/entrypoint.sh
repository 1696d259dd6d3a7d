#!/usr/bin/env bash
# What a pod of launch/kubernetes/job.yaml runs: `capslog host` under the number that the Indexed Job gave it.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/kubernetes/entrypoint.sh [--dry-run] CONFIG [KEY=VALUE ...]

Reads the number of this pod from JOB_COMPLETION_INDEX, which Kubernetes sets in Indexed Jobs, waits until the first pod's
name is known, and becomes launch/elastic.sh. SIGTERM then lets this machine leave at the next step; the exit status is
143 if the run goes on without it, so that the Job makes the pod anew.

  CAPSLOG_NNODES   pods that begin together
  CAPSLOG_MASTER   name of the first pod, such as capslog-0.capslog
  CAPSLOG_PORT     port of the store (default 29400)
  CAPSLOG_NPROC    workers of each pod (default: the config's workers, spread evenly over the pods)
TEXT
}

fail() {
    echo "launch/kubernetes/entrypoint.sh: $1" >&2
    exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
options=()
case "${1:-}" in
    -h | --help) usage; exit 0 ;;
    --dry-run) options+=(--dry-run); shift ;;
    -*) fail "unknown option $1; see --help" ;;
esac
[[ $# -ge 1 ]] || fail "no CONFIG given; see --help"
[[ "${JOB_COMPLETION_INDEX:-}" =~ ^[0-9]+$ ]] || fail "JOB_COMPLETION_INDEX is not set; run it in an Indexed Job"
[[ -n "${CAPSLOG_NNODES:-}" ]] || fail "CAPSLOG_NNODES is not set; give the number of pods"
[[ -n "${CAPSLOG_MASTER:-}" ]] || fail "CAPSLOG_MASTER is not set; give the first pod's name, such as capslog-0.capslog"
options+=(--nnodes "$CAPSLOG_NNODES" --node-rank "$JOB_COMPLETION_INDEX" --master "$CAPSLOG_MASTER")
options+=(--port "${CAPSLOG_PORT:-29400}" --name "${HOSTNAME:-pod-$JOB_COMPLETION_INDEX}")
[[ -z "${CAPSLOG_NPROC:-}" ]] || options+=(--nproc "$CAPSLOG_NPROC")
if [[ "${options[0]}" != --dry-run ]]; then
    # the service's records come some seconds after the pod
    for _ in $(seq 120); do
        getent hosts "$CAPSLOG_MASTER" > /dev/null && break
        sleep 1
    done
fi
exec "$root/launch/elastic.sh" "${options[@]}" "$@"
