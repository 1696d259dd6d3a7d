"""Machines and the processes on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rig.machines.machines import Machine, Machines, children_of, machine_of
from tests.rig.machines.members import Members


@pytest.mark.parametrize("name", ["a", "a.2", "a-1", "a.2-7"])
def test_a_member_and_every_later_supervisor_run_on_the_same_machine(name):
    assert machine_of(name) == "a"


def test_threads_are_shown_by_workers_only(tmp_path):
    """Once the fork server was renamed, the signal that prints the threads of hanging workers reached no worker."""
    program = (
        "import signal, sys, time; signal.signal(signal.SIGUSR2, lambda *_: sys.exit(7));"
        "print('ready', flush=True); time.sleep(60)"
    )
    worker, plain_process = (
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    try:
        for process in (worker, plain_process):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        assert {worker.pid, plain_process.pid} <= set(children_of(os.getpid()))
        members = Members(tmp_path)
        members.roster.members["a-1"] = "a"
        (tmp_path / "workers").mkdir()
        (tmp_path / "workers" / "a-1.json").write_text(json.dumps({"pid": worker.pid}))
        machines: Any = SimpleNamespace(by_name={"a": Machine("a", os.getpid()), "b": Machine("b")}, members=members)
        Machines.show_threads(machines)
        assert worker.wait(10.0) == 7
        assert plain_process.poll() is None
    finally:
        for process in (worker, plain_process):
            process.kill()
            process.wait()
