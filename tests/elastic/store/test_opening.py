"""The membership store: one order for all, no entry lost or repeated, and a loss that every client notices soon."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.etcd import start_etcd
from tests.rig.etcd_servers import EtcdServers
from tests.secret import SECRET
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import is_stopped
from varuna_capslog.elastic.store.etcd_store import EtcdMembershipStore, begin_run
from varuna_capslog.elastic.store.opening import OwnMembershipStore, StoreGone, StoreServer, open_store
from varuna_capslog.elastic.store.server import StoreClient
from varuna_capslog.membership.generation import EMPTY

ROOT = Path(__file__).resolve().parents[3]
SERVER = """
import sys, time
from tests.secret import SECRET
from varuna_capslog.elastic.store.opening import StoreServer
server = StoreServer(SECRET, port=int(sys.argv[1]))
port = server.port
print(port, flush=True)
time.sleep(600)
"""


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.fixture
def port() -> Iterator[int]:
    server = StoreServer(SECRET)
    port = server.port
    yield port
    server.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    server = start_etcd(tmp_path_factory.mktemp("etcd"))
    yield server
    server.close()


@pytest.fixture(params=["tcp", "etcd"])
def place(request: pytest.FixtureRequest) -> int | str:
    """Address of an empty store of either kind."""
    if request.param == "tcp":
        port: int = request.getfixturevalue("port")
        return port
    address: str = request.getfixturevalue("etcd").address(f"tests/{uuid.uuid4().hex}")
    begin_run(address, 1.0, SECRET)
    return address


@contextlib.contextmanager
def client(place: int | str, **options) -> Iterator[Any]:
    store = (
        EtcdMembershipStore(place, SECRET, **options)
        if isinstance(place, str)
        else OwnMembershipStore("127.0.0.1", place, SECRET, **options)
    )
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def served_elsewhere(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Serve a store in a process of its own, which may be killed."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


class Relay:
    """Relay of connections to `port`, which can be cut (closed) or frozen (nothing passes, nothing is closed). The next
    `spoils` connections are closed when they ask for the store's identity.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.moving = threading.Event()
        self.moving.set()
        self.spoils = 0
        self.ends: list[socket.socket] = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                self.ends += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self.move, args=(source, target), daemon=True).start()

    def move(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.spoils and b"identity" in data:
                    self.spoils -= 1
                    self.cut()
                    return
                self.moving.wait()
                target.sendall(data)

    def cut(self) -> None:
        ends, self.ends = self.ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self.listener.close()
        self.moving.set()
        self.cut()


@contextlib.contextmanager
def relay(port: int) -> Iterator[Relay]:
    new_relay = Relay(port)
    try:
        yield new_relay
    finally:
        new_relay.close()


def test_a_generation_follows_only_the_newest_and_everybody_hears_of_it(place):
    with client(place) as store, client(place) as other_store:
        heard: list[dict] = []
        other_store.follow(heard.append, heard.append)
        assert store.read() == EMPTY
        first = EMPTY.successor(["a", "b"])
        assert store.compare_and_set(0, first) == first
        # a late founder gets the existing record, not its own
        assert other_store.compare_and_set(0, EMPTY.successor(["c"])) == first
        second = first.successor(["b"])
        assert other_store.compare_and_set(1, second) == second
        assert store.read(known=1) == second
        wait_until(lambda: len(heard) == 2)
        assert [(entry["kind"], entry["number"]) for entry in heard] == [("generation", 1), ("generation", 2)]
        with pytest.raises(CapslogError, match="cannot follow"):
            store.compare_and_set(0, second)
        with pytest.raises(CapslogError, match="compare_and_set only"):
            store.append({"kind": "generation", "number": 3})
        with pytest.raises(CapslogError, match="member is ''; it must be a non-empty string"):
            store.append({"kind": "left", "member": ""})
        assert len(store.history()) == 2
        with pytest.raises(StoreGone, match="forgotten generation 9"):
            store.read(known=9)


def test_of_many_founders_one_wins_each_generation_and_the_log_has_one_order(place):
    won: list[tuple[int, str]] = []
    logs: list[list[dict]] = [[], []]

    def found(name: str) -> None:
        with client(place) as store:
            for turn in range(12):
                newest = store.read()
                record = newest.successor([name])
                if store.compare_and_set(newest.number, record) == record:
                    won.append((record.number, name))
                store.append({"kind": "said", "by": name, "turn": turn})

    with client(place) as reader, client(place) as other_reader:
        reader.follow(logs[0].append, logs[0].append)
        other_reader.follow(logs[1].append, logs[1].append)
        threads = [threading.Thread(target=found, args=(f"m{number}",)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        wait_until(lambda: min(map(len, logs)) == len(won) + 96)
        assert len(reader.history()) == len(won) + 96
        newest = reader.read()
    numbers = sorted(number for number, _ in won)
    assert numbers == list(range(1, newest.number + 1)), "two founded the same generation, or one was left out"
    assert logs[0] == logs[1]
    founded = [(entry["number"], entry["record"]["members"][0]) for entry in logs[0] if entry["kind"] == "generation"]
    assert founded == sorted(won)
    for number in range(8):
        turns = [entry["turn"] for entry in logs[0] if entry.get("by") == f"m{number}"]
        assert turns == list(range(12)), "an entry was lost, told twice or out of its sender's order"


def test_a_newcomer_reads_a_long_log_to_its_end_and_follows_from_where_it_likes(place):
    with client(place) as store:
        store.compare_and_set(0, EMPTY.successor(["a"]))
        for number in range(700):
            store.append({"kind": "said", "number": number})
        with client(place) as late:
            assert len(late.history()) == 701
            assert late.read().members == ("a",)
            heard: list[dict] = []
            late.follow(heard.append, heard.append, start=699)
            store.append({"kind": "said", "number": 700})
            wait_until(lambda: len(heard) == 3)
            assert [entry["number"] for entry in heard] == [698, 699, 700]


def test_a_follower_that_comes_late_reads_the_log_in_batches(port, monkeypatch):
    """Regression: each of thousands of entries took a question of its own, and newcomers to a run of some hundred
    changes gave up before the end.
    """
    questions: list[Any] = []
    ask = StoreClient.ask

    def counted(client, *question, **options):
        questions.append(question[0])
        return ask(client, *question, **options)

    with client(port) as store:
        for number in range(300):
            store.append({"kind": "said", "number": number})
        monkeypatch.setattr(StoreClient, "ask", counted)
        with client(port) as late:
            heard: list[dict] = []
            late.follow(heard.append, heard.append)
            wait_until(lambda: len(heard) == 300)
            store.append({"kind": "said", "number": 300})
            wait_until(lambda: len(heard) == 301)
        assert [entry["number"] for entry in heard] == list(range(301))
        assert questions.count("entries") <= 8  # batches, the reads of `append`, and the wait for the next entry


def test_keys_wait_for_their_first_value_and_counters_never_repeat(place):
    with client(place) as store, client(place) as other_store:
        assert store.get("key") is None
        assert store.get("key", wait_seconds=0.05) is None
        values: list[str | None] = []
        thread = threading.Thread(target=lambda: values.append(store.get("key", wait_seconds=20)))
        thread.start()
        other_store.put("key", "value")
        thread.join(20)
        assert values == ["value"]
        other_store.put("key", "another")
        assert store.get("key") == "another"
        assert [store.count("n"), other_store.count("n"), store.count("n"), store.count("m")] == [1, 2, 3, 1]


def test_many_keys_are_asked_for_at_once(place):
    with client(place) as store:
        for number in range(0, 250, 2):
            store.put(f"n/{number}", f"value {number}")
        keys = [f"n/{number}" for number in range(250)]
        values = store.get_all(keys)
        assert list(values) == keys
        assert values == {f"n/{number}": None if number % 2 else f"value {number}" for number in range(250)}
        assert store.get_all([]) == {}


def test_rendezvous_is_a_client_of_its_own(place):
    with client(place) as store:
        torchs = store.rendezvous()
        torchs.set("mine", "1")
        assert torchs.get("mine") == b"1"
    assert torchs.get("mine") == b"1", "it must outlive the client that made it"


def test_nothing_is_told_after_stop(place):
    with client(place) as store:
        heard: list[dict] = []
        stop = store.follow(heard.append, heard.append)
        store.append({"kind": "first"})
        wait_until(lambda: len(heard) == 1)
        stop()
        store.append({"kind": "second"})
        with client(place) as other_store:
            seen: list[dict] = []
            other_store.follow(seen.append, seen.append)
            wait_until(lambda: len(seen) == 2)
        assert [entry["kind"] for entry in heard] == ["first"]


def test_a_killed_store_is_gone_for_calls_and_followers_and_an_empty_one_in_its_place_is_no_substitute():
    with served_elsewhere() as (process, port):
        with client(port) as store:
            lost: list[str] = []
            store.follow(lambda entry: None, lost.append)
            store.compare_and_set(0, EMPTY.successor(["a"]))
            process.kill()
            wait_until(lambda: lost)
            assert "is gone" in lost[0]
            with pytest.raises(StoreGone, match="is gone"):
                store.read()
            with served_elsewhere(port):
                # the same address, another store: using it would found generation 1 a second time
                for call in (
                    store.read,
                    lambda: store.compare_and_set(1, store.read()),
                    lambda: store.append({"kind": "x"}),
                ):
                    with pytest.raises(StoreGone, match="started anew"):
                        call()
                with client(port) as newcomer:
                    assert newcomer.read() == EMPTY
                with pytest.raises(StoreGone, match="started anew"):
                    OwnMembershipStore("127.0.0.1", port, SECRET, identity=store.identity)
            assert len(lost) == 1


def test_a_store_that_hangs_is_gone_within_the_bound_and_followers_hear_it_by_themselves():
    with served_elsewhere() as (process, port), client(port, answer_seconds=0.5) as store:
        store.client.open_seconds = 0.5  # not from the start: a slow name server may hold up the first connection
        lost: list[str] = []
        store.follow(lambda entry: None, lost.append)
        store.append({"kind": "x"})
        process.send_signal(signal.SIGSTOP)
        # its threads stop one by one, and one of them may still answer
        wait_until(lambda: all(is_stopped(int(thread)) for thread in os.listdir(f"/proc/{process.pid}/task")), 10)
        for call in (store.read, lambda: store.get("k"), store.rendezvous, lambda: store.append({"kind": "x"})):
            with pytest.raises(StoreGone, match=r"no answer within 0\.5 s"):
                call()
        wait_until(lambda: lost, 10)
        process.send_signal(signal.SIGCONT)
        assert store.read() == EMPTY, "a store that answers again, and is the same, serves again"


def test_a_cut_connection_is_opened_again_and_a_follower_misses_nothing(port):
    with relay(port) as between, client(between.port) as far, client(port) as near:
        heard: list[dict] = []
        lost: list[str] = []
        far.follow(heard.append, lost.append)
        for number in range(20):
            near.append({"kind": "said", "number": number})
            if number % 5 == 4:
                wait_until(lambda: heard)
                between.cut()
        wait_until(lambda: len(heard) == 20, 60)
        assert [entry["number"] for entry in heard] == list(range(20))
        between.cut()
        far.append({"kind": "said", "number": 20})
        assert len(far.history()) == 21
        assert lost == []


@pytest.mark.parametrize("spoils", [1, 2])
def test_a_connection_that_breaks_while_it_is_made_is_made_again(port, spoils):
    with relay(port) as between, client(between.port) as far, client(port) as near:
        heard: list[dict] = []
        lost: list[str] = []
        far.follow(heard.append, lost.append)
        near.append({"kind": "said"})
        wait_until(lambda: heard)
        between.spoils = spoils
        between.cut()
        near.append({"kind": "said"})
        wait_until(lambda: len(heard) == 2 or lost)
        assert (len(heard), lost) == (2, [])
        between.spoils = spoils
        with client(between.port) as late:
            assert len(late.history()) == 2


def test_a_partition_without_a_word_is_noticed(port):
    with relay(port) as between, client(between.port, answer_seconds=0.4) as far, client(port) as near:
        far.client.open_seconds = 0.4
        heard: list[dict] = []
        lost: list[str] = []
        far.follow(heard.append, lost.append)
        near.append({"kind": "said"})
        wait_until(lambda: heard)
        between.moving.clear()
        wait_until(lambda: lost, 10)
        assert "no answer" in lost[0]


def test_addresses_are_checked(port):
    for wrong in ("somewhere", ":1", "somewhere:x", "127.0.0.1:65536", f"127.0.0.1:{10**30}"):
        with pytest.raises(CapslogError, match="not host:port"):
            open_store(wrong, SECRET)
    store = open_store(f"127.0.0.1:{port}", SECRET)
    assert store.address == f"127.0.0.1:{port}"
    store.close()
    with pytest.raises(StoreGone, match="was closed"):
        store.read()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with pytest.raises(StoreGone, match="is gone"):
        open_store(f"127.0.0.1:{free}", SECRET)


def test_log_entries_are_json(place):
    with client(place) as store:
        with pytest.raises(CapslogError, match="cannot hold"):
            store.append({"kind": "x", "value": os})
        assert len(store.history()) == 0
