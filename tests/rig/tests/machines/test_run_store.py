"""The store of a chaos run, as it begins, is lost and begins again."""

from __future__ import annotations

import queue

from tests.elastic.etcd import find_etcd
from tests.rig.machines.run_store import RunStore
from tests.secret import SECRET
from varuna_capslog.elastic.store.opening import open_store
from varuna_capslog.membership.entries import RequestEntry
from varuna_capslog.membership.generation import Generation


def test_a_lost_store_takes_nothing_and_the_next_one_is_empty(tmp_path):
    heard: queue.SimpleQueue = queue.SimpleQueue()
    store = RunStore("tcp", tmp_path, 3.0, SECRET)
    store.append(RequestEntry(1))  # before there is one: nothing happens
    assert store.is_lost
    store.begin({"key": "first"}, heard.put)
    assert (store.is_cluster, store.is_lost, store.is_whole) == (False, False, True)
    client = open_store(store.address, SECRET)
    assert client.get("key") == "first"
    client.close()
    store.append(RequestEntry(2))
    assert heard.get(timeout=20.0) == {"kind": "request", "devices": 2}
    store.found(Generation(1, ("a-1",)))
    store.found(Generation(1, ("a-2",)))  # there is one already
    assert heard.get(timeout=20.0)["record"]["members"] == ["a-1"]
    store.lose()
    assert store.is_lost
    store.append(RequestEntry(3))
    store.found(Generation(1, ("a-3",)))
    store.begin({"key": "second"}, heard.put)
    store.append(RequestEntry(4))
    assert heard.get(timeout=20.0) == {"kind": "request", "devices": 4}
    store.close()


def test_etcd_loses_one_of_three_servers_and_keeps_the_log(tmp_path):
    find_etcd()
    heard: queue.SimpleQueue = queue.SimpleQueue()
    store = RunStore("etcd", tmp_path, 0.1, SECRET)
    try:
        store.begin({}, heard.put)
        assert store.is_cluster
        assert store.is_whole
        store.kill_server(2)
        assert not store.is_whole
        store.append(RequestEntry(2))
        assert heard.get(timeout=20.0) == {"kind": "request", "devices": 2}
        store.start_server_again(2)
    finally:
        store.close()
