"""The supervisor of a host, with workers that sleep, fail and vanish: declared deaths, kills and exit statuses."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.host.host_entries import capslog_variables
from tests.waiting import alive, wait_until
from varuna_capslog.base import machine_memory
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.secret import run_secret
from varuna_capslog.base.supervisor import Interrupted, WorkerFailed
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic.host.hooks import notice_of
from varuna_capslog.elastic.host.host import Host, HostEnd, HostOptions
from varuna_capslog.elastic.notices.gather import CallbackListener
from varuna_capslog.elastic.notices.interface import Kind
from varuna_capslog.elastic.store.opening import StoreGone, StoreServer, open_store
from varuna_capslog.membership.entries import Entry, HostsEntry, NoticeEntry, read
from varuna_capslog.membership.generation import EMPTY, Stamp

HERE = Path(__file__).parent


RUN = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from test_host import host_of
host = host_of(Path({folder!r}), **{options!r})
try:
    print(host.run(), flush=True)
except BaseException as error:
    print(type(error).__name__, getattr(error, "exit_status", None), error, flush=True)
"""


def host_of(folder: Path, workers: int = 2, say: Callable[[str], None] = lambda line: None, **options: Any) -> Host:
    arguments = {"folder": str(folder), "all": options.pop("all", "hang"), "do": options.pop("do", {})}
    elastic = Elastic(
        **{"stopped_seconds": 0.3, "hang_seconds": 0.5, "lease_seconds": 1.0, **options.pop("elastic", {})}
    )
    # the tests found the generations themselves
    options = {
        "name": "h",
        "hosts": 99,
        "sources": (),
        "environment": {"PYTHONPATH": str(HERE)},
        "modules": (),
        **options,
    }
    return Host(HostOptions(folder, "host_entries:act", arguments, workers, settings=elastic, say=say, **options))


class Running:
    """Host that runs in a thread, and a client that reads the log."""

    def __init__(self, folder: Path, workers: int, **options: Any) -> None:
        self.lines: list[str] = []
        self.host = host = host_of(folder, workers, self.lines.append, **options)
        self.log: list[dict[str, Any]] = []
        self.result: HostEnd | BaseException | None = None
        self._tell, host.link.tell = host.link.tell, self._tell_and_wait  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        wait_until(lambda: hasattr(host.link, "store") or not self.thread.is_alive())
        self.client = open_store(host.link.address, run_secret(folder))
        self.client.follow(self.log.append, lambda why: None)

    def _tell_and_wait(self, entry: Entry) -> None:
        """Append an entry; after the last one wait until the client has read it, as the store ends with the host."""
        self._tell(entry)
        until, last = time.monotonic() + 1.0, entry == HostsEntry(self.host.link.name, "gone")
        while last and entry.to_json() not in list(self.log) and time.monotonic() < until:
            time.sleep(0.005)

    def _run(self) -> None:
        try:
            self.result = self.host.run()
        except BaseException as error:
            self.result = error

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in list(self.log) if entry["kind"] == kind]

    def told(self, kind: str) -> list[str]:
        return [entry["member"] for entry in self.of(kind)]

    def seen(self, member: str) -> dict[str, Any]:
        path = self.host.options.run_dir / f"{member}.seen"
        wait_until(path.exists)
        return json.loads(path.read_text())

    def go(self, name: str = "go") -> None:
        (self.host.options.run_dir / name).touch()

    def end(self, seconds: float = 60.0) -> Any:
        self.thread.join(seconds)
        assert not self.thread.is_alive(), f"the host still waits; it said {self.lines}"
        return self.result

    def close(self) -> None:
        self.host.stop()
        self.host.stop()
        self.thread.join(20)
        self.client.close()
        assert not self.thread.is_alive()


class Start(list):
    def __call__(self, folder: Path, workers: int = 2, **options: Any) -> Running:
        run = Running(folder, workers, **options)
        self.append(run)
        return run


@pytest.fixture
def start() -> Iterator[Start]:
    running = Start()
    yield running
    for run in reversed(running):
        run.close()


