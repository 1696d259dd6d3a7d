"""The run's own store server: its answers, its clients, and the operations that torch's groups need."""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.secret import SECRET
from tests.waiting import wait_until
from varuna_capslog.base.connection import Connection, Forged, dial
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.secret import Secret
from varuna_capslog.elastic.store.opening import (
    ENDED,
    OwnMembershipStore,
    StoreGone,
    StoreRefuses,
    StoreServer,
    open_store,
)
from varuna_capslog.elastic.store.server import MAX_MESSAGE, PURPOSE
from varuna_capslog.engine.communicator import connect_group


@pytest.fixture
def server() -> Iterator[StoreServer]:
    store_server = StoreServer(SECRET)
    yield store_server
    store_server.close()


def connected(server: StoreServer) -> Connection:
    connection = dial("127.0.0.1", server.port, SECRET.key(PURPOSE), 5.0)
    assert json.loads(connection.read_message(MAX_MESSAGE)) == {"identity": server.identity}
    return connection


def ask(connection: Connection, *question: object) -> object:
    connection.send_message(json.dumps(question).encode())
    return json.loads(connection.read_message(MAX_MESSAGE))


def test_another_secret_is_refused_with_one_sentence(server):
    with pytest.raises(
        StoreRefuses, match=r"the store at 127.* does not share this run's secret .*give both machines the"
    ):
        open_store(f"127.0.0.1:{server.port}", Secret.new())


def test_each_operation(server):
    line = connected(server)
    assert ask(line, "get", ["a"], 0) is None
    assert ask(line, "set", "a", "\u00ff1") is None
    assert ask(line, "get", ["a"], 0) == ["\u00ff1"]
    assert [ask(line, "add", "n", 2), ask(line, "add", "n", -3)] == [2, -1]
    assert ask(line, "exchange", "c", "", "x") == "x"
    assert ask(line, "exchange", "c", "y", "z") == "x"
    assert ask(line, "exchange", "c", "x", "z") == "z"
    assert ask(line, "exchange", "d", "y", "z") is None
    assert ask(line, "size") == 3
    assert [ask(line, "delete", "c"), ask(line, "delete", "c")] == [True, False]
    assert ask(line, "write", 0, "one") == "one"
    assert ask(line, "write", 0, "two") == "one"
    assert ask(line, "write", 2, "two") is None, "a log has no gaps"
    assert ask(line, "entries", 0, 0) == [["one"], 1]
    assert ask(line, "entries", 1, 0) == [[], 1]
    line.close()


def test_a_sign_of_life_ends_with_its_connection_unless_another_has_given_one(server):
    first, second, reader = (open_store(f"127.0.0.1:{server.port}", SECRET) for _ in range(3))
    assert reader.signs_of(["h"])["h"] is None
    first.give_sign("h", "1")
    first.give_sign("h", "2")
    assert reader.signs_of(["h"])["h"] == "2"
    second.give_sign("h", "3")
    first.close()
    time.sleep(0.2)
    assert reader.signs_of(["h"])["h"] == "3"
    second.put("another key", "-")
    second.close()
    wait_until(lambda: reader.signs_of(["h"])["h"] == "3" + ENDED)
    assert reader.get("another key") == "-"
    reader.give_sign("h", "4")
    assert reader.signs_of(["h"])["h"] == "4"
    reader.close()


@pytest.mark.parametrize("raised", [None, LookupError("nobody expected this")], ids=["too deep", "a defect"])
def test_whatever_a_question_raises_ends_its_connection_and_its_sign_of_life(server, monkeypatch, raised):
    """Regression: JSON nested 100,000 deep ended only the thread; the connection and the host's sign of life stayed."""
    reader, line = open_store(f"127.0.0.1:{server.port}", SECRET), connected(server)
    ask(line, "sign", "key/lease/h", "1")
    if raised is not None:
        answer = server._content.answer
        monkeypatch.setattr(server._content, "answer", lambda asked: {}["x"] if asked == ["odd"] else answer(asked))
    line.send_message(b'["odd"]' if raised else b"[" * 100_000)
    with pytest.raises((EOFError, ConnectionError)):
        line.read_message(MAX_MESSAGE)
    wait_until(lambda: reader.signs_of(["h"])["h"] == "1" + ENDED)
    wait_until(lambda: len(server._connections) == 1)  # the reader's
    reader.close()


def test_a_store_whose_listener_fails_is_gone_for_all(server, monkeypatch):
    """Otherwise connected clients would go on without those that cannot connect."""
    line = connected(server)
    monkeypatch.setattr(server._listener, "_accept", lambda: {}["nobody expected this"])
    with pytest.raises((EOFError, ConnectionError)):
        dial("127.0.0.1", server.port, SECRET.key(PURPOSE), 5.0)
    with pytest.raises((EOFError, ConnectionError)):
        line.read_message(MAX_MESSAGE)


