"""The gateway's answers, as odd as a proxy may make them."""

from __future__ import annotations

import io
import socket
from typing import Any

import pytest

from varuna_capslog.elastic.store.etcd_gateway import EtcdWatch


class Watched:
    """A connection whose answer to a watch is these lines."""

    def __init__(self, *lines: bytes) -> None:
        self.sock, _ = socket.socketpair()
        self.lines, self.closed = io.BytesIO(b"".join(line + b"\n" for line in lines)), False

    def request(self, *_: Any) -> None:
        """Asks for the watch."""

    def getresponse(self) -> io.BytesIO:
        return self.lines

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    "line", [b"[]", b"7", b"no json", b'{"result": []}', b'{"result": {"events": [7]}}', b"[" * 9999]
)
def test_a_watch_ends_with_an_answer_that_is_none(line: bytes) -> None:
    """A `[]` in a watch ended its thread without a word: the follower of the log never heard anything more."""
    connection: Any = Watched(b'{"result": {"created": true}}', line)
    watch = EtcdWatch(connection, "a", "b")
    assert watch.next(10.0) is None
    assert connection.closed
