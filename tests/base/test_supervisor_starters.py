"""Workers that a supervisor has forked end and print as started ones do."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.starters import starter_of
from tests.waiting import alive, wait_until
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.supervisor import Forks, Supervisor, WorkerFailed

ACTS = """
import json, os, sys, time
PRELOADED = ("first",)
def act(arguments):
    rank, folder = int(os.environ["RANK"]), arguments[0]
    print("heard from", rank, "first" in sys.modules, os.getpgid(0) == os.getpid())
    body = arguments[1 + rank]
    with open(f"{folder}/{rank}.pid", "w") as file:
        file.write(str(os.getpid()))
    exec(body)
    return 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "acts.py").write_text(ACTS)
    (tmp_path / "first.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def supervised(folder: Path, *bodies: str) -> None:
    with Forks("acts:act", [str(folder), *bodies], (), {"OF_ALL": "1"}) as starter:
        Supervisor(folder / "run", starter, len(bodies), grace_seconds=2.0).run()


def test_a_limit_of_processes_is_named(tmp_path, monkeypatch):
    """Under `ulimit -u 6`: "unexpected BlockingIOError: [Errno 11]; this is a defect"."""

    def full(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    limit = "cannot be started: Resource temporarily unavailable; raise the limit of processes and threads .ulimit -u"
    with monkeypatch.context() as limited:
        limited.setattr(subprocess.Popen, "_execute_child", full)
        with pytest.raises(CapslogError, match=f"process that forks workers {limit}"):
            Forks("acts:act", [], (), {})
        with pytest.raises(CapslogError, match=f"worker 3: 'true' {limit}"):
            starter_of(["true"])(3, {}, tmp_path / "log")


def test_a_fork_that_is_refused_says_why(folder, monkeypatch):
    """The limit may also be reached only at the fork; the worker's log has the reason, too."""
    (folder / "first.py").write_text("import os\ndef fork():\n    raise BlockingIOError(11, 'no more')\nos.fork = fork")
    with pytest.raises(CapslogError, match=r"worker 0 cannot be started: .*: no more; raise the limit of processes"):
        supervised(folder, "pass")
    assert "no more" in (folder / "run" / "workers" / "0.log").read_text()


def test_the_group_of_a_started_worker_is_killed_before_its_number_is_free(tmp_path, monkeypatch):
    """Once the leader is reaped, another group may get its number: the system's own processes were at risk."""
    reaped: list[bool] = []
    killpg = os.killpg

    def kill(pid: int, number: int) -> None:
        reaped.append(not Path(f"/proc/{pid}").exists())
        killpg(pid, number)

    monkeypatch.setattr(os, "killpg", kill)
    start = starter_of(["bash", "-c", f"sleep 60 & echo $! > {tmp_path}/child"])
    for wait in (False, True):
        worker = start(1, {}, tmp_path / "log")
        if not wait:
            wait_until(lambda worker=worker: worker.poll() is not None)
        assert (worker.wait(), worker.poll()) == (0, 0)
        child = int((tmp_path / "child").read_text())
        wait_until(lambda child=child: not alive(child))
    assert reaped == [False, False]


def test_forks_end_well_and_their_output_goes_where_that_of_commands_goes(folder, capfd):
    supervised(folder, "assert os.environ['OF_ALL'] == '1'", "print('error', file=sys.stderr)")
    assert capfd.readouterr().out == "heard from 0 True True\n"
    workers = folder / "run" / "workers"
    assert (workers / "0.log").read_text() == ""
    assert (workers / "1.log").read_text() == "heard from 1 True True\nerror\n"
    pids = [json.loads((workers / f"{rank}.json").read_text())["pid"] for rank in range(2)]
    assert pids == [int((folder / f"{rank}.pid").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("body", "cause"),
    [("sys.exit(3)", "status 3"), ("os.kill(os.getpid(), 9)", "SIGKILL"), ("raise ValueError('no')", "no")],
)
def test_a_fork_that_fails_is_named_and_the_others_are_stopped(folder, capfd, body, cause):
    with pytest.raises(WorkerFailed, match=f"rank 1.*{cause}"):
        supervised(folder, "time.sleep(600)", body)
    assert not alive(int((folder / "0.pid").read_text()))


def test_forks_do_not_outlive_the_process_that_asked_for_them(folder):
    script = (
        "import sys, pathlib; from varuna_capslog.base.supervisor import Forks;"
        "starter = Forks('acts:act', [sys.argv[1], 'time.sleep(600)'], (), {});"
        "starter(0, {'RANK': '0'}, pathlib.Path(sys.argv[1]) / 'log').wait()"
    )
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{folder}"},
        stdout=subprocess.DEVNULL,
    )
    path = folder / "0.pid"
    wait_until(lambda: path.exists() and path.read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not alive(int(path.read_text())))
