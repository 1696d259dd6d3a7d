"""Workers from the fork server: they equal started processes, and their ends are reported at once."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.host.host_entries import capslog_variables
from tests.waiting import alive, wait_until
from varuna_capslog.base import fork_server as server_module
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.base.fork_server import ForkServer, NoAnswer, _Call, begun_early

ENTRIES = Path(__file__).parents[1] / "elastic" / "host"


class Told(queue.Queue):
    def next(self, *wanted: str, seconds: float = 90.0) -> dict[str, Any]:
        """Return the next report that has all these keys."""
        until = time.monotonic() + seconds
        while True:
            entry = self.get(timeout=max(0.01, until - time.monotonic()))
            if all(key in entry for key in wanted):
                return entry


@pytest.fixture
def told() -> Told:
    return Told()


def fork_server_of(folder: Path, told: Told, *modules: str, **environment: str) -> ForkServer:
    environment = {"PYTHONPATH": str(ENTRIES), **environment}
    return ForkServer("host_entries:act", told.put, folder / "fork-server.log", modules, environment)


@pytest.fixture
def fork_server(tmp_path, told) -> Iterator[ForkServer]:
    server = fork_server_of(tmp_path, told)
    yield server
    server.close()


def order(folder: Path, member: str, do: str) -> dict[str, Any]:
    environment = {"CAPSLOG_MEMBER": member}
    log = str(folder / f"{member}.log")
    return {"member": member, "environment": environment, "log": log, "arguments": {"folder": str(folder), "all": do}}


def seen(folder: Path, member: str) -> dict[str, Any]:
    path = folder / f"{member}.seen"
    wait_until(path.exists)
    return json.loads(path.read_text())


def test_a_worker_is_a_process_of_its_own_and_its_end_is_told_as_it_was(tmp_path, fork_server, told):
    ready = told.next("ready")
    for member, do in (("m-1", "leave=0"), ("m-2", "leave=7"), ("m-3", "kill=9"), ("m-4", "crash"), ("m-5", "kill=11")):
        fork_server.fork(order(tmp_path, member, do))
        started = told.next("member")
        ended = told.next("member")
        assert started == {"member": member, "pid": started["pid"]}
        worker = seen(tmp_path, member)
        assert (worker["pid"], worker["group"], worker["parent"]) == (started["pid"], started["pid"], ready["pid"])
        assert worker["environment"] == {**capslog_variables(), "CAPSLOG_MEMBER": member}, "variables of an earlier one"
        expected = {"m-1": {"status": 0}, "m-2": {"status": 7}, "m-3": {"signal": 9}, "m-4": {"status": 1}}
        assert ended == {"member": member, "pid": started["pid"], **expected.get(member, {"signal": 11})}
    assert (tmp_path / "m-1.log").read_text() == "standard output of m-1\nerror output of m-1\n"
    assert "RuntimeError: crashed" in (tmp_path / "m-4.log").read_text()
    assert (tmp_path / "fork-server.log").read_text() == ""


def test_what_was_imported_ahead_is_there_and_torch_computes_in_the_fork(tmp_path, told):
    fork_server = fork_server_of(tmp_path, told, "torch", "json", "no_such_module")
    told.next("ready", seconds=120)
    fork_server.fork(order(tmp_path, "m-1", "backward leave=0"))
    assert told.next("member", "status", seconds=60)["status"] == 0
    worker = seen(tmp_path, "m-1")
    assert worker["torch"]
    assert (worker["forked"], worker["threads"]) == (True, 1)
    assert "no_such_module" in (tmp_path / "fork-server.log").read_text()
    fork_server.close()


def test_a_process_begun_early_becomes_the_first_server_that_is_made(tmp_path, told, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ENTRIES))
    with begun_early():
        begun = server_module._early[0][0].pid
        with fork_server_of(tmp_path, told, "json", "no_such_module", CAPSLOG_OF_THIS="1") as server:
            assert server.pid == begun
            with ForkServer("host_entries:act", lambda report: None, None, ()) as second:
                assert second.pid != begun
            assert told.next() == {"ready": True, "pid": begun}
            server.fork(order(tmp_path, "m-1", "leave=7"))
            told.next("member")
            assert told.next()["status"] == 7
            worker = seen(tmp_path, "m-1")
            assert (worker["forked"], worker["parent"], worker["torch"]) == (True, begun, True)
            variables = {"CAPSLOG_MEMBER": "m-1", "CAPSLOG_OF_THIS": "1"}
            assert worker["environment"] == {**capslog_variables(), **variables}
    assert not alive(begun)
    assert "no_such_module" in (tmp_path / "fork-server.log").read_text()


def test_a_process_begun_early_that_nobody_takes_ends_with_its_context():
    descriptors = len(os.listdir("/proc/self/fd"))
    processes: list[subprocess.Popen[bytes]] = []

    def refused() -> None:
        with begun_early():
            processes.append(server_module._early[0][0])
            assert processes[0].poll() is None
            raise DoesNotFit("a config that is refused")

    with pytest.raises(DoesNotFit):
        refused()
    assert processes[0].returncode == -signal.SIGKILL, "a refused config waits for no import"
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_where_a_fork_is_not_safe_the_worker_is_started_anew(tmp_path, told):
    # like an import that starts a thread or CUDA
    (tmp_path / "restless.py").write_text(
        "import sys, threading, time\n"
        "if '--alone' not in sys.argv:\n"
        "    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()\n"
    )
    fork_server = fork_server_of(tmp_path, told, "restless", PYTHONPATH=f"{ENTRIES}{os.pathsep}{tmp_path}")
    ready = told.next("ready")
    fork_server.fork(order(tmp_path, "m-1", "wait=go leave=5"))
    started = told.next("member")
    worker = seen(tmp_path, "m-1")
    assert (worker["pid"], worker["group"], worker["parent"]) == (started["pid"], started["pid"], ready["pid"])
    assert (worker["forked"], worker["threads"]) == (False, 1)
    (tmp_path / "go").touch()
    assert told.next("member") == {"member": "m-1", "pid": started["pid"], "status": 5}
    fork_server.fork(order(tmp_path, "m-2", "deaf"))
    pid = seen(tmp_path, "m-2")["pid"]
    os.kill(ready["pid"], signal.SIGKILL)
    told.next("gone")
    wait_until(lambda: not alive(pid))
    fork_server.close()


@pytest.mark.parametrize(
    "said", ["print(0)", "print([1])", """print('"x"')""", "print('null')", """print('{"gone": 1}')""", "sys.exit(3)"]
)
def test_what_a_module_does_while_it_is_imported_is_no_report(tmp_path, told, said):
    """`print(torch.cuda.device_count())` in a workload's module was read as a report; 0 has no member, the thread
    died, and the command waited for ever. A module that reads its input must not get the orders either.
    """
    (tmp_path / "talks.py").write_text(f"import sys\n{said}\nsys.stdout.flush()\n")
    (tmp_path / "asks.py").write_text("input('the password? ')")
    with fork_server_of(tmp_path, told, "asks", "talks", PYTHONPATH=f"{ENTRIES}{os.pathsep}{tmp_path}") as server:
        assert set(told.next()) == {"ready", "pid"}
        server.fork(order(tmp_path, "m-1", "leave=5"))
        assert set(told.next()) == {"member", "pid"}
        assert told.next()["status"] == 5


def test_files_of_the_current_folder_hide_no_module_that_is_installed(tmp_path, told, monkeypatch):
    """A user's own `queue.py`, `rich.py` or `torch.py` broke every run, and files in a folder that somebody else had
    filled were executed. A module that only the current folder has is still found there, also by processes of
    multiprocessing.
    """
    for name in ("queue", "random", "torch", "rich", "numpy", "json"):
        (tmp_path / f"{name}.py").write_text(f"open('imported-{name}', 'w')\nraise ImportError('the wrong one')")
    (tmp_path / "mine.py").write_text(
        "import json, multiprocessing, queue, random, rich\n"
        "def length(text):\n    return len(text)\n"
        "def lengths(texts):\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        return pool.map(length, texts)\n"
    )
    monkeypatch.chdir(tmp_path)
    with fork_server_of(tmp_path, told, "mine") as server:
        assert server.call("mine:lengths", ["a", "bc"]) == [1, 2]
    assert not list(tmp_path.glob("imported-*"))


def test_what_the_listener_raises_ends_the_fork_server_and_everybody_who_waits(tmp_path):
    """The thread that reads the reports died of an unexpected one, and `call` waited for ever."""
    heard: list[dict[str, Any]] = []

    def hear(report: dict[str, Any]) -> None:
        heard.append(report)
        if report.get("member") == "m-1":
            raise KeyError("nobody of that name")

    with ForkServer("host_entries:act", hear, tmp_path / "log", (), {"PYTHONPATH": str(ENTRIES)}) as server:
        server.fork(order(tmp_path, "m-1", "deaf"))
        with pytest.raises(CapslogError, match=r"without an answer .*fork-server failed with KeyError: 'nobody"):
            server.call("time:sleep", 60)
        wait_until(lambda: "gone" in heard[-1])
        assert (heard[-1]["gone"], alive(server.pid)) == (-signal.SIGKILL, False)


def test_without_a_thread_that_hears_it_no_fork_server_is_left(tmp_path, told, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: raised(RuntimeError("can't start new thread")))
    started: list[subprocess.Popen[bytes]] = []
    wait = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", lambda process, *_: started.append(process) or wait(process))
    with pytest.raises(CapslogError, match="fork-server cannot be started: can't start new thread; raise the limit"):
        fork_server_of(tmp_path, told)
    assert started[0].returncode == -signal.SIGKILL


def raised(error: Exception) -> None:
    raise error


def test_a_fork_server_that_closes_its_pipes_and_lives_is_ended(tmp_path, told, monkeypatch):
    """Modules that turn their process into a daemon do this; waiting callers are told."""
    monkeypatch.setattr("varuna_capslog.base.fork_server._LAST_SECONDS", 0.1)
    (tmp_path / "daemon.py").write_text("import os, time\nos.closerange(0, 99)\ntime.sleep(99)")
    with fork_server_of(tmp_path, told, "daemon", PYTHONPATH=f"{ENTRIES}{os.pathsep}{tmp_path}"):
        assert told.next() == {"gone": -signal.SIGKILL}


def test_nobody_outlives_the_fork_server_nor_a_workers_children_the_worker(tmp_path, fork_server, told):
    pid = told.next("ready")["pid"]
    for member, do in (("m-1", "spawn hang"), ("m-2", "spawn deaf")):
        fork_server.fork(order(tmp_path, member, do))
    first, second = told.next("member"), told.next("member")
    wait_until(lambda: all((tmp_path / f"{member}.child").exists() for member in ("m-1", "m-2")))
    wait_until(lambda: all((tmp_path / f"{member}.child").read_text() for member in ("m-1", "m-2")))
    children = [int((tmp_path / f"{member}.child").read_text()) for member in ("m-1", "m-2")]
    os.kill(first["pid"], signal.SIGKILL)
    assert told.next("signal")["member"] == "m-1"
    wait_until(lambda: not alive(children[0]))
    os.kill(pid, signal.SIGKILL)
    assert told.next("gone")["gone"] == -signal.SIGKILL
    wait_until(lambda: not alive(second["pid"]))


def test_closing_kills_what_is_left(tmp_path, fork_server, told):
    told.next("ready")
    fork_server.fork(order(tmp_path, "m-1", "deaf"))
    worker = told.next("member")["pid"]
    fork_server.close()
    assert told.next("gone") == {"gone": 0}
    assert not alive(worker)
    assert not alive(fork_server.pid)


def test_the_fork_server_dies_with_its_host(tmp_path):
    body = f"""
