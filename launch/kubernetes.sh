#!/usr/bin/env bash
# Fills in launch/kubernetes/job.yaml and hands it to kubectl: an elastic run as an Indexed Job.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/kubernetes.sh [OPTIONS] CONFIG [KEY=VALUE ...]

Makes a headless service and an Indexed Job of N pods, each of them a `capslog host`; the first one serves the store. A pod
that is evicted leaves at a step boundary, one that is lost is made anew and joins again. CONFIG is a path in the image.
run_dir is RUNS/NAME on a volume that all pods can write (ReadWriteMany), unless given as KEY=VALUE.

  --nnodes N       pods (default 2)
  --nproc K        workers of each pod (default 1)
  --name NAME      of job and service (default capslog)
  --image IMAGE    with the repository as working directory and the package installed (default varuna-capslog:latest)
  --claim NAME     of the persistent volume claim that is mounted at /runs (default capslog-runs)
  --gpus N         GPUs of each pod (default 0)
  --grace SECONDS  between SIGTERM and SIGKILL (default 60)
  --dry-run        print the manifests and stop; nothing is asked of a cluster
  -h, --help       print this text

  PYTHON           interpreter with PyYAML (default: .venv of the repository, else python3)
TEXT
}

fail() {
    echo "launch/kubernetes.sh: $1" >&2
    exit 2
}

need() { # flag value: a whole number
    [[ "$2" =~ ^[0-9]+$ ]] || fail "$1 is '$2'; give a whole number"
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
nnodes=2 nproc=1 name=capslog image="" claim="" gpus=0 grace=60 dry_run=no
while [[ $# -gt 0 ]]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --dry-run) dry_run=yes; shift ;;
        --nnodes | --nproc | --name | --image | --claim | --gpus | --grace)
            [[ $# -ge 2 ]] || fail "$1 needs a value; see --help"
            case "$1" in
                --nnodes) need "$1" "$2"; nnodes="$2" ;;
                --nproc) need "$1" "$2"; nproc="$2" ;;
                --gpus) need "$1" "$2"; gpus="$2" ;;
                --grace) need "$1" "$2"; grace="$2" ;;
                --name) name="$2" ;;
                --image) image="$2" ;;
                --claim) claim="$2" ;;
            esac
            shift 2
            ;;
        -*) fail "unknown option $1; see --help" ;;
        *) break ;;
    esac
done
[[ $# -ge 1 ]] || fail "no CONFIG given; see --help"
[[ "$nnodes" -ge 1 && "$nproc" -ge 1 ]] || fail "--nnodes and --nproc are at least 1"
[[ "$name" =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ && ${#name} -le 50 ]] || fail "--name $name is no name for Kubernetes: a-z, 0-9, -"

python="${PYTHON:-}"
if [[ -z "$python" ]]; then
    python=python3
    [[ -x "$root/.venv/bin/python" ]] && python="$root/.venv/bin/python"
fi
manifests="$("$python" - "$root/launch/kubernetes/job.yaml" "$nnodes" "$nproc" "$name" "$image" "$claim" "$gpus" "$grace" "$@" <<'PYTHON'
import sys

import yaml

path, nnodes, nproc, name, image, claim, gpus, grace, *arguments = sys.argv[1:]
with open(path, encoding="utf-8") as file:
    service, job = yaml.safe_load_all(file)
if not any(argument.startswith("run_dir=") for argument in arguments):
    arguments.append(f"run_dir=/runs/{name}")
service["metadata"]["name"] = job["metadata"]["name"] = name
service["spec"]["selector"]["job-name"] = name
job["spec"]["completions"] = job["spec"]["parallelism"] = int(nnodes)
pod = job["spec"]["template"]["spec"]
job["spec"]["template"]["metadata"]["labels"]["app"] = name
pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"]["app"] = name
pod["subdomain"] = name
pod["terminationGracePeriodSeconds"] = int(grace)
container = pod["containers"][0]
container["args"] = arguments
container["image"] = image or container["image"]
values = {"CAPSLOG_NNODES": nnodes, "CAPSLOG_MASTER": f"{name}-0.{name}", "CAPSLOG_NPROC": nproc}
for variable in container["env"]:
    variable["value"] = values.get(variable["name"], variable["value"])
if int(gpus):
    container["resources"]["limits"] = {"nvidia.com/gpu": gpus}
pod["volumes"][0]["persistentVolumeClaim"]["claimName"] = claim or pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
sys.stdout.write(yaml.safe_dump_all([service, job], sort_keys=False))
PYTHON
)"
if [[ "$dry_run" == yes ]]; then
    echo "$manifests"
    exit 0
fi
echo "$manifests" | kubectl apply -f -
