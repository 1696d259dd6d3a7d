"""Rendezvous of process groups through a run's store: the store in the form of a `torch.distributed` store.

Only this module of `store/` needs torch; a host, which has no groups, does not import it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from varuna_capslog.elastic.store.etcd_gateway import WAIT_SECONDS, Etcd
from varuna_capslog.elastic.store.server import StoreClient, bytes_of, text_of

__all__ = ["EtcdRendezvous", "OwnRendezvous"]

_GROUP_SECONDS = 300.0


class OwnRendezvous(dist.Store):
    """Rendezvous through the run's own server, over separate connections.

    The caller must keep this object as long as the group: torch keeps only its C++ half.
    """

    def __init__(self, client: StoreClient) -> None:
        super().__init__()
        self._client, self._seconds = client, _GROUP_SECONDS
        self._clones: list[OwnRendezvous] = []

    def set(self, key: str, value: str | bytes) -> None:
        self._client.ask("set", _group(key), text_of(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = self._client.values([_group(key) for key in keys], self._seconds)
        if values is None:
            raise _in_vain(keys)
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._client.ask("add", _group(key), amount))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        stored = self._client.ask("exchange", _group(key), text_of(expected), text_of(value))
        return b"" if stored is None else bytes_of(stored)

    def deleteKey(self, key: str) -> bool:  # as torch calls `delete_key` of a store in Python
        return bool(self._client.ask("delete", _group(key)))

    def getNumKeys(self) -> int:  # as torch calls `num_keys`
        return int(self._client.ask("size"))

    def check(self, keys: Sequence[str]) -> bool:
        return self._client.values([_group(key) for key in keys], 0.0) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        if self._client.values([_group(key) for key in keys], seconds) is None:
            raise _in_vain(keys)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def clone(self) -> OwnRendezvous:
        clone = OwnRendezvous(self._client.another())
        self._clones.append(clone)
        return clone


class EtcdRendezvous(dist.Store):
    """Rendezvous through etcd, with keys that never change and counters that only grow."""

    def __init__(self, etcd: Etcd, root: str) -> None:
        super().__init__()
        self._etcd, self._root = etcd, root
        self._seconds = _GROUP_SECONDS

    def set(self, key: str, value: str | bytes) -> None:
        self._etcd.put(f"{self._root}/{key}", value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = self._etcd.value(f"{self._root}/{key}")
        assert value is not None
        return value

    def add(self, key: str, value: int) -> int:
        return self._etcd.add(f"{self._root}/{key}", value)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._etcd.value(f"{self._root}/{key}") is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (self._seconds if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if time.monotonic() > until:
                raise _in_vain(keys)
            time.sleep(WAIT_SECONDS)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()


def _in_vain(keys: Sequence[str]) -> dist.DistStoreError:
    return dist.DistStoreError(f"nobody has set {', '.join(keys)} in time")


def _group(key: str) -> str:
    return f"group/{key}"
