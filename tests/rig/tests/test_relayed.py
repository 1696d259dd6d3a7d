"""A member whose addresses lead to the relay: its store, its listeners and the sockets of its gloo groups."""

from __future__ import annotations

import socket
import threading
import time

import torch

from tests.rig.relay import Line
from tests.rig.relayed import VARIABLE, RelayedStore, opener, rewrite
from tests.secret import SECRET
from varuna_capslog.elastic.store.opening import StoreServer
from varuna_capslog.engine.communicator import connect_group


def test_a_blob_keeps_all_but_its_port():
    sockaddr = socket.AF_INET.to_bytes(2, "little") + (4711).to_bytes(2, "big") + socket.inet_aton("127.0.0.1")
    blob = b"\x7f\x00\x00\x01head" + sockaddr + b"tail"  # the address alone, without family and port, is none
    changed = rewrite(blob, "127.0.0.1:4711", "127.0.0.1:4712")
    assert changed == blob.replace((4711).to_bytes(2, "big"), (4712).to_bytes(2, "big"))


def test_a_host_whose_supervisor_was_started_again_is_cut_by_its_machine(line, relay, monkeypatch):
    """The second supervisor of machine `again` is called again.2; cuts of `again` once did not reach its workers."""
    monkeypatch.setenv("CAPSLOG_HOST", "again.2")
    monkeypatch.setenv(VARIABLE, f"again@{relay.address}")
    server = StoreServer(SECRET)
    port = server.port
    open_relayed = opener()
    store = open_relayed(f"127.0.0.1:{port}", SECRET, server.identity)
    store.put("address/again.2-1", "127.0.0.1:4713")
    assert line.through("again", "127.0.0.1:4713") == "127.0.0.1:4713"
    assert line.through("other", "127.0.0.1:4713") != "127.0.0.1:4713"
    store.close()
    server.close()


def test_gloo_groups_of_two_hosts_are_cut_with_their_network(line, relay):
    """If gloo exchanged its addresses in another way, this sum would arrive in spite of the cut."""
    server = StoreServer(SECRET)
    port = server.port
    groups, lines = {}, []

    def join(rank):
        store = RelayedStore("127.0.0.1", port, SECRET, server.identity)
        lines.append(Line(relay.address, SECRET))
        store.relay(lines[-1], f"gloo{rank}")
        groups[rank] = (store, connect_group(store.rendezvous(), "try", rank, 2, 5.0))

    def together(work):
        results = {}
        threads = [threading.Thread(target=lambda rank=rank: results.update({rank: work(rank)})) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)
        return results

    together(join)
    assert sorted(groups) == [0, 1], f"torch {torch.__version__}: gloo's addresses have another form"

    def added(rank):
        tensor = torch.ones(1) * (rank + 1)
        groups[rank][1]._group.allreduce([tensor]).wait()
        return float(tensor)

    assert together(added) == {0: 3.0, 1: 3.0}
    ways = {("gloo0", "gloo1"), ("gloo1", "gloo0")}
    line.disturb(ways)
    tensors = [torch.ones(1), torch.ones(1)]
    pending = [groups[rank][1]._group.allreduce([tensors[rank]]) for rank in (0, 1)]
    time.sleep(0.2)
    assert not any(work.is_completed() for work in pending)
    line.heal(ways)
    for work in pending:
        work.wait()
    assert [float(tensor) for tensor in tensors] == [2.0, 2.0]
    for store, group in groups.values():
        group.abort()
        store.close()
    for relay_line in lines:
        relay_line.close()
    server.close()