import sys, time
sys.path[:0] = [{str(ENTRIES)!r}, {str(Path(__file__).parent)!r}]
from pathlib import Path
from test_fork_server import Told, fork_server_of, order
told = Told()
fork_server = fork_server_of(Path({str(tmp_path)!r}), told)
told.next("ready")
fork_server.fork(order(Path({str(tmp_path)!r}), "m-1", "deaf"))
print(fork_server.pid, told.next("member")["pid"], flush=True)
time.sleep(100)
"""
    host = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    pids = [int(word) for word in host.stdout.readline().split()]
    host.kill()
    host.wait()
    assert len(pids) == 2
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_many_ends_at_once_are_all_told(tmp_path, fork_server, told):
    told.next("ready")
    members = [f"m-{number}" for number in range(20)]
    for member in members:
        fork_server.fork(order(tmp_path, member, "wait=go leave=3"))
    pids = {entry["member"]: entry["pid"] for entry in (told.next("member") for _ in members)}
    (tmp_path / "go").touch()
    ends = [told.next("member", "status") for _ in members]
    assert {entry["member"]: entry["pid"] for entry in ends} == pids


def test_what_a_scheduler_sends_to_all_processes_ends_no_worker(tmp_path, told, fork_server):
    # Slurm and systemd signal the whole container; the host alone responds, or a planned leave would be a loss
    told.next("ready")
    fork_server.fork(order(tmp_path, "m", "hang"))
    pid = told.next("member", "pid")["pid"]
    wait_until((tmp_path / "m.seen").exists)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(pid, number)
        os.kill(fork_server.pid, number)
    time.sleep(0.3)
    assert alive(pid)
    assert alive(fork_server.pid)


def test_a_function_is_called_in_a_fork_and_its_value_or_error_comes_back(tmp_path, fork_server, told):
    pid = told.next("ready")["pid"]
    entry = "host_entries:called"
    assert fork_server.call(entry, "", tmp_path) == [tmp_path, pid, True]
    with pytest.raises(DoesNotFit, match="too large"):
        fork_server.call(entry, "fail", "too large")
    with pytest.raises(CapslogError, match=r"^1 and 2$") as raised:
        fork_server.call(entry, "fail oddly", None)
    assert raised.value.exit_status == 5
    with pytest.raises(CapslogError, match="ended without an answer \\(signal 9\\)"):
        fork_server.call(entry, "die", None)
    with pytest.raises(NoAnswer, match=r"no answer within 0\.2 s") as late:
        fork_server.call(entry, "hang", str(tmp_path / "pid"), seconds=0.2)
    assert late.value.how == "no answer within 0.2 s"
    assert told.empty(), "who waits for workers was told of a call"


def test_garbage_is_collected_in_forks_but_not_among_what_was_imported(fork_server):
    assert fork_server.call("gc:isenabled")
    assert fork_server.call("gc:get_freeze_count") > 1000


def test_ctrl_c_ends_a_call_and_its_process_and_workers_can_be_forked_as_before(tmp_path, fork_server, told):
    told.next("ready")
    file = tmp_path / "pid"

    def press() -> None:
        wait_until(lambda: file.exists() and file.read_text())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        fork_server.call("host_entries:called", "hang", str(file))
    wait_until(lambda: not alive(int(file.read_text())))
    fork_server.fork(order(tmp_path, "m-1", "leave=3"))
    assert [told.next("member")["member"], told.next("status")["member"]] == ["m-1", "m-1"], "told of the call"


def test_a_fork_server_may_get_its_listener_and_its_log_later(tmp_path, told):
    early = Told()
    server = fork_server_of(tmp_path, early)
    try:
        server.settle(told.put, tmp_path / "later.log")
        server.fork(order(tmp_path, "m-1", "leave=3"))
        assert told.next("status")["status"] == 3
        server.fork({})  # no order at all: an error of the fork server itself
        assert told.next("gone")["gone"] == 1
        assert "KeyError" in (tmp_path / "later.log").read_text()
    finally:
        server.close()


@pytest.mark.parametrize("threads", [0, 1])
def test_a_process_that_is_prepared_becomes_a_fork_server_by_a_fork_if_it_has_one_thread(tmp_path, threads):
    body = f"""