def test_workers_know_who_they_are_and_a_finished_run_ends_well(tmp_path, start):
    run = start(tmp_path, all="wait=go leave=0", keys={"first-plan": "3"})
    for slot, member in enumerate(("h-1", "h-2")):
        seen = run.seen(member)
        assert seen["environment"] == {
            **capslog_variables(),
            "CAPSLOG_MEMBER": member,
            "CAPSLOG_HOST": "h",
            "CAPSLOG_STORE": run.host.link.address,
            "CAPSLOG_STORE_IDENTITY": run.client.identity,
            "CAPSLOG_RUN_DIR": str(tmp_path),
            "CAPSLOG_LOCAL_RANK": str(slot),
        }
        assert seen["group"] == seen["pid"], "it shares the terminal's process group and would get Ctrl-C"
        path = tmp_path / f"workers/{member}.json"
        wait_until(path.exists)
        assert json.loads(path.read_text()) == {"member": member, "pid": seen["pid"], "host": "h"}
        log = tmp_path / f"workers/{member}.log"
        wait_until(lambda log=log: "standard output" in log.read_text())
    assert run.client.get("first-plan") == "3"
    run.client.append({"kind": "finished", "step": 9, "stopped": False})
    wait_until(lambda: run.host.roster.finished is not None)  # it reads the log in a thread of its own
    run.go()
    assert run.end() == HostEnd("finished", False)
    assert run.host.workers.failures == []
    assert run.told("dead") == []


def test_a_folder_in_use_is_refused_to_the_host_that_serves_and_only_to_it(tmp_path, start):
    (tmp_path / "workers").mkdir()
    with open(tmp_path / "workers/lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CapslogError, match="is in use by another run"):
            host_of(tmp_path).run()
        server = StoreServer(run_secret(tmp_path, create=True))
        port = server.port
        run = start(tmp_path, 1, store=f"127.0.0.1:{port}", all="leave=0")
        assert run.end().how == "left"
        server.close()


def test_a_killed_worker_is_told_dead_at_once_and_the_others_go_on(tmp_path, start):
    run = start(tmp_path, 3, all="wait=go leave=0")
    pid = run.seen("h-2")["pid"]
    wait_until(lambda: run.host.workers.by_member["h-2"].pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: run.told("dead") == ["h-2"])
    assert run.of("dead")[0]["why"] == "worker h-2 was killed by SIGKILL"
    assert run.of("dead")[0]["cause"] == "killed"
    assert alive(run.seen("h-1")["pid"])
    run.client.append({"kind": "finished", "step": 9, "stopped": False})
    run.go()
    end = run.end()
    assert (end.how, [failure.member for failure in run.host.workers.failures]) == ("finished", ["h-2"])
    assert run.told("dead") == ["h-2"], "a loss was told twice, or a worker that had finished was taken for lost"


def test_when_all_fail_alike_the_run_fails_and_nobody_in_particular_is_named(tmp_path, start):
    run = start(tmp_path, 3, all="fail=step_refused")
    error = run.end()
    assert isinstance(error, WorkerFailed)
    assert str(error).startswith("a step_refused as the test wants it (all workers are stopped")
    assert error.exit_status == 4
    assert sorted(run.told("dead")) == ["h-1", "h-2", "h-3"]


def test_the_last_failure_names_its_cause_not_a_loss_that_was_survived(tmp_path, start):
    run = start(tmp_path, 2, do={"1": "kill=9", "2": "wait=go fail=defect"})
    wait_until(lambda: run.told("dead") == ["h-1"])
    run.client.compare_and_set(0, EMPTY.successor(["h-2"]))
    wait_until(lambda: run.host.roster.generation.number == 1)
    run.go()
    error = run.end()
    assert isinstance(error, WorkerFailed)
    assert "worker h-2 failed at step 3: a defect as the test wants it" in str(error)


def test_a_failure_that_is_everybodys_ends_the_run_with_its_own_sentence(tmp_path, start):
    run = start(tmp_path, all="wait=go leave=2")
    for member in ("h-1", "h-2"):
        run.seen(member)
    full = {"member": "h-2", "cause": "/r/metrics.jsonl: No space left on device", "kind": "user"}
    run.client.append({"kind": "finished", "step": 3, "stopped": True, "failure": full})
    run.client.append({"kind": "finished", "step": 3, "stopped": True, "failure": full | {"cause": "another"}})
    wait_until(lambda: run.host.roster.finished is not None)
    run.go()
    error = run.end()
    assert isinstance(error, WorkerFailed)
    assert error.exit_status == 2
    assert str(error).startswith("/r/metrics.jsonl: No space left on device; then the same command begins the run")
    assert run.lines == [], "the end says it"


def test_what_all_fail_of_is_said_once(tmp_path, start):
    run = start(tmp_path, 3, all="wait=go fail=step_refused")
    run.go()
    assert run.end().exit_status == 4
    assert run.lines == ["a step_refused as the test wants it"]


def test_a_run_that_was_stopped_on_another_host_has_not_finished_here(tmp_path, start):
    run = start(tmp_path, all="wait=go")
    run.seen("h-2")
    run.client.append({"kind": "finished", "step": 3, "stopped": True, "asked": True})
    run.go()
    error = run.end()
    assert isinstance(error, Interrupted)
    assert error.exit_status == 130
    assert "after step 3, as asked on another host" in str(error)


def test_an_exit_without_a_word_is_told_with_its_last_line(tmp_path, start):
    run = start(tmp_path, 1, all="crash=oops")
    assert "exit status 1: RuntimeError: oops" in str(run.end())
    assert "RuntimeError: oops" in run.of("dead")[0]["why"]
    assert run.of("dead")[0]["cause"] == "failed"


def test_a_worker_that_the_system_kills_for_memory_is_told_so(tmp_path, start, monkeypatch):
    kills = [4]
    monkeypatch.setattr(machine_memory, "oom_kills", lambda: kills[0])
    run = start(tmp_path, 2, all="wait=go leave=0")
    pid = run.seen("h-2")["pid"]
    wait_until(lambda: run.host.workers.by_member["h-2"].pid)
    kills[0] += 1
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: run.told("dead") == ["h-2"])
    assert run.of("dead")[0]["cause"] == "memory"
    assert run.of("dead")[0]["why"] == "worker h-2 was killed by SIGKILL for lack of memory"
    run.client.append({"kind": "finished", "step": 9, "stopped": False})
    run.go()
    run.end()


