"""Compares authenticated connections with plain sockets and TLS: processor time per MB of copies, connection, request.

Sender and receiver run in one process, so that its processor time counts both. Runs alternate between plain sockets,
connections of `base/connection` and mutual TLS of Python's `ssl`; the median of the runs counts. Then both ends send
and read at once, by one thread each, with a limit of time as the run's connections have; it counts runs that failed.
"""

from __future__ import annotations

import datetime
import os
import queue
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from varuna_capslog.base.connection import AuthenticatedListener, Connection, dial
from varuna_capslog.base.processes import logged
from varuna_capslog.base.secret import Secret
from varuna_capslog.elastic.store.opening import OwnMembershipStore, StoreServer

RUNS = 9
SIZE = 64 << 20
DATA = os.urandom(SIZE)
LIMIT = 5.0
"""Seconds that one thread may wait while both ends send and read."""
TRIES = 30


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


def fill(room: memoryview, line: socket.socket, flags: int = 0) -> None:
    """Read until `room` is full. Raises EOFError where the stream ends before."""
    while room:
        count = line.recv_into(room, 0, flags)
        if count == 0:
            raise EOFError("the other side has not ended")
        room = room[count:]


def plain() -> float:
    client, accepted = pair()
    room = memoryview(bytearray(SIZE))
    return beside(lambda: client.sendall(DATA), lambda: fill(room, accepted, socket.MSG_WAITALL))


def trusted() -> float:
    client, accepted = pair()
    sender, receiver = Connection(client, b"a" * 32, b"b" * 32), Connection(accepted, b"b" * 32, b"a" * 32)
    room = memoryview(bytearray(SIZE))
    return beside(lambda: sender.send([DATA]), lambda: receiver.read_into(room))


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a client and a server that trust one certificate, which both have."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "run")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    ends = []
    with tempfile.NamedTemporaryFile() as file:
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        file.write(private + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        file.flush()
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            context = ssl.SSLContext(protocol)
            context.load_cert_chain(file.name)
            context.load_verify_locations(Path(file.name))
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            ends.append(context)
    return ends[0], ends[1]


def tls_pair() -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Return both ends of a connection after the handshake of mutual TLS."""
    (client, accepted), (here, there) = pair(), contexts()
    wrapped: list[ssl.SSLSocket] = []
    thread = threading.Thread(target=lambda: wrapped.append(there.wrap_socket(accepted, server_side=True)))
    thread.start()
    dialled = here.wrap_socket(client)
    thread.join()
    return dialled, wrapped[0]


def tls() -> float:
    client, accepted = tls_pair()
    room = memoryview(bytearray(SIZE))
    return beside(lambda: client.sendall(DATA), lambda: fill(room, accepted))


def fails_both_ways(encrypted: bool) -> bool:
    """Let both ends send and read `SIZE` bytes at once; return whether any of the four threads met an error."""
    failed: list[BaseException] = []

    def attempt(call: Callable[[], object]) -> None:
        try:
            call()
        except (OSError, EOFError) as error:
            failed.append(error)

    calls: list[Callable[[], object]] = []
    if encrypted:
        for line in tls_pair():
            line.settimeout(LIMIT)
            room = memoryview(bytearray(SIZE))
            calls += [lambda line=line: line.sendall(DATA), lambda line=line, room=room: fill(room, line)]
    else:
        client, accepted = pair()
        for end in (Connection(client, b"a" * 32, b"b" * 32), Connection(accepted, b"b" * 32, b"a" * 32)):
            end.until = time.monotonic() + LIMIT
            room = memoryview(bytearray(SIZE))
            calls += [lambda end=end: end.send([DATA]), lambda end=end, room=room: end.read_into(room)]
    threads = [threading.Thread(target=attempt, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return bool(failed)


def median(measure: Callable[[], float], scale: float) -> float:
    return statistics.median(measure() for _ in range(RUNS)) * scale


def each(count: int, call: Callable[[], object]) -> float:
    began = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - began) / count


def main() -> None:
    all_three = [(plain(), trusted(), tls()) for _ in range(RUNS)]
    for number, name in enumerate(("plain sockets", "connections with codes", "mutual TLS")):
        seconds = statistics.median(run[number] for run in all_three)
        print(f"{name}: {1e3 * seconds / (SIZE >> 20):.2f} ms of processor time for 1 MiB sent and received")
    for name, encrypted in (("connections with codes", False), ("mutual TLS", True)):
        failed = sum(fails_both_ways(encrypted) for _ in range(TRIES))
        print(f"{name}, both ways at once: {failed} of {TRIES} runs failed")
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
