"""Compares authenticated connections with plain sockets: processor time per MB of copies, connection and request.

Sender and receiver run in one process, so that its processor time counts both. Runs alternate between plain sockets and
connections of `base/connection`; the median of the runs counts.
"""

from __future__ import annotations

import datetime
import os
import queue
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from varuna_capslog.base.connection import AuthenticatedListener, Connection, dial
from varuna_capslog.base.processes import logged
from varuna_capslog.base.secret import Secret
from varuna_capslog.elastic.store.opening import OwnMembershipStore, StoreServer

RUNS = 9
SIZE = 64 << 20
DATA = os.urandom(SIZE)


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


def beside(send: Callable[[], None], read: Callable[[], None]) -> float:
    """Return the processor seconds of sending and reading."""
    began = time.process_time()
    thread = threading.Thread(target=send)
    thread.start()
    read()
    thread.join()
    return time.process_time() - began


def plain() -> float:
    client, accepted = pair()
    room = memoryview(bytearray(SIZE))

    def read() -> None:
        view = room
        while view:
            view = view[accepted.recv_into(view, 0, socket.MSG_WAITALL) :]

    return beside(lambda: client.sendall(DATA), read)


def trusted() -> float:
    client, accepted = pair()
    sender, receiver = Connection(client, b"a" * 32, b"b" * 32), Connection(accepted, b"b" * 32, b"a" * 32)
    room = memoryview(bytearray(SIZE))
    return beside(lambda: sender.send([DATA]), lambda: receiver.read_into(room))


def median(measure: Callable[[], float], scale: float) -> float:
    return statistics.median(measure() for _ in range(RUNS)) * scale


def each(count: int, call: Callable[[], object]) -> float:
    began = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - began) / count


def main() -> None:
    both = [(plain(), trusted()) for _ in range(RUNS)]
    for name, number in (("plain sockets", 0), ("connections with codes", 1)):
        seconds = statistics.median(run[number] for run in both)
        print(f"{name}: {1e3 * seconds / (SIZE >> 20):.2f} ms of processor time for 1 MiB sent and received")
    key, inside = b"k" * 32, queue.SimpleQueue()
    listener = socket.create_server(("127.0.0.1", 0))
    authenticator = AuthenticatedListener(listener, key, inside.put, logged)
    port = listener.getsockname()[1]

    def open_one() -> None:
        dial("127.0.0.1", port, key, 5.0).close()
        inside.get().close()

    print(f"a connection, opened by both sides: {median(lambda: each(200, open_one), 1e3):.2f} ms of processor time")
    authenticator.close()
    secret = Secret.new()
    server = StoreServer(secret)
    own_store = OwnMembershipStore("127.0.0.1", server.port, secret)
    timeout = datetime.timedelta(seconds=10)
    torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    own_store.put("a", "1")
    torchs.set("a", "1")
    rows = [(each(500, lambda: torchs.get("a")), each(500, lambda: own_store.get("a"))) for _ in range(RUNS)]
    for name, number in (("torch's TCPStore", 0), ("the run's own store", 1)):
        seconds = statistics.median(row[number] for row in rows)
        print(f"a question to {name}: {1e6 * seconds:.0f} us of processor time, client and server")
    own_store.close()
    server.close()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