def test_a_worker_that_leaves_without_the_runs_end_is_told(tmp_path, start):
    # h-1 was released; h-2 still was in the newest generation, which would wait for it
    run = start(tmp_path, 3, do={"1": "wait=go leave=0", "2": "wait=go leave=0", "3": "wait=later leave=0"})
    run.client.compare_and_set(0, EMPTY.successor(["h-2", "h-3"], leaving=["h-1"]))
    wait_until(lambda: run.host.roster.generation.number == 1)
    run.go()
    wait_until(lambda: run.told("dead") and run.told("left"))
    assert (run.told("dead"), run.told("left")) == (["h-2"], ["h-1"])
    run.go("later")
    assert run.end().how == "left"


def test_when_all_voters_are_lost_at_once_whoever_asks_may_go_on_from_the_checkpoint(tmp_path, start):
    run = start(tmp_path, 3, all="wait=go leave=0")
    pids = [run.seen(f"h-{number}")["pid"] for number in (1, 2)]
    run.client.compare_and_set(0, EMPTY.successor(["h-1", "h-2"]))
    run.client.append({"kind": "checkpoint", "step": 7, "generation": 1})
    # another host's belief is no proof: that host may have been cut off, and the workers may train on
    for member in ("h-1", "h-2"):
        run.client.append({"kind": "dead", "member": member, "why": "host h does not answer", "by": "another"})
    wait_until(lambda: run.told("dead") == ["h-1", "h-2"])
    run.client.append({"kind": "hello", "member": "h-3"})
    assert not run.host.roster.has_no_voter_left
    assert run.client.read().number == 1
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: run.client.read().number == 2)
    record = run.client.read()
    assert (record.members, record.checkpoint, record.regress) == ((), Stamp(7, 1), True)
    run.go()
    assert run.end().how == "left"


def test_a_stopped_worker_is_killed_and_then_told_dead(tmp_path, start):
    run = start(tmp_path, 2)
    pid = run.seen("h-1")["pid"]
    wait_until(lambda: run.host.workers.by_member["h-1"].pid)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: run.told("dead") == ["h-1"])
    assert not alive(pid), "told dead before it was"
    assert "was stopped" in run.of("dead")[0]["why"]
    assert run.of("dead")[0]["cause"] == "hung"
    assert alive(run.seen("h-2")["pid"])


