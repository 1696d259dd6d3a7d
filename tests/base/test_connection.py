"""Authenticated connections: bytes arrive as they were sent, in order, or the connection ends."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import struct
import threading
import time

import pytest

from varuna_capslog.base import connection as trust
from varuna_capslog.base.connection import (
    MAX_RECORD,
    MOST_UNPROVED,
    AuthenticatedListener,
    Connection,
    Forged,
    NotTrusted,
    check_reply,
    dial,
    server_hello,
)
from varuna_capslog.base.errors import CapslogError

KEY, OTHER = b"k" * 32, b"o" * 32


def joined() -> tuple[Connection, socket.socket, Connection, socket.socket]:
    """Return two ends with the keys of one handshake, and their sockets."""
    listener = socket.create_server(("127.0.0.1", 0))
    first_socket = socket.create_connection(listener.getsockname())
    second_socket, _ = listener.accept()
    listener.close()
    return (
        Connection(first_socket, b"1" * 32, b"2" * 32),
        first_socket,
        Connection(second_socket, b"2" * 32, b"1" * 32),
        second_socket,
    )


class Served:
    """A listener and the connections that it accepted."""

    def __init__(self, key=KEY):
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = listener.getsockname()[1]
        self.inside: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self.ends: list[CapslogError] = []
        self.listener = AuthenticatedListener(listener, key, self.inside.put, self.ends.append)

    def knock(self):
        return socket.create_connection(("127.0.0.1", self.port), 5.0)


@pytest.fixture
def served():
    server = Served()
    yield server
    server.listener.close()


def ended(line: socket.socket) -> bool:
    """Return True if the peer closes without sending another byte."""
    line.settimeout(5.0)
    try:
        return line.recv(1) == b""
    except ConnectionResetError:  # it had not read all that was sent
        return True


def test_bytes_of_all_sizes_arrive_in_order():
    sender, _, receiver, _ = joined()
    dice = random.Random(0)
    sizes = [
        1,
        7,
        MAX_RECORD - 1,
        2,
        MAX_RECORD,
        MAX_RECORD + 1,
        3 * MAX_RECORD + 5,
        *(dice.randrange(1, 99) for _ in range(900)),
    ]
    parts = [dice.randbytes(size) for size in sizes]

    def send():
        sender.send(parts[:7])
        sender.send(parts[7:])
        sender.send_message(b"end", [b"more"])

    thread = threading.Thread(target=send)
    thread.start()
    sent = b"".join(parts)
    received = b""
    while len(received) < len(sent):  # in other pieces than they were sent in
        received += receiver.read(min(dice.choice([1, 50, 99_991, 2_000_000]), len(sent) - len(received)))
    assert received == sent
    assert receiver.read_message(3) == b"end"
    assert receiver.read(4) == b"more"
    thread.join()


def recorded(count: int) -> list[bytes]:
    """Return the records of `count` messages, as they travel."""
    sender, _, _, below = joined()
    records = []
    for number in range(count):
        sender.send([b"message %d" % number])
        records.append(below.recv(1 << 16))
    return records


def heard(*sent: bytes) -> list[bytes]:
    """Return the messages that the receiver of these bytes reads before the connection ends with an error."""
    _, below, receiver, _ = joined()
    below.sendall(b"".join(sent))
    below.shutdown(socket.SHUT_WR)
    messages = []
    try:
        while True:
            messages.append(bytes(receiver.read(9)))
    except (EOFError, Forged):
        return messages


def test_a_record_that_is_changed_repeated_moved_or_left_out_ends_the_connection():
    first, second, third = records = recorded(3)
    assert heard(*records) == [b"message 0", b"message 1", b"message 2"]
    assert heard(first, first) == [b"message 0"]
    assert heard(second, first) == []
    assert heard(first, third) == [b"message 0"]
    assert heard(first, second[:-1]) == [b"message 0"]
    for place in range(len(first)):
        changed = bytearray(first)
        changed[place] ^= 1
        assert heard(bytes(changed), second) == [], f"byte {place}"


@pytest.mark.parametrize("size", [0, MAX_RECORD + 1, (1 << 32) - 1])
def test_a_length_beyond_the_bound_is_refused_before_anything_is_read(size):
    _, below, receiver, _ = joined()
    below.sendall(struct.pack("!I", size))
    with pytest.raises(Forged, match=f"a record of {size} bytes"):
        receiver.read(1 << 21)


def test_a_message_beyond_what_its_reader_expects_is_refused():
    sender, _, receiver, _ = joined()
    sender.send_message(b"x" * 101)
    with pytest.raises(Forged, match="a message of 101 bytes"):
        receiver.read_message(100)


def test_records_of_another_connection_with_the_same_secret_are_refused(served):
    """The bytes may be recorded from a member of an old generation."""
    first = dial("127.0.0.1", served.port, KEY, 5.0)
    served.inside.get(timeout=20)
    second = dial("127.0.0.1", served.port, KEY, 5.0)
    inside = served.inside.get(timeout=20)
    line, first._line = first._line, second._line  # the first connection's bytes travel on the second
    first.send([b"hello"])
    with pytest.raises(Forged):
        inside.read(5)
    line.close()


def test_nobody_is_let_in_or_answered_without_the_key(served):
    with pytest.raises(NotTrusted, match="it refuses this run's secret"):
        dial("127.0.0.1", served.port, OTHER, 5.0)
    for greeting in (b"", b"x", b"GET / HTTP/1.1\r\n\r\n" * 9, bytes(64), server_hello() + bytes(24)):
        with served.knock() as line:
            nonce = b""
            while len(nonce) < trust.CHALLENGE_BYTES:
                nonce += line.recv(trust.CHALLENGE_BYTES - len(nonce))
            with contextlib.suppress(OSError):  # it may have been dismissed already
                line.sendall(greeting)
                line.shutdown(socket.SHUT_WR)
            assert ended(line)
    assert served.inside.empty()
    friend = dial("127.0.0.1", served.port, KEY, 5.0)
    served.inside.get(timeout=20).send([b"welcome"])
    assert friend.read(7) == b"welcome"


def test_a_proof_that_was_seen_before_opens_nothing(served):
    """An eavesdropper replays the proof that an authenticated caller sent."""
    with served.knock() as line:
        nonce = line.recv(trust.CHALLENGE_BYTES, socket.MSG_WAITALL)
        own_nonce = bytes(32)
        proof = own_nonce + trust.proof(KEY, nonce, own_nonce)
        assert check_reply(KEY, nonce, proof) is not None
        line.sendall(proof)
        served.inside.get(timeout=20)
    with served.knock() as line:
        line.recv(trust.CHALLENGE_BYTES, socket.MSG_WAITALL)
        line.sendall(proof)
        assert ended(line)
    assert served.inside.empty()


def test_whoever_cannot_prove_it_is_no_server():
    """A stranger at the server's address may even send the caller's own code back."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend():
        for answer in (lambda proof: proof[32:], lambda proof: bytes(32), None):
            line, _ = listener.accept()
            line.sendall(server_hello() if answer else b"SSH-2.0-something that is not ours at all")
            if answer:
                line.sendall(answer(line.recv(64, socket.MSG_WAITALL)))
            line.close()

    threading.Thread(target=pretend, daemon=True).start()
    port = listener.getsockname()[1]
    for why in ("does not know", "does not know", "another program"):
        with pytest.raises(NotTrusted, match=why):
            dial("127.0.0.1", port, KEY, 5.0)
    listener.close()


