"""A host's connection with the store: entries appended during an outage, and the events written for the log."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from varuna_capslog.base import clock, files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic.host.leases import HostStore, age_of, run_age
from varuna_capslog.elastic.host.terminal import describe
from varuna_capslog.elastic.host.workers import HostOptions
from varuna_capslog.elastic.store.opening import StoreGone
from varuna_capslog.membership.entries import Roster
from varuna_capslog.membership.generation import EMPTY


@dataclass
class Said:
    """Log entry of an unknown kind."""

    number: int

    def to_json(self) -> dict[str, Any]:
        return {"kind": "said", "number": self.number}


class Connected:
    """Connection of a host with a store that it serves itself, and all that it passes on."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, lease_seconds: float = 3.0) -> None:
        self.lines: list[str] = []
        self.roster = Roster()
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.heard: list[dict[str, Any]] = []
        settings = Elastic(lease_seconds=lease_seconds)
        options = HostOptions(
            folder, name="h", num_workers=2, keys={"first-plan": "3"}, say=self.lines.append, settings=settings
        )
        self.link = HostStore(options, self.roster, self.logged, lambda host, why: None, self.calls.put)
        (folder / "workers").mkdir()
        self.link.connect(stack)
        self.link.begin(stack)

    def log(self, count: int) -> list[dict[str, Any]]:
        """Return the next entries of the log that are passed on, taken as the host takes them."""
        until = time.monotonic() + 60
        while len(self.heard) < count:
            self.calls.get(timeout=max(0.0, until - time.monotonic()))()
        entries, self.heard = self.heard, []
        return entries

    def logged(self, entry: dict[str, Any]) -> None:
        self.roster.take(entry)
        self.heard.append(entry)


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[Connected]:
    with contextlib.ExitStack() as stack:
        yield Connected(tmp_path, stack)


def test_what_is_told_during_an_outage_is_sent_in_order_when_it_is_over(connected, monkeypatch):
    link = connected.link
    assert connected.log(1) == [{"kind": "hosts", "host": "h", "state": "here", "workers": 2}]
    assert link.store.get("first-plan") == "3"

    def gone(*_: Any) -> None:
        raise StoreGone("the store is gone")

    with monkeypatch.context() as outage:
        outage.setattr(link.store, "append", gone)
        outage.setattr(link.store, "count", gone)
        for number in range(3):
            link.tell(Said(number))
        assert link.new_member() is None, "no worker could join without a store"
        link.write_generation(0, link.store.read().successor(["h-1"]))
        assert not link.answers
        assert connected.lines == ["the store is gone; the run goes on, and stops safely at the next change"]
    link.store_back()
    link.tell(Said(3))
    assert [entry.get("number") for entry in connected.log(5)] == [1, 0, 1, 2, 3], "the generation, then what was kept"
    assert connected.lines[1:] == ["the store answers again"]
    assert link.new_member() == "h-1"


def test_a_log_that_was_not_heard_is_followed_again_from_where_it_was(connected):
    link = connected.link
    connected.log(1)
    link._unfollow()
    link.tell(Said(0))
    link.follower_ended("the store is gone")
    link.store_back()
    assert [entry["number"] for entry in connected.log(1)] == [0]
    link.leave()
    assert len(link.store.history()) == 3


@pytest.mark.parametrize("sign", ["", "odd", "7", "7 x", "7 nan", "7 1e999"])
def test_a_sign_of_another_form_is_one_of_no_age(sign):
    """Regression: such a sign ended the thread that gives this host's signs, so that the others took it for dead."""
    assert age_of(sign) == 0.0


@pytest.mark.parametrize("loop", ["_watch_hosts", "_notice_stops"])
def test_a_host_that_can_give_no_signs_ends_with_the_reason(tmp_path, monkeypatch, loop):
    """Otherwise the others take the host for dead while it goes on."""
    monkeypatch.setattr(HostStore, loop, lambda link, ended: {}["nobody expected this"])
    with contextlib.ExitStack() as stack:
        calls = Connected(tmp_path, stack).calls
        wait_until(lambda: calls.qsize() == 2)  # the log's first entry, and the end
        made = [calls.get(), calls.get()]
        end = next(call for call in made if not isinstance(call, partial))
        with pytest.raises(CapslogError, match="failed with KeyError: 'nobody expected this'"):
            end()