def test_a_short_stop_is_forgiven(tmp_path, start):
    run = start(tmp_path, 1, elastic={"stopped_seconds": 5.0})
    pid = run.seen("h-1")["pid"]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.4)
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.4)
    assert alive(pid)
    assert run.told("dead") == []


def test_who_does_not_answer_after_a_break_is_killed_and_who_does_is_not(tmp_path, start):
    run = start(tmp_path, 4)
    pids = {f"h-{number}": run.seen(f"h-{number}")["pid"] for number in range(1, 5)}
    # h-4 is outside and has nothing to answer
    first = EMPTY.successor(["far-1", "h-1", "h-2", "h-3"])
    run.client.compare_and_set(0, first)
    for member in ("far-1", "h-1"):
        run.client.append({"kind": "broken", "generation": 1, "member": member})
    run.client.compare_and_set(1, first.successor(["far-1", "h-1", "h-3"]))
    wait_until(lambda: run.told("dead"))
    time.sleep(0.3)
    assert run.told("dead") == ["h-2"]
    assert "did not answer within 0.5 s after generation 1 broke" in run.of("dead")[0]["why"]
    assert run.of("dead")[0]["cause"] == "hung"
    assert [alive(pids[member]) for member in ("h-1", "h-2", "h-3", "h-4")] == [True, False, True, True]


def test_a_worker_that_others_took_for_dead_goes(tmp_path, start):
    run = start(tmp_path, 2)
    pid = run.seen("h-1")["pid"]
    run.client.append({"kind": "dead", "member": "h-1", "why": "host h does not answer"})
    wait_until(lambda: not alive(pid))
    assert alive(run.seen("h-2")["pid"])


def test_a_lost_worker_is_replaced_by_a_new_member_on_its_device_until_that_is_hopeless(tmp_path, start):
    run = start(tmp_path, 2, all="wait=go leave=0", do={"3": "kill=9", "4": "kill=9"}, elastic={"replace_lost": True})
    os.kill(run.seen("h-2")["pid"], signal.SIGKILL)
    # h-2, and two in its place that do not live long enough to take part
    wait_until(lambda: any("stays empty" in line for line in run.lines) and len(run.told("dead")) >= 3)
    assert run.told("dead") == ["h-2", "h-3", "h-4"]
    assert [run.seen(member)["environment"]["CAPSLOG_LOCAL_RANK"] for member in ("h-2", "h-3", "h-4")] == ["1"] * 3
    run.client.compare_and_set(0, EMPTY.successor(["h-1"]))
    wait_until(lambda: run.host.roster.generation.number == 1)
    os.kill(run.seen("h-1")["pid"], signal.SIGKILL)
    assert run.seen("h-5")["environment"]["CAPSLOG_LOCAL_RANK"] == "0", "a member that took part is worth replacing"
    run.host.add_worker()
    assert run.seen("h-6")["environment"]["CAPSLOG_LOCAL_RANK"] == "1"


def test_what_failed_by_itself_is_not_started_again(tmp_path, start):
    run = start(tmp_path, 1, all="fail=defect", elastic={"replace_lost": True})
    assert isinstance(run.end(), WorkerFailed)
    assert len(run.of("worker")) == 1


class Cloud(CallbackListener):
    """Notice source that is called when the host has left."""

    left = 0

    def host_left(self, resources_left=()) -> tuple[str, ...]:
        self.left += 1
        return ()


