"""The membership store on the run's own server: what members, hosts and `torch.distributed`'s groups call.

`server` is the other end, and `lines` holds the connections. Nothing here decides anything about the membership.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from varuna_capslog.base.trust.secret import Secret
from varuna_capslog.elastic.store.lines import ANSWER_SECONDS, StoreLines
from varuna_capslog.elastic.store.log import LOOK_SECONDS, LogFollower, MembershipStore, StoreGone
from varuna_capslog.elastic.store.server import LONGEST_WAIT_SECONDS, PURPOSE

__all__ = ["OwnMembershipStore", "OwnRendezvous"]

_GROUP_SECONDS = 300.0


class OwnMembershipStore(MembershipStore):
    """A client of a `StoreServer`.

    Args:
        secret: of the run.
        identity: which server it must be; None: the first one that answers.
        answer_seconds: after so long without an answer the store counts as gone; None: `lines.ANSWER_SECONDS`.

    Raises:
        StoreRefuses: the server does not know this secret.
        StoreGone: no store answers there.
    """

    def __init__(
        self, host: str, port: int, secret: Secret, identity: str | None = None, answer_seconds: float | None = None
    ) -> None:
        super().__init__()
        seconds = answer_seconds or ANSWER_SECONDS
        self.lines = StoreLines(host, port, secret.key(PURPOSE), identity or "", seconds)
        self.look()
        self.address, self.identity = self.lines.address, self.lines.identity

    def count(self, name: str) -> int:
        return int(self.lines.ask("add", f"count/{name}", 1))

    def put(self, key: str, value: str) -> None:
        self.lines.ask("set", f"key/{key}", _text(value))

    def get(self, key: str, wait_seconds: float = 0.0) -> str | None:
        found = _values(self.lines, [f"key/{key}"], wait_seconds)
        return None if found is None else found[0].decode()

    def rendezvous(self) -> dist.Store:
        self.look()  # a store that hangs must not be handed out
        return OwnRendezvous(self.lines.another())

    def look(self) -> None:
        self.lines.ask("look")

    def close(self) -> None:
        super().close()
        self.lines.close()

    # -- the log ---------------------------------------------------------------------------------------------------

    def entries(self, start: int) -> Sequence[str]:
        texts: list[str] = []
        while True:
            found, length = self._batch(start + len(texts), 0.0)
            texts += found
            if start + len(texts) >= length:
                return texts

    def _write(self, position: int, text: str) -> bool:
        found = self.lines.ask("write", position, _text(text))
        if found is None:
            raise StoreGone(f"the store at {self.address} has lost entries of its log")
        return bool(found == _text(text))

    def read_on(self, follower: LogFollower) -> None:
        """Waits in the store, and asks so often that a store that hangs or was cut off is noticed."""
        while not follower.stopped:
            follower.deliver(self._batch(follower.next, LOOK_SECONDS)[0])

    def _batch(self, start: int, wait: float) -> tuple[list[str], int]:
        found, length = self.lines.ask("entries", start, wait, wait=wait)
        return [_bytes(text).decode() for text in found], int(length)


class OwnRendezvous(dist.Store):
    """Keys for the groups of `torch.distributed` to meet at, with a connection of its own.

    Whoever makes a group of it keeps it: torch keeps only the half that is written in C++.
    """

    def __init__(self, lines: StoreLines) -> None:
        super().__init__()
        self._lines, self._seconds = lines, _GROUP_SECONDS
        self._clones: list[OwnRendezvous] = []

    def set(self, key: str, value: str | bytes) -> None:
        self._lines.ask("set", _group(key), _text(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = _values(self._lines, [_group(key) for key in keys], self._seconds)
        if found is None:
            raise _in_vain(keys)
        return found

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._lines.ask("add", _group(key), amount))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        found = self._lines.ask("exchange", _group(key), _text(expected), _text(value))
        return b"" if found is None else _bytes(found)

    def deleteKey(self, key: str) -> bool:  # as torch calls `delete_key` of a store in Python
        return bool(self._lines.ask("delete", _group(key)))

    def getNumKeys(self) -> int:  # as torch calls `num_keys`
        return int(self._lines.ask("size"))

    def check(self, keys: Sequence[str]) -> bool:
        return _values(self._lines, [_group(key) for key in keys], 0.0) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        if _values(self._lines, [_group(key) for key in keys], seconds) is None:
            raise _in_vain(keys)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def clone(self) -> OwnRendezvous:
        found = OwnRendezvous(self._lines.another())
        self._clones.append(found)
        return found


def _values(lines: StoreLines, keys: Sequence[str], seconds: float) -> list[bytes] | None:
    """The values of all these keys; None where one of them does not come within so many seconds."""
    until = time.monotonic() + seconds
    while True:
        wait = min(LONGEST_WAIT_SECONDS, max(0.0, until - time.monotonic()))
        found = lines.ask("get", keys, wait, wait=wait)
        if found is not None:
            return [_bytes(text) for text in found]
        if time.monotonic() >= until:
            return None


def _in_vain(keys: Sequence[str]) -> dist.DistStoreError:
    return dist.DistStoreError(f"nobody has set {', '.join(keys)} in time")


def _group(key: str) -> str:
    return f"group/{key}"


def _text(value: str | bytes) -> str:
    """As the server keeps it: one character for each byte."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