def test_a_crowd_of_strangers_costs_no_thread_and_few_descriptors_and_friends_come_in(served):
    threads = threading.active_count()
    strangers = [served.knock() for _ in range(400)]
    friend = dial("127.0.0.1", served.port, KEY, 5.0)
    served.inside.get(timeout=20).send([b"welcome"])
    assert friend.read(7) == b"welcome"
    assert threading.active_count() == threads
    assert len(served.listener._unproved) <= MOST_UNPROVED
    for line in strangers[:100]:
        line.settimeout(5.0)
        with contextlib.suppress(ConnectionResetError):
            assert len(line.recv(trust.CHALLENGE_BYTES, socket.MSG_WAITALL)) == trust.CHALLENGE_BYTES
        assert ended(line), "the oldest make room"
    for line in strangers:
        line.close()


def test_a_stranger_that_says_nothing_is_dismissed(monkeypatch):
    monkeypatch.setattr("varuna_capslog.base.connection.HANDSHAKE_SECONDS", 0.1)
    served = Served()
    with served.knock() as line:
        line.settimeout(5.0)
        line.recv(trust.CHALLENGE_BYTES, socket.MSG_WAITALL)
        assert ended(line)
    served.listener.close()


def test_a_listener_that_is_closed_in_the_middle_is_tried_again(monkeypatch):
    """A full listener closes the oldest connection, which may belong to a trusted caller."""
    served, dismissed = Served(), []
    accept = AuthenticatedListener._accept

    def crowded(listener):
        accept(listener)
        if len(dismissed) < 2 and listener._unproved:
            dismissed.append(1)
            listener._dismiss(next(iter(listener._unproved)))

    monkeypatch.setattr(AuthenticatedListener, "_accept", crowded)
    dial("127.0.0.1", served.port, KEY, 5.0)
    served.inside.get(timeout=20)
    assert len(dismissed) == 2
    served.listener.close()


def refused(connection):
    raise CapslogError("can't start new thread")


def test_a_caller_for_whom_there_is_no_thread_is_turned_away_and_the_next_one_comes_in(caplog):
    """A single "can't start new thread" ended the listener's thread: every later caller of the store was refused."""
    served = Served()
    served.listener._admitted = refused
    first = dial("127.0.0.1", served.port, KEY, 5.0)
    assert ended(first._line)
    assert "a connection to door is closed: CapslogError: can't start new thread" in caplog.text
    served.listener._admitted = served.inside.put
    dial("127.0.0.1", served.port, KEY, 5.0)
    served.inside.get(timeout=20)
    assert served.ends == []
    served.listener.close()


def test_a_listener_that_fails_itself_says_so_and_is_closed(monkeypatch):
    served = Served()
    monkeypatch.setattr(served.listener, "_accept", lambda: {}["nobody expected this"])
    with contextlib.suppress(ConnectionResetError):  # the listener may be closed before the knock is answered
        served.knock()
    served.listener._thread.join(5)
    assert str(served.ends[0]).startswith("the thread door failed with KeyError: 'nobody expected this'")
    with pytest.raises((ConnectionRefusedError, ConnectionResetError)):
        served.knock()


def test_waiting_is_bounded():
    ends = joined()
    receiver = ends[2]
    receiver.until = time.monotonic() + 0.05
    with pytest.raises(TimeoutError):
        receiver.read(1)
