"""An unauthenticated client that reaches every port of a run and sends any bytes, for tests and `benchmarks/stranger`.

It knows no secret, except where it plays a member of another run. It only counts the answers: a run's own socket must
answer every client with its challenge, and with nothing else.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from varuna_capslog.base.connection import CHALLENGE_BYTES, Connection, dial, proof
from varuna_capslog.base.processes import OwnedThread, logged
from varuna_capslog.base.secret import Secret

__all__ = ["KINDS", "Answers", "Stranger", "addresses", "recorded"]

_SECONDS = 5.0
_LISTEN = "0A"


@dataclass
class Answers:
    """Counts of the answers to one kind of message.

    Attributes:
        sent: messages sent.
        challenges: messages answered with a challenge alone.
        refused: connections that could not be made, or ended before an answer.
        more: messages that were answered with more than a challenge.
    """

    sent: int = 0
    challenges: int = 0
    refused: int = 0
    more: int = 0


class Stranger:
    """Client that sends messages to ports of this machine without knowing the run's secret.

    Args:
        seed: seed of its random messages.
        records: bytes that a client with the secret once sent to each port.
        seconds: time to wait for an answer; a socket of gloo's gives none.
    """

    def __init__(self, seed: int, records: Mapping[int, bytes], seconds: float = _SECONDS) -> None:
        self._dice, self._records, self._seconds = random.Random(seed), dict(records), seconds

    def speak(self, kind: str, port: int, heard: Answers) -> None:
        """Connect once, send a message of this kind, and wait for the other side to close."""
        heard.sent += 1
        try:
            with socket.create_connection(("127.0.0.1", port), _SECONDS) as line:
                line.settimeout(self._seconds)
                server_hello = _until(line, CHALLENGE_BYTES)
                with contextlib.suppress(OSError):
                    line.sendall(KINDS[kind](self._dice, self._records.get(port, b""), server_hello))
                    line.shutdown(socket.SHUT_WR)
                more = _until(line, 1)
        except OSError:
            heard.refused += 1
            return
        heard.challenges += len(server_hello) == CHALLENGE_BYTES and not more
        heard.more += bool(more)

    def crowd(self, port: int, count: int, heard: Answers) -> list[socket.socket]:
        """Open connections that send nothing; the caller closes them."""
        lines = []
        for _ in range(count):
            heard.sent += 1
            line = socket.socket()
            line.settimeout(_SECONDS)
            try:
                line.connect(("127.0.0.1", port))
            except OSError:
                heard.refused += 1
                line.close()
            else:
                lines.append(line)
        return lines


def _garbage(dice: random.Random, record: bytes, server_hello: bytes) -> bytes:
    return dice.randbytes(dice.randrange(1, 4096))


def _replayed(dice: random.Random, record: bytes, server_hello: bytes) -> bytes:
    return record


def _truncated(dice: random.Random, record: bytes, server_hello: bytes) -> bytes:
    return record[: dice.randrange(1, max(2, len(record)))]


def _long(dice: random.Random, record: bytes, server_hello: bytes) -> bytes:
    size = dice.choice([(1 << 20) + 1, (1 << 31) - 1, (1 << 32) - 1])
    return dice.choice([b"", record[:64]]) + struct.pack("!IQ", size, 1 << 62) + dice.randbytes(256)


def _own_secret(dice: random.Random, record: bytes, server_hello: bytes) -> bytes:
    """Return a proof that fits this challenge, by a member of another run."""
    nonce = dice.randbytes(32)
    return nonce + proof(Secret.new().key("store"), server_hello, nonce) + record[64:]


KINDS: Mapping[str, Callable[[random.Random, bytes, bytes], bytes]] = {
    "garbage": _garbage,
    "replayed": _replayed,
    "truncated": _truncated,
    "too long": _long,
    "of another run": _own_secret,
}
"""What it says, by (dice, what a friend once said to this port, the challenge that it heard)."""


def _until(line: socket.socket, size: int) -> bytes:
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < size:
            part = line.recv(size - len(received))
            if not part:
                break
            received += part
    return received


def addresses(pids: Iterable[int]) -> dict[int, str]:
    """Ports at which these processes listen, each with its address, such as 127.0.0.1 or 0.0.0.0 (Linux)."""
    sockets: dict[str, tuple[int, str]] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                columns = row.split()
                if columns[3] == _LISTEN:
                    place, _, port = columns[1].rpartition(":")
                    host = socket.inet_ntoa(bytes.fromhex(place)[::-1]) if table == "tcp" else place
                    sockets[f"socket:[{columns[9]}]"] = int(port, 16), host
    address_of_port = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError, KeyError):
                    port_and_host = sockets[os.readlink(f"/proc/{pid}/fd/{name}")]
                    address_of_port[port_and_host[0]] = port_and_host[1]
    return address_of_port


def recorded(port: int, key: bytes, say: Callable[[Connection], None]) -> bytes:
    """The bytes that somebody with the key sends to a port, as the network between them sees them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        seen: list[bytes] = []
        thread = OwnedThread("tap", _tap, logged, listener, port, seen)
        thread.start()
        connection = dial("127.0.0.1", listener.getsockname()[1], key, _SECONDS)
        say(connection)
        connection.shut_down()
        thread.join(_SECONDS)
        connection.close()
    return b"".join(seen)


def _tap(listener: socket.socket, port: int, seen: list[bytes]) -> None:
    near, _ = listener.accept()
    with near, socket.create_connection(("127.0.0.1", port), _SECONDS) as far:
        back = OwnedThread("tap-back", _carry, logged, far, near, [])
        back.start()
        _carry(near, far, seen)
        back.join(_SECONDS)


def _carry(source: socket.socket, target: socket.socket, seen: list[bytes]) -> None:
    for data in _pieces(source):
        seen.append(data)
        with contextlib.suppress(OSError):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _pieces(source: socket.socket) -> Iterator[bytes]:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            yield data
