"""Measures a network of two shaped namespaces; a program that `test_namespaces` begins in a namespace of its own.

Prints a line of JSON: seconds of the median round trip, bytes per second of a transfer, the packet counts, and whether
a way that was cut carried anything before and after it was healed.
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
    """Call `do` in a machine's namespace and return its result; sockets stay in the namespace where they were made."""
    returned: list[Found] = []

    def work() -> None:
        join(spaces.path(name))
        returned.append(do())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return returned[0]


def round_trip(first: socket.socket, second: socket.socket) -> float:
    began = time.monotonic()
    for sender, receiver in ((first, second), (second, first)):
        sender.sendall(b"x")
        receiver.recv(1)
    return time.monotonic() - began


def transfer(source: socket.socket, target: socket.socket) -> float:
    def receive() -> None:
        missing = SIZE
        while missing:
            missing -= len(target.recv(1 << 16))
        target.sendall(b"x")

    thread = threading.Thread(target=receive)
    began = time.monotonic()
    thread.start()
    source.sendall(bytes(SIZE))
    source.recv(1)
    thread.join()
    return SIZE / (time.monotonic() - began)


def main(words: list[str]) -> None:
    spaces = Namespaces(["a", "b"], "store", LinkShape.parse(*(None if word == "-" else word for word in words)))
    address = spaces.address("b")
    listener = inside(spaces, "b", lambda: socket.create_server((address, 0)))
    port = listener.getsockname()[1]
    source = inside(spaces, "a", lambda: socket.create_connection((address, port), 20.0))
    target, _ = listener.accept()
    for connection in (source, target):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    measurements = {"round_trip": statistics.median(round_trip(source, target) for _ in range(ROUNDS))}
    measurements["bytes_per_second"] = transfer(source, target)
    spaces.disturb([("a", "b")])
    source.sendall(b"x")
    target.settimeout(0.3)
    try:
        measurements["passed_a_cut"] = bool(target.recv(1))
    except TimeoutError:
        measurements["passed_a_cut"] = False
    spaces.heal([("a", "b")])
    target.settimeout(20.0)
    measurements["passed_later"] = target.recv(1) == b"x"
    sys.stdout.write(json.dumps(measurements | spaces.counts()) + "\n")
    spaces.close()


if __name__ == "__main__":
    main(sys.argv[1:])