def test_a_notice_is_told_for_every_local_member_and_acknowledged_when_the_last_has_left(tmp_path, start):
    cloud = Cloud("h")
    run = start(tmp_path, 2, do={"1": "wait=go leave=0", "2": "wait=later leave=0"}, sources=(cloud,))
    run.seen("h-1"), run.seen("h-2")
    wait_until(lambda: cloud._deliver is not None)
    cloud.announce(Kind.HINT, 10)
    cloud.announce(Kind.LEAVE, 10, hosts=["other"])
    cloud.announce(Kind.LEAVE, 25)
    wait_until(lambda: len(run.of("notice")) == 2)
    notices = run.of("notice")
    assert [entry["member"] for entry in notices] == ["h-1", "h-2"]
    assert all(entry["urgent"] is False and 20 < entry["deadline"] - time.time() <= 25 for entry in notices)
    cloud.announce(Kind.NOW, 5)
    wait_until(lambda: len(run.of("notice")) == 4)
    assert all(entry["urgent"] for entry in run.of("notice")[2:])
    run.go()
    wait_until(lambda: run.told("left") == ["h-1"])
    assert cloud.left == 0, "told the cloud that it may evict a host that is still in use"
    run.go("later")
    assert run.end().how == "left"
    assert cloud.left == 1


def test_a_notice_kept_while_the_store_was_lost_does_not_promise_the_time_that_has_passed(tmp_path, start, monkeypatch):
    # the notice was kept with "10 s are left" and sent unchanged when the store was back: its member went on for longer
    # than the machine lived
    cloud, lost = Cloud("h"), threading.Event()
    run = start(tmp_path, 1, all="wait=go leave=0", sources=(cloud,), elastic={"lease_seconds": 0.4})
    run.seen("h-1")
    wait_until(lambda: cloud._deliver is not None)
    for name in ("append", "put"):
        works = getattr(run.host.link.store, name)

        def call(*arguments: Any, works: Any = works) -> Any:
            if lost.is_set():
                raise StoreGone("the store does not answer")
            return works(*arguments)

        monkeypatch.setattr(run.host.link.store, name, call)
    lost.set()
    told = time.time()
    cloud.announce(Kind.LEAVE, 10)
    wait_until(lambda: any("the run goes on" in line for line in run.lines))
    time.sleep(1.5)
    assert not run.of("notice"), "the store was not lost"
    lost.clear()
    wait_until(lambda: run.of("notice"))
    (entry,) = run.of("notice")
    assert entry["deadline"] == pytest.approx(told + 10, abs=0.3)
    heard = read(entry)
    assert isinstance(heard, NoticeEntry)
    deadline = notice_of(heard, "h").deadline
    assert deadline is not None
    assert deadline.remaining(time.monotonic()) < 8.6, "the outage took a second and a half of the ten"
    run.go()
    assert run.end().how == "left"


def test_notices_are_heard_from_the_hosts_file(tmp_path, start):
    # signals only in the main thread; no cloud answers here
    run = start(tmp_path, 1, all="wait=go leave=0", sources=None)
    run.seen("h-1")
    wait_until((tmp_path / "notices").is_dir)
    (tmp_path / "notices/h").write_text('{"kind": "now", "seconds": 5}')
    wait_until(lambda: run.told("notice") == ["h-1"])
    run.go()
    assert run.end().how == "left"


def test_the_host_that_serves_stays_until_the_others_have_gone(tmp_path, start):
    run = start(tmp_path, 1, all="wait=go leave=0")
    other_run = start(tmp_path, 1, all="wait=later leave=0", name="other", store=run.host.link.address)
    wait_until(lambda: set(run.host.roster.hosts) == {"h", "other"})
    assert other_run.seen("other-1")["environment"]["CAPSLOG_STORE"] == run.host.link.address
    run.go()
    wait_until(lambda: run.told("left") == ["h-1"])
    time.sleep(0.3)
    assert run.thread.is_alive(), "it took the store with it"
    run.client.append({"kind": "finished", "step": 1, "stopped": True})
    run.go("later")
    assert other_run.end() == HostEnd("finished", True)
    assert run.end() == HostEnd("finished", True)
    assert run.host.workers.failures == other_run.host.workers.failures == []


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGKILL, "host other has ended: its connection to the store was closed"),
        (signal.SIGSTOP, "host other does not answer for 1 s"),
    ],
)
def test_a_host_that_vanishes_is_told_dead_with_all_its_workers(number, why, tmp_path, start):
    run = start(tmp_path, 1, all="wait=go leave=0")
    options = {"name": "other", "store": run.host.link.address}
    code = RUN.format(here=str(HERE), folder=str(tmp_path), options=options)
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        pids = [run.seen(f"other-{number}")["pid"] for number in (1, 2)]
        time.sleep(1.5)
        assert run.told("dead") == [], "a host that gives signs of life was taken for dead"
        process.send_signal(number)
        wait_until(lambda: len(run.told("dead")) == 2)
        assert sorted(run.told("dead")) == ["other-1", "other-2"]
        assert run.of("dead")[0]["why"] == why
        assert run.of("dead")[0]["cause"] == "host"
        process.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids))
        run.client.append({"kind": "finished", "step": 1, "stopped": False})
        run.go()
        assert run.end().how == "finished"
    finally:
        process.kill()
        process.wait()


