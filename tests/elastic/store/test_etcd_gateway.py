"""Invalid answers of the gateway, as a proxy may send them."""

from __future__ import annotations

import io
import socket
from typing import Any

import pytest

from varuna_capslog.elastic.store.etcd_gateway import EtcdWatch


class Watched:
    """Connection that answers a watch with these lines."""

    def __init__(self, *lines: bytes) -> None:
        self.sock, _ = socket.socketpair()
        self.lines, self.closed = io.BytesIO(b"".join(line + b"\n" for line in lines)), False

    def request(self, *_: Any) -> None:
        """Accept the request for a watch."""

    def getresponse(self) -> io.BytesIO:
        return self.lines

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    "line", [b"[]", b"7", b"no json", b'{"result": []}', b'{"result": {"events": [7]}}', b"[" * 9999]
)
def test_a_watch_ends_with_an_answer_that_is_none(line: bytes) -> None:
    """Regression: a `[]` in a watch silently ended its thread: the follower of the log received nothing more."""
    connection: Any = Watched(b'{"result": {"created": true}}', line)
    watch = EtcdWatch(connection, "a", "b")
    assert watch.next(10.0) is None
    assert connection.closed
