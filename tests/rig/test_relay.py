"""The relay: what it carries, and what a cut, a half-open link and a delay are to those who talk through it."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.store.torch_store import serve_store
from varuna_capslog.engine.communicator import connect_group
from varuna_capslog.rig.relay import Line, Relay
from varuna_capslog.rig.relayed import VARIABLE, RelayedStore, opener, rewrite


@pytest.fixture(scope="module")
def relay():
    found = Relay()
    yield found
    found.close()


@pytest.fixture
def line(relay):
    found = Line(relay.address)
    yield found
    found.close()


class Pair:
    """A connection from host `left` to a listener of host `right`, through the relay."""

    def __init__(self, line, left, right):
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        line.register(right, address)
        assert line.through(right, address) == address  # on its own host nobody needs the relay
        self.given = line.through(left, address)
        assert self.given != address
        host, _, port = self.given.rpartition(":")
        self.left = socket.create_connection((host, int(port)), 5.0)
        listener.settimeout(5.0)
        self.right, _ = listener.accept()
        listener.close()
        for end in (self.left, self.right):
            end.settimeout(5.0)

    def close(self):
        self.left.close()
        self.right.close()


def silent(end, seconds=0.15):
    end.settimeout(seconds)
    try:
        end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(5.0)
    return False


def test_bytes_and_ends_of_connections_pass_both_ways(line):
    pair = Pair(line, "a", "b")
    big = bytes(range(256)) * 4096
    threading.Thread(target=pair.left.sendall, args=(big,)).start()
    got = b""
    while len(got) < len(big):
        got += pair.right.recv(1 << 16)
    assert got == big
    pair.right.sendall(b"answer")
    assert pair.left.recv(100) == b"answer"
    pair.right.close()
    assert pair.left.recv(1) == b""
    pair.close()


def test_a_cut_hides_bytes_and_ends_until_it_is_healed(line):
    pair = Pair(line, "a", "c")
    ways = {("a", "c"), ("c", "a")}
    line.disturb(ways)
    pair.left.sendall(b"x")
    assert silent(pair.right)
    pair.right.close()
    assert silent(pair.left)
    line.heal(ways)
    assert pair.left.recv(1) == b""  # it hears of the end now
    pair.close()


def test_a_half_open_link_carries_one_way_only(line):
    pair = Pair(line, "a", "d")
    line.disturb({("a", "d")})
    pair.left.sendall(b"x")
    assert silent(pair.right)
    pair.right.sendall(b"y")
    assert pair.left.recv(1) == b"y"
    line.heal({("a", "d")})
    assert pair.right.recv(1) == b"x"
    pair.close()


def test_a_delay_holds_up_without_reordering(line):
    pair = Pair(line, "a", "e")
    line.disturb({("a", "e")}, 0.15)
    began = time.monotonic()
    pair.left.sendall(b"1")
    assert pair.right.recv(1) == b"1"
    assert time.monotonic() - began >= 0.15
    line.heal({("a", "e")})
    pair.left.sendall(b"2")
    assert pair.right.recv(1) == b"2"
    pair.close()


def test_others_are_not_disturbed(line):
    pair = Pair(line, "f", "g")
    line.disturb({("f", "h"), ("g", "f")})
    pair.left.sendall(b"x")
    assert pair.right.recv(1) == b"x"
    line.heal({("f", "h"), ("g", "f")})
    pair.close()


def test_wrong_orders_are_refused_and_a_lost_relay_is_said(line):
    with pytest.raises(CapslogError, match="refuses"):
        line.ask(do="dance")
    assert line.through("a", "127.0.0.1:1") == "127.0.0.1:1"  # nobody registered: left alone
    other = Relay()
    lost = Line(other.address)
    other.close()
    with pytest.raises(CapslogError, match="relay"):
        lost.register("a", "127.0.0.1:1")
    lost.close()


def test_a_blob_keeps_all_but_its_port():
    sockaddr = socket.AF_INET.to_bytes(2, "little") + (4711).to_bytes(2, "big") + socket.inet_aton("127.0.0.1")
    blob = b"\x7f\x00\x00\x01head" + sockaddr + b"tail"  # the address alone, without family and port, is none
    changed = rewrite(blob, "127.0.0.1:4711", "127.0.0.1:4712")
    assert changed == blob.replace((4711).to_bytes(2, "big"), (4712).to_bytes(2, "big"))


def test_a_host_whose_supervisor_was_started_again_is_cut_by_its_machine(line, relay, monkeypatch):
    """The second supervisor of machine `again` is called again.2; cuts of `again` once did not reach its workers."""
    monkeypatch.setenv("CAPSLOG_HOST", "again.2")
    monkeypatch.setenv(VARIABLE, f"again@{relay.address}")
    server, port = serve_store()
    opened = opener()
    assert opened is not None
    store = opened(f"127.0.0.1:{port}", server.identity)
    store.put("address/again.2-1", "127.0.0.1:4713")
    assert line.through("again", "127.0.0.1:4713") == "127.0.0.1:4713"
    assert line.through("other", "127.0.0.1:4713") != "127.0.0.1:4713"
    store.close()
    server.close()


def test_gloo_groups_of_two_hosts_are_cut_with_their_network(line, relay):
    """If gloo ever hands its addresses round in another way, this sum arrives in spite of the cut."""
    server, port = serve_store()
    groups, lines = {}, []

    def join(rank):
        store = RelayedStore("127.0.0.1", port, server.identity)
        lines.append(Line(relay.address))
        store.relay(lines[-1], f"gloo{rank}")
        groups[rank] = (store, connect_group(store.rendezvous(), "try", rank, 2, 5.0))

    def together(work):
        found = {}
        threads = [threading.Thread(target=lambda rank=rank: found.update({rank: work(rank)})) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)
        return found

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
    for one in lines:
        one.close()
    server.close()