def test_a_lost_store_does_not_end_the_workers(tmp_path, start):
    server = StoreServer(run_secret(tmp_path, create=True))
    port = server.port
    run = start(tmp_path, 2, all="wait=go leave=0", store=f"127.0.0.1:{port}")
    pids = [run.seen(member)["pid"] for member in ("h-1", "h-2")]
    server.close()
    wait_until(lambda: any("the run goes on" in line for line in run.lines))
    assert all(alive(pid) for pid in pids)
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: any("was killed by SIGKILL" in line for line in run.lines))
    assert alive(pids[1])
    run.go()
    assert run.end().how == "left"


def test_hosts_share_a_request_for_devices(tmp_path, start):
    run = start(tmp_path, 2)
    other_run = start(tmp_path, 2, name="other", store=run.host.link.address)
    for member in ("h-1", "h-2"):
        run.seen(member)
    for member in ("other-1", "other-2"):
        other_run.seen(member)
    run.client.append({"kind": "request", "devices": 2})
    wait_until(lambda: len(run.of("notice")) == 2)
    assert run.told("notice") == run.told("worker")[2:], "the youngest leave"
    for each_run in (run, other_run):
        for worker in each_run.host.workers.by_member.values():
            if worker.member in run.told("notice"):
                os.kill(worker.pid, signal.SIGINT)
    wait_until(lambda: len(run.host.roster.members) == 2)
    run.client.append({"kind": "request", "devices": 4})
    wait_until(lambda: len(run.of("worker")) == 6)
    time.sleep(0.2)
    assert len(run.of("worker")) == 6
    assert sorted(run.host.roster.members.values()) == ["h", "h", "other", "other"]


def test_a_fork_server_that_dies_takes_all_workers_and_everybody_hears_it(tmp_path, start):
    run = start(tmp_path, 2)
    pids = [run.seen(member)["pid"] for member in ("h-1", "h-2")]
    os.kill(run.host.workers.fork_server.pid, signal.SIGKILL)
    error = run.end()
    assert isinstance(error, WorkerFailed)
    assert "killed when its fork server ended" in str(error)
    assert sorted(run.told("dead")) == ["h-1", "h-2"]
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_a_stopped_fork_server_is_woken(tmp_path, start):
    run = start(tmp_path, 2)
    pid = run.seen("h-1")["pid"]
    os.kill(run.host.workers.fork_server.pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: run.told("dead") == ["h-1"])


@pytest.mark.parametrize(("do", "presses"), [("hang", 1), ("deaf", 2)])
def test_ctrl_c_asks_and_a_second_one_kills(tmp_path, do, presses):
    pids: list[int] = []

    def press() -> None:
        for number in (1, 2):
            path = tmp_path / f"h-{number}.seen"
            wait_until(path.exists)
            pids.append(json.loads(path.read_text())["pid"])
        for _ in range(presses):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=press)
    thread.start()
    how = (
        "stopped; the same command begins the run in .* anew, since nothing" if presses == 1 else "killed in the middle"
    )
    with pytest.raises(Interrupted, match=how) as caught:
        host_of(tmp_path, all=do).run()
    thread.join()
    assert caught.value.exit_status == 130
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_host_of_the_same_name_gets_a_name_of_its_own(tmp_path, start):
    run = start(tmp_path, 1)
    other_run = start(tmp_path, 1, store=run.host.link.address)
    wait_until(lambda: set(run.host.roster.hosts) == {"h", "h.2"})
    assert other_run.seen("h.2-1")["environment"]["CAPSLOG_HOST"] == "h.2"


def test_nothing_is_started_for_nobody(tmp_path):
    with pytest.raises(CapslogError, match="at least one worker"):
        host_of(tmp_path, 0)
