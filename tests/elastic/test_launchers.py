"""Real runs of the launchers: Slurm with stand-ins for its commands, which set its variables and send its signals; a
pod's entry point with the variables of an Indexed Job. Manifests are checked against Kubernetes' own schemas.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.elastic.machines import ROOT, Machines, free_port, write_config

SRUN = """
# One task per node, in a session of its own; a signal to srun goes to all processes of all tasks, as slurmstepd does.
import os, signal, subprocess, sys, time
words = sys.argv[1:]
flags = [words.pop(0) for _ in range(len(words)) if words[0].startswith("--")]
tasks = int(next(flag for flag in flags if flag.startswith("--ntasks=")).partition("=")[2])
nodes = os.environ["STUB_NODES"].split(",")
running = []
for rank in range(tasks):
    own = {"SLURM_PROCID": rank, "SLURM_NODEID": rank, "SLURM_LOCALID": 0, "SLURM_NTASKS": tasks}
    own = {name: str(value) for name, value in own.items()} | {"SLURMD_NODENAME": nodes[rank]}
    running.append(subprocess.Popen(words, env={**os.environ, **own}, start_new_session=True))
def pass_on(number, frame):
    sessions = {task.pid for task in running}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        try:
            if os.getsid(pid) in sessions:
                os.kill(pid, number)
        except OSError:
            pass
signal.signal(signal.SIGUSR1, pass_on)
signal.signal(signal.SIGTERM, pass_on)
while any(task.poll() is None for task in running):
    time.sleep(0.05)
with open(os.environ["STUB_LOG"], "a") as log:
    log.write(f"srun {flags} ended {[task.returncode for task in running]}\\n")
sys.exit(max(task.returncode for task in running))
"""
SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("\\n".join(os.environ["STUB_NODES"].split(",")))
else:
    with open(os.environ["STUB_LOG"], "a") as log:
        log.write(f"scontrol {' '.join(sys.argv[1:])}\\n")
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    machine_group = Machines(tmp_path)
    yield machine_group
    machine_group.close()


def launch(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", *[str(argument) for argument in arguments]]
    base = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "CAPSLOG", "JOB_"))}
    return subprocess.run(
        command, cwd=ROOT, env={**base, "PYTHON": sys.executable, **environment}, capture_output=True, text=True
    )


def slurm(folder: Path, nodes: str, end_time: float | None = None) -> dict[str, str]:
    """Write Slurm's commands into a folder; return the variables of a job, with the commands on PATH."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_NNODES": str(nodes.count(",") + 1),
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    if end_time is not None:
        job["SLURM_JOB_END_TIME"] = str(int(end_time))
    return {**job, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "STUB_NODES": nodes, "STUB_LOG": f"{folder}/slurm"}


def test_a_slurm_job_parks_before_its_time_limit_and_goes_on_when_it_runs_again(tmp_path, machines, programs):
    config, port = write_config(tmp_path), str(free_port())
    python = {"PYTHON": str(programs / "python")}

    variables = slurm(tmp_path, "localhost,second", time.time() + 90) | python
    job = machines.start(["bash", "launch/slurm.sh", "--nproc", "1", "--port", port, str(config)], variables)
    machines.wait_for_members("localhost-1", "second-1")
    machines.wait_for_steps(2)
    job.send_signal(signal.SIGUSR1)  # as sbatch's --signal=B:USR1, to the batch script alone
    assert machines.end(job) == 143, machines.said()
    log = (tmp_path / "slurm").read_text()
    assert "ended [143, 143]" in log
    assert "scontrol requeue 4711" in log
    assert not machines.events("lost"), "a signal that Slurm sends to all processes ended a worker"
    reached = max(row["step"] for row in machines.rows())
    again = [f"train.max_steps={reached + 2}", "pipeline.devices=1", "pipeline.cuts=[0]"]
    alone = slurm(tmp_path, "localhost") | python
    job = machines.start(["bash", "launch/slurm.sh", "--port", port, str(config), *again], alone)
    assert machines.end(job) == 0, machines.said()
    assert machines.rows()[-1]["step"] == reached + 2
    assert len(machines.rows()) == reached + 2, "a step was computed twice"
    machines.check_losses(tmp_path / "truth")