import os, sys, threading, time
sys.path[:0] = [{str(ENTRIES)!r}]
import host_entries
from pathlib import Path
from varuna_capslog.base.fork_server import ForkServer
if {threads}:
    threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
environment = {{"PYTHONPATH": {str(ENTRIES)!r}, "CAPSLOG_MARK": "here"}}
server = ForkServer("host_entries:act", lambda what: None, Path("log"), ("json",), environment, prepared=True)
print(Path(f"/proc/{{server.pid}}/cmdline").read_text() == Path("/proc/self/cmdline").read_text())
print(server.call("os:getenv", "CAPSLOG_MARK"), server.call("os:getppid") == server.pid)
server.close()
print(Path(f"/proc/{{server.pid}}").exists(), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", body], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.stdout.split() == [str(not threads), "here", "True", "False"], done.stderr


def test_closing_does_not_wait_for_imports(tmp_path, told):
    (tmp_path / "takes_long.py").write_text("import time; time.sleep(60)")
    server = fork_server_of(tmp_path, told, "takes_long", PYTHONPATH=f"{tmp_path}{os.pathsep}{ENTRIES}")
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 5
    assert not alive(server.pid)


def test_a_call_ends_also_where_the_fork_server_is_gone(tmp_path, fork_server, told):
    os.kill(told.next("ready")["pid"], signal.SIGKILL)
    told.next("gone")
    with pytest.raises(CapslogError, match=r"ended without an answer \(gone -9\)"):
        fork_server.call("host_entries:called", "", None)


@pytest.mark.parametrize(("owner", "name"), [(ForkServer, "fork"), (_Call, "wait")], ids=["ordered", "heard of"])
def test_ctrl_c_ends_a_process_that_was_just(owner, name, tmp_path, fork_server, told, monkeypatch):
    told.next("ready")
    file, step = tmp_path / "pid", getattr(owner, name)

    def interrupted(*arguments):
        step(*arguments)
        wait_until(lambda: file.exists() and file.read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        fork_server.call("host_entries:called", "hang", str(file))
    wait_until(lambda: not alive(int(file.read_text())), 10)
