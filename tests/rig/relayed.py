"""Makes a member's connections go through the relay: replaces the addresses that it reads from the store.

These are the addresses of the other members' listeners and of the sockets of every gloo group. Gloo sends addresses as
blobs that hold a `sockaddr`, which is overwritten there. No other code of a member knows of the relay.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from tests.rig.relay import Line
from varuna_capslog.base.secret import Secret
from varuna_capslog.elastic.store import opening as store

__all__ = ["VARIABLE", "RelayedStore", "opener", "rewrite"]

VARIABLE = "CAPSLOG_RELAY"
"""`<host>@<address>`: as whom the relay knows this machine, whatever its supervisor is called by now, and where it
takes orders. Without this variable nothing is exchanged."""

_KEPT = 16


def opener() -> Callable[[str, Secret, str | None], store.MembershipStore]:
    """Opens the store so that the other hosts are reached through the relay that the environment names, if any."""
    host, _, relay = os.environ.get(VARIABLE, "").partition("@")
    if not relay:
        return store.open_store

    def opened(address: str, secret: Secret, identity: str | None = None) -> RelayedStore:
        line = Line(relay, secret)
        where, _, port = address.rpartition(":")
        store_client = RelayedStore(where, int(port), secret, identity)
        store_client.relay(line, host)
        return store_client

    return opened


class RelayedStore(store.OwnMembershipStore):
    """A store whose addresses lead to the relay."""

    def relay(self, line: Line, host: str) -> None:
        """Set the relay, and the host of this member."""
        self._relay, self._relay_host = line, host
        self._kept: deque[dist.Store] = deque(maxlen=_KEPT)

    def put(self, key: str, value: str) -> None:
        if key.startswith("address/"):
            self._relay.register(self._relay_host, value)
        super().put(key, value)

    def get(self, key: str, wait_seconds: float = 0.0) -> str | None:
        value = super().get(key, wait_seconds)
        if value is None or not key.startswith("address/"):
            return value
        return self._relay.through(self._relay_host, value)

    def rendezvous(self) -> dist.Store:
        exchanging_store = _Exchanging(super().rendezvous(), self._relay, self._relay_host)
        self._kept.append(exchanging_store)  # C++ holds only its own half
        return exchanging_store


class _Exchanging(dist.Store):
    """Rendezvous store of a gloo group: registers the rank's own address and replaces those of the others."""

    def __init__(self, inner: dist.Store, line: Line, host: str) -> None:
        super().__init__()
        self._inner, self._line, self._host = inner, line, host
        self._port = 0

    def set(self, key: str, value: Any) -> None:
        data = value.encode("latin-1") if isinstance(value, str) else bytes(value)
        address = _address_in(data)
        if address is not None:
            self._line.register(self._host, address)
            self._port = int(address.rpartition(":")[2])
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        data = bytes(self._inner.get(key))
        address = _address_in(data)
        if address is None:
            return data
        # gloo's pairs compare their addresses: the lower one calls
        return rewrite(data, address, self._line.through(self._host, address, self._port))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        if timeout is None:
            self._inner.wait(list(keys))
        else:
            self._inner.wait(list(keys), timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._inner.check(list(keys)))

    def has_extended_api(self) -> bool:
        return True

    @property
    def timeout(self) -> datetime.timedelta:
        return self._inner.timeout  # type: ignore[attr-defined]

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._inner.set_timeout(timeout)


_LOCAL = socket.inet_aton("127.0.0.1")


def _place_of(blob: bytes) -> int | None:
    """Offset of a `sockaddr_in` of this machine's loopback in a blob (family 2, port, 127.0.0.1), or None."""
    family = socket.AF_INET.to_bytes(2, "little")
    at = blob.find(_LOCAL)
    while at >= 0:
        if at >= 4 and blob[at - 4 : at - 2] == family:
            return at - 4
        at = blob.find(_LOCAL, at + 1)
    return None


def _address_in(blob: bytes) -> str | None:
    at = _place_of(blob)
    return None if at is None else f"127.0.0.1:{int.from_bytes(blob[at + 2 : at + 4], 'big')}"


def rewrite(blob: bytes, address: str, replacement: str) -> bytes:
    """Return the blob with `replacement` in place of `address`, both 127.0.0.1:port."""
    at = _place_of(blob)
    assert at is not None
    assert _address_in(blob) == address, address
    port = int(replacement.rpartition(":")[2]).to_bytes(2, "big")
    return blob[: at + 2] + port + blob[at + 4 :]