def test_pods_of_an_indexed_job_train_together_and_one_leaves_by_sigterm(tmp_path, machines, programs):
    config = write_config(tmp_path)
    common = {
        "CAPSLOG_NNODES": "2",
        "CAPSLOG_MASTER": "localhost",
        "CAPSLOG_PORT": str(free_port()),
        "CAPSLOG_NPROC": "1",
        "PYTHON": str(programs / "python"),
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    }
    entry = ["bash", "launch/kubernetes/entrypoint.sh", str(config)]
    pods = [
        machines.start(entry, {**common, "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"capslog-{index}"})
        for index in range(2)
    ]
    machines.wait_for_members("capslog-0-1", "capslog-1-1")
    machines.wait_for_steps(2)
    pods[1].send_signal(signal.SIGTERM)
    assert machines.end(pods[1]) == 143, machines.said()
    machines.wait_for_members("capslog-0-1")
    assert not machines.events("lost")
    machines.wait_for_steps(2)
    pods[0].send_signal(signal.SIGINT)
    assert machines.end(pods[0]) == 130
    machines.check_losses(tmp_path / "truth")


def test_manifests_keep_to_kubernetes_schemas(tmp_path):
    options = [
        "--nnodes",
        "3",
        "--nproc",
        "2",
        "--name",
        "my-run",
        "--gpus",
        "1",
        "--grace",
        "90",
        "--image",
        "me/it:1",
    ]
    shown = launch("launch/kubernetes.sh", "--dry-run", *options, "configs/tiny.yaml", "train.max_steps=5")
    assert shown.returncode == 0, shown.stderr
    service, job = yaml.safe_load_all(shown.stdout)
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environment == {
        "CAPSLOG_NNODES": "3", "CAPSLOG_MASTER": "my-run-0.my-run", "CAPSLOG_PORT": "29400", "CAPSLOG_NPROC": "2",
    }  # fmt: skip
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (3, 3, "Indexed")
    # the name of the first pod is <job>-0.<subdomain>, where a headless service of the subdomain's name finds the pods
    assert service["metadata"]["name"] == pod["subdomain"] == job["metadata"]["name"] == "my-run"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": "my-run"}, "Kubernetes gives each pod of a Job this label"
    assert pod["terminationGracePeriodSeconds"] == 90
    assert container["args"] == ["configs/tiny.yaml", "train.max_steps=5", "run_dir=/runs/my-run"]
    assert container["image"] == "me/it:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert (ROOT / container["command"][1]).is_file()
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for manifest in (service, job, *yaml.safe_load_all((ROOT / "launch/kubernetes/job.yaml").read_text())):
        validate.validate(manifest, "1.31", strict=True)
    del pod["restartPolicy"]
    pod["restartpolicy"] = "Never"
    with pytest.raises(validate.ValidationError):
        validate.validate(job, "1.31", strict=True)


@pytest.mark.parametrize(
    "script", ["elastic.sh", "slurm.sh", "kubernetes.sh", "kubernetes/entrypoint.sh", "torchrun.sh"]
)
def test_every_launcher_explains_itself_and_shows_what_it_would_do(script):
    shown = launch(f"launch/{script}", "--help")
    assert (shown.returncode, shown.stdout.split()[0]) == (0, "usage:")
    pod = {"JOB_COMPLETION_INDEX": "1", "CAPSLOG_NNODES": "2", "CAPSLOG_MASTER": "capslog-0.capslog"}
    dry = launch(f"launch/{script}", "--dry-run", "configs/tiny.yaml", "train.max_steps=3", **pod)
    assert dry.returncode == 0, dry.stderr
    assert "train.max_steps=3" in dry.stdout
    assert launch(f"launch/{script}", **pod).returncode == 2, "CONFIG is missing"
    assert "unknown option --frobnicate" in launch(f"launch/{script}", "--frobnicate", "x", **pod).stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["elastic.sh", "--nnodes", "2", "c"], "give --master HOST"),
        (["elastic.sh", "--nnodes", "two", "c"], "give a whole number"),
        (["slurm.sh", "c"], "this is no Slurm job; submit it"),
        (["slurm.sh", "--store", "host", "c"], "give HOST:PORT"),
        (["kubernetes.sh", "--name", "Not_A_Name", "c"], "is no name for Kubernetes"),
        (["kubernetes/entrypoint.sh", "c"], "JOB_COMPLETION_INDEX is not set"),
    ],
)
def test_launchers_name_what_is_wrong(arguments, sentence):
    shown = launch(f"launch/{arguments[0]}", *arguments[1:])
    assert shown.returncode == 2
    assert sentence in shown.stderr


def test_a_slurm_task_gets_its_words_as_they_were_given(tmp_path):
    shown = launch("launch/slurm.sh", "--dry-run", "--store", "far:12", "c.yaml", "train.note=a 'b' $c")
    task = shown.stdout.splitlines()[-1]
    script = subprocess.run(
        ["bash", "-c", f"set -- {task}; printf '%s' \"${{@: -1}}\""], capture_output=True, text=True
    )
    probe = tmp_path / "elastic.sh"
    probe.write_text("printf '%s\\n' \"$@\"\n")
    words = script.stdout.replace(f"exec {ROOT}/launch/elastic.sh", f"exec bash {probe}")
    names = {**os.environ, "SLURM_PROCID": "1", "SLURMD_NODENAME": "node 7"}
    arguments = subprocess.run(["bash", "-c", words], capture_output=True, text=True, env=names).stdout.splitlines()
    assert arguments == [
        "--nnodes", "2", "--master", "far", "--port", "12", "--node-rank", "2", "--name", "node 7", "c.yaml",
        "train.note=a 'b' $c",
    ]  # fmt: skip