@pytest.mark.parametrize("text", ["no json", "[]", "7", '["a", "b"]', "[" * 100_000])
def test_an_entry_that_is_none_is_passed_over_by_all(server, text):
    """The entry may come from another version or an insider. Regression: every honest `append` raised a
    JSONDecodeError, and followers died.
    """
    store, heard, lost = OwnMembershipStore("127.0.0.1", server.port, SECRET), [], []
    assert store._write(0, text)
    store.append({"kind": "hosts", "host": "h", "state": "here", "workers": 1})
    store.follow(heard.append, lost.append)
    wait_until(lambda: len(heard) == 2)
    assert [entry["kind"] for entry in heard] == ["unreadable", "hosts"]
    assert lost == []
    store.close()


def test_a_follower_that_fails_tells_its_owner(server):
    """Regression: the thread that follows the log died, and the host, unaware of it, received nothing more."""
    store, lost = OwnMembershipStore("127.0.0.1", server.port, SECRET), []
    store.append({"kind": "hosts", "host": "h", "state": "here", "workers": 1})
    store.follow(lambda entry: entry["no such field"], lost.append)
    wait_until(lambda: lost)
    assert lost[0].startswith("the thread store-follow failed with KeyError: 'no such field'")
    store.close()


@pytest.mark.parametrize(
    "question", [b"", b"[]", b"7", b'["no such"]', b'["get"]', b'["add", "n", "x"]', b"\xff", b'["get", 1, 2]']
)
def test_a_question_that_is_none_ends_its_connection_and_no_other(server, question):
    line, other_line = connected(server), connected(server)
    line.send_message(question)
    with pytest.raises((EOFError, ConnectionError)):
        line.read_message(MAX_MESSAGE)
    assert ask(other_line, "look") is None
    other_line.close()


def test_a_message_that_is_too_long_ends_its_connection(server):
    line = connected(server)
    line.send([(1 << 40).to_bytes(8, "big")])
    with pytest.raises((EOFError, ConnectionError, Forged)):
        line.read_message(MAX_MESSAGE)


def test_waiting_ends_with_the_value_or_after_a_second_at_most(server):
    line, other_line = connected(server), connected(server)
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(ask(line, "get", ["late", "a"], 1.0)))
    thread.start()
    ask(other_line, "set", "a", "1")
    ask(other_line, "set", "late", "2")
    thread.join(5)
    assert answers == [["2", "1"]]
    began = time.monotonic()
    assert ask(line, "get", ["never"], 3600) is None
    assert 0.9 < time.monotonic() - began < 10


def test_a_long_log_comes_in_bounded_batches(server):
    store = OwnMembershipStore("127.0.0.1", server.port, SECRET)
    text = "x" * 100_000
    for number in range(60):
        store.append({"kind": "x", "number": number, "text": text})
    batch, length = store.client.ask("entries", 0, 0)
    assert 0 < len(batch) < 60 == length
    assert [entry["number"] for entry in store.history()] == list(range(60))
    store.close()


def test_torchs_groups_meet_there_and_are_told_in_time_where_nobody_comes(server):
    stores = [OwnMembershipStore("127.0.0.1", server.port, SECRET) for _ in range(3)]
    totals = [0.0] * 3

    def member(rank: int) -> None:
        group = connect_group(stores[rank].rendezvous(), "g", rank, 3, 20.0)
        totals[rank] = group.add(torch.tensor([float(rank + 1)])).item()
        group.barrier()
        group.close()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert totals == [6.0] * 3
    with pytest.raises(CapslogError, match="could not join 2 ranks"):
        connect_group(stores[0].rendezvous(), "alone", 0, 2, 0.3)
    for store in stores:
        store.close()


def test_all_that_torch_may_ask_of_a_store(server):
    store = OwnMembershipStore("127.0.0.1", server.port, SECRET)
    there = store.rendezvous()
    prefixed = dist.PrefixStore("p", there)
    prefixed.set("a", b"\x00\xff")
    assert (prefixed.get("a"), there.get("p/a")) == (b"\x00\xff", b"\x00\xff")
    assert [prefixed.add("n", 1), prefixed.add("n", 4)] == [1, 5]
    assert prefixed.compare_set("c", "", "x") == b"x"
    assert prefixed.compare_set("c", "y", "z") == b"x"
    assert prefixed.check(["a", "c"])
    assert not prefixed.check(["a", "d"])
    prefixed.multi_set(["x", "y"], ["1", "2"])
    assert prefixed.multi_get(["x", "y"]) == [b"1", b"2"]
    assert prefixed.delete_key("x")
    assert prefixed.num_keys() == 4
    with pytest.raises(dist.DistStoreError, match="nobody has set"):
        prefixed.wait(["x"], datetime.timedelta(seconds=0.05))
    there.set_timeout(datetime.timedelta(seconds=0.05))
    with pytest.raises(dist.DistStoreError, match="nobody has set"):
        there.get("never")
    assert there.clone().get("p/a") == b"\x00\xff"
    server.close()
    with pytest.raises(StoreGone):
        there.set("a", "1")
    store.close()
