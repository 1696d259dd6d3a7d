"""The relay: traffic that it carries, and the effect of a cut, a half-open link and a delay on its clients."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from tests.rig.relay import Line, Relay
from tests.secret import SECRET
from varuna_capslog.base.errors import CapslogError


class Pair:
    """A connection from host `left` to a listener of host `right`, through the relay."""

    def __init__(self, line, source, target):
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        line.register(target, address)
        assert line.through(target, address) == address  # on its own host nobody needs the relay
        self.given = line.through(source, address)
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
    second_relay = Relay(SECRET)
    lost = Line(second_relay.address, SECRET)
    second_relay.close()
    with pytest.raises(CapslogError, match="relay"):
        lost.register("a", "127.0.0.1:1")
    lost.close()
