"""Measures a network of two shaped namespaces; a program that `test_namespaces` begins in a namespace of its own.

Prints one line of JSON: seconds of the median round trip, bytes per second of a transfer, what became of the packets,
and whether a way that was cut carried anything before and after it was healed.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tests.rig.machines.links import LinkShape
from tests.rig.machines.tun import join
from tests.rig.namespaces import Namespaces

Found = TypeVar("Found")
ROUNDS, SIZE = 15, 4_000_000


def inside(spaces: Namespaces, name: str, do: Callable[[], Found]) -> Found:
    """What `do` returns in a machine's namespace; sockets stay in the one where they were made."""
    found: list[Found] = []

    def work() -> None:
        join(spaces.path(name))
        found.append(do())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def round_trip(left: socket.socket, right: socket.socket) -> float:
    began = time.monotonic()
    for sender, receiver in ((left, right), (right, left)):
        sender.sendall(b"x")
        receiver.recv(1)
    return time.monotonic() - began


def transfer(left: socket.socket, right: socket.socket) -> float:
    def receive() -> None:
        missing = SIZE
        while missing:
            missing -= len(right.recv(1 << 16))
        right.sendall(b"x")

    thread = threading.Thread(target=receive)
    began = time.monotonic()
    thread.start()
    left.sendall(bytes(SIZE))
    left.recv(1)
    thread.join()
    return SIZE / (time.monotonic() - began)


def main(words: list[str]) -> None:
    spaces = Namespaces(["a", "b"], "store", LinkShape.parse(*(None if word == "-" else word for word in words)))
    address = spaces.address("b")
    listener = inside(spaces, "b", lambda: socket.create_server((address, 0)))
    port = listener.getsockname()[1]
    left = inside(spaces, "a", lambda: socket.create_connection((address, port), 20.0))
    right, _ = listener.accept()
    for end in (left, right):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found = {"round_trip": statistics.median(round_trip(left, right) for _ in range(ROUNDS))}
    found["bytes_per_second"] = transfer(left, right)
    spaces.disturb([("a", "b")])
    left.sendall(b"x")
    right.settimeout(0.3)
    try:
        found["passed_a_cut"] = bool(right.recv(1))
    except TimeoutError:
        found["passed_a_cut"] = False
    spaces.heal([("a", "b")])
    right.settimeout(20.0)
    found["passed_later"] = right.recv(1) == b"x"
    sys.stdout.write(json.dumps(found | spaces.counts()) + "\n")
    spaces.close()


if __name__ == "__main__":
    main(sys.argv[1:])