# -- events: each is written once, whichever of the hosts that read the log does it -----------------------------------


def play(folder: Path, log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events that hosts a and b write for a log, which both read completely."""
    for host in ("a", "b"):
        read_by(host, folder, log)
    path = folder / "events.jsonl"
    return files.read_jsonl(path) if path.exists() else []


def read_by(host: str, folder: Path, log: list[dict[str, Any]]) -> Roster:
    roster = Roster()
    ignored: Any = None
    link = HostStore(HostOptions(folder, name=host), roster, ignored, ignored, ignored)
    link._offset = 2
    for entry in log:
        link.write_event(entry)
        roster.take(entry)
    return roster


@pytest.fixture
def log() -> list[dict[str, Any]]:
    hosts = [{"kind": "hosts", "host": host, "state": "here", "workers": 1} for host in ("a", "b")]
    workers = [{"kind": "worker", "member": f"{host}-1", "host": host, "slot": 0} for host in ("a", "b")]
    return [*hosts, *workers, generation(1, "a-1", "b-1")]


def generation(number: int, *members: str) -> dict[str, Any]:
    record = EMPTY
    for _ in range(number):
        record = record.successor(members)
    return {"kind": "generation", "number": number, "record": record.to_json()}


def test_the_first_members_join_nothing(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    assert play(tmp_path, log) == []


def test_a_notice_is_told_once_until_it_becomes_urgent(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n{"step": 8}\n{"step":')
    notice = {"kind": "notice", "member": "b-1", "urgent": False, "deadline": time.time() + 30.2, "source": "aws"}
    told = play(tmp_path, [*log, notice, notice, {**notice, "urgent": True}, notice])
    assert [(event["kind"], event["member"], event["host"], event["urgent"]) for event in told] == [
        ("notice", "b-1", "b", False),
        ("notice", "b-1", "b", True),
    ]
    assert {(event["generation"], event["step"], round(event["deadline"]), event["source"]) for event in told} == {
        (3, 8, 30, "aws")
    }, "people read how many seconds are left"
    assert [describe(event) for event in told] == [
        "notice (aws): b-1 is to leave within 30 s",
        "notice (aws): b-1 is to leave at once",
    ]


def test_who_tells_of_a_loss_first_writes_it_down(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    loss = {"kind": "dead", "member": "b-1", "why": "host b does not answer for 3 s", "by": "a"}
    (event,) = play(tmp_path, [*log, loss, {**loss, "by": "b", "why": "too late"}])
    assert (event["kind"], event["member"], event["host"], event["why"]) == ("lost", "b-1", "b", loss["why"])
    assert (event["generation"], event["step"]) == (3, None)
    assert describe(event) == loss["why"]


def test_a_loss_that_a_program_tells_is_written_by_the_host_of_the_lost(
    tmp_path: Path, log: list[dict[str, Any]]
) -> None:
    events = play(tmp_path, [*log, {"kind": "dead", "member": "a-1", "why": "so says the test"}])
    assert [(event["kind"], event["host"]) for event in events] == [("lost", "a")]


def test_whoever_is_named_for_the_first_time_joins(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    newcomer = {"kind": "worker", "member": "b-2", "host": "b", "slot": 1}
    later = [generation(2, "a-1", "b-1", "b-2"), generation(3, "a-1", "b-2"), generation(4, "a-1", "b-1", "b-2")]
    events = play(tmp_path, [*log, newcomer, *later])
    assert [(event["kind"], event["member"], event["host"], event["generation"]) for event in events] == [
        ("join", "b-2", "b", 4)
    ]


def test_a_disk_that_is_full_stops_no_supervisor(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    (tmp_path / "events.jsonl").mkdir()
    loss = {"kind": "dead", "member": "b-1", "why": "x", "by": "a"}
    assert read_by("a", tmp_path, [*log, loss]).dead == {"b-1"}


@pytest.mark.parametrize("why", ["cut off", "cut off for long", "stood still"])
def test_a_host_that_was_taken_for_lost_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Three causes: the store does not answer, answers late, or answers late since this process was stopped."""
    with contextlib.ExitStack() as stack:
        link = Connected(tmp_path, stack, lease_seconds=0.4).link
        give_sign, tries = link.store.give_sign, 0

        def disturbed(host: str, sign: str) -> None:
            nonlocal tries
            tries += 1
            if why == "cut off":
                raise StoreGone("the store is gone")
            if tries == 1:
                time.sleep(0.6)
                if why == "stood still":  # as the thread that looks at the clock would find it
                    link._awoke = time.monotonic()
            give_sign(host, sign)

        monkeypatch.setattr(link.store, "give_sign", disturbed)
        wait_until(lambda: tries >= 2)
        link.explain_absence()
    (event,) = [line for line in files.read_jsonl(tmp_path / "events.jsonl") if line["kind"] == "cause"]
    assert (event["host"], event["cause"]) == ("h", "hung" if why == "stood still" else "network")


def test_a_host_that_comes_later_learns_from_the_others_how_old_the_run_is(tmp_path: Path) -> None:
    """The age comes from the others' own counts, not from any host's time of day."""
    clock.use(lambda: 1_800_000_000.0 - time.monotonic() * 3600)  # it goes backwards by an hour every second
    try:
        with contextlib.ExitStack() as stack:
            first = Connected(tmp_path, stack, lease_seconds=0.2)
            assert run_age(first.link.store, "h") == 0.0
            first.link.run_begins()
            first.link._run_began = time.monotonic() - 100.0
            later = HostOptions(tmp_path, name="g", store=first.link.address, settings=Elastic(lease_seconds=0.2))
            roster, calls = Roster(), queue.SimpleQueue()
            second = HostStore(later, roster, lambda entry: None, lambda host, why: None, calls.put)
            roster.hosts["h"] = 2
            second.connect(stack)
            second.begin(stack)
            second.run_begins()  # it hears of the first generation as it reads the log, long after
            wait_until(lambda: run_age(second.store, "g") > 99.0, 10.0)
            assert 100.0 <= run_age(second.store, "g") < 110.0
    finally:
        clock.use(None)


def test_a_host_gives_signs_of_life_while_it_waits_for_a_slow_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        connected = Connected(tmp_path, stack, lease_seconds=0.2)
        wrote, go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(files, "append_jsonl", lambda *arguments: (wrote.set(), go_on.wait(20)))
        member = {"kind": "worker", "member": "h-1", "host": "h", "slot": 0}
        connected.roster.take(member)
        notice = {"kind": "notice", "member": "h-1", "urgent": False, "deadline": None, "source": "aws"}
        host = threading.Thread(target=connected.link.write_event, args=(notice,))
        host.start()
        assert wrote.wait(20)
        signs = {connected.link.store.signs_of(["h"])["h"]}
        wait_until(lambda: len(signs) > 3 or signs.add(connected.link.store.signs_of(["h"])["h"]))
        assert host.is_alive(), "it still waits"
        go_on.set()
        host.join()


def test_a_host_looks_after_hundreds_of_others_by_one_question(tmp_path: Path) -> None:
    """Regression: over a connection of 20 ms, a question for each host took longer than the lease to be renewed."""
    with contextlib.ExitStack() as stack:
        connected = Connected(tmp_path, stack, lease_seconds=0.4)
        store, questions = connected.link.store, Counter[str]()
        ask = store.client.ask

        def counted(*question: Any, wait: float = 0.0) -> Any:
            questions[question[0]] += 1
            return ask(*question, wait=wait)

        store.client.ask = counted
        connected.roster.hosts.update({f"g{number}": 8 for number in range(125)})
        wait_until(lambda: questions["values"] > 2)
        assert questions["get"] == 0
