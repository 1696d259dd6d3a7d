"""The membership store in etcd: a run whose store outlives any of its machines.

The log and keys of a run are under a prefix of an etcd cluster, `etcd://HOST:PORT[,HOST:PORT...]/PREFIX`. The run signs
all values with its secret and ignores unsigned ones; the cluster's owner decides who may write there.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.secret import Secret
from varuna_capslog.elastic.network import parse_address
from varuna_capslog.elastic.store.etcd_gateway import PAUSE_SECONDS, Etcd, EtcdWatch, Signatures, after, b64, unsigned
from varuna_capslog.elastic.store.log import LOOK_SECONDS, LogFollower, MembershipStore, StoreGone, StoreRefuses

if TYPE_CHECKING:
    import torch.distributed as dist

    from varuna_capslog.elastic.store.rendezvous import EtcdRendezvous

__all__ = ["EtcdMembershipStore", "begin_run"]

ANSWER_SECONDS = 10.0
"""Longest time for an answer; a cluster that takes longer counts as gone. After the loss of its leader a cluster elects
another within 1 to 2 s (etcd's default), and votes again where the votes are split."""

_BATCH = 1000
_AT_ONCE = 100
"""Most keys of one request: etcd accepts 128 by default."""

_KEPT = 16


def begin_run(address: str, lease_seconds: float, secret: Secret) -> str:
    """Prepare a new run under the address's prefix: remove all keys there, and return the run's identity.

    An earlier run there is watched for new signs of life for half of `lease_seconds`. Raises StoreGone where no
    endpoint answers, and CapslogError where a run is going on there.
    """
    endpoints, prefix = parse_address(address)
    identity = uuid.uuid4().hex
    with contextlib.closing(Etcd(address, endpoints, ANSWER_SECONDS, Signatures(secret, address))) as etcd:
        stored = etcd.stored(f"{prefix}/current")
        # signature not checked: a run with another secret may be going on there, too
        before = None if stored is None else unsigned(stored).decode("utf-8", "replace")
        signs = _leases(etcd, f"{prefix}/{before}") if before else []
        until = time.monotonic() + lease_seconds / 2
        while signs and time.monotonic() < until:
            time.sleep(PAUSE_SECONDS)
            if _leases(etcd, f"{prefix}/{before}") != signs:
                raise CapslogError(
                    f"a run is going on in the store at {address}: join it with --store, or choose another prefix"
                )
        etcd.call("kv/deleterange", {"key": b64(f"{prefix}/"), "range_end": b64(after(f"{prefix}/"))})
        etcd.put(f"{prefix}/{identity}/identity", identity)
        etcd.put(f"{prefix}/current", identity)
    return identity


class EtcdMembershipStore(MembershipStore):
    """Client of one run's part of an etcd cluster.

    Args:
        address: see `parse_address`.
        identity: of the expected run; None: the newest under the prefix.
        answer_seconds: None: `ANSWER_SECONDS`.

    Raises:
        StoreRefuses: the run there has another secret.
        StoreGone: no endpoint answers, or the run is not there.
    """

    def __init__(
        self, address: str, secret: Secret, identity: str | None = None, answer_seconds: float | None = None
    ) -> None:
        super().__init__()
        self.address = address
        endpoints, prefix = parse_address(address)
        self._etcd = Etcd(address, endpoints, answer_seconds or ANSWER_SECONDS, Signatures(secret, address))
        self._kept: deque[EtcdRendezvous] = deque(maxlen=_KEPT)
        run = identity or self._etcd.get(f"{prefix}/current")
        unread = run is None and self._etcd.stored(f"{prefix}/current") is not None
        if unread:  # of another secret, or the run began between both requests
            run = self._etcd.get(f"{prefix}/current")
        if unread and run is None:
            raise StoreRefuses(
                f"the run in the store at {address} is not signed with this machine's secret; give all machines the "
                "same file, RUN_DIR/secret or the one that CAPSLOG_SECRET_FILE names, or choose another prefix"
            )
        if run is None:
            raise StoreGone(f"the store at {address} holds no run; begin it on the machine that serves")
        self.identity = run
        self._root = f"{prefix}/{run}"
        self.look()

    def count(self, name: str) -> int:
        return self._etcd.add(f"{self._root}/count/{name}", 1)

    def put(self, key: str, value: str) -> None:
        self._etcd.put(f"{self._root}/key/{key}", value)

    def get(self, key: str, wait_seconds: float = 0.0) -> str | None:
        return self._etcd.wait(f"{self._root}/key/{key}", wait_seconds)

    def get_all(self, keys: Sequence[str]) -> dict[str, str | None]:
        places = [f"{self._root}/key/{key}" for key in keys]
        values: dict[str, str | None] = {}
        for first in range(0, len(places), _AT_ONCE):
            values.update(self._etcd.values(places[first : first + _AT_ONCE]))
        return {key: values.get(place) for key, place in zip(keys, places, strict=True)}

    def rendezvous(self) -> dist.Store:
        from varuna_capslog.elastic.store.rendezvous import EtcdRendezvous

        self.look()
        rendezvous = EtcdRendezvous(self._etcd.another(), f"{self._root}/group")
        self._kept.append(rendezvous)  # torch's groups do not keep a Python store alive
        return rendezvous

    def look(self) -> None:
        """Check that the store answers and still has the run. Raises StoreGone."""
        self._check(self._etcd.get(f"{self._root}/identity"))

    def signs(self) -> Sequence[object]:
        return _leases(self._etcd, self._root)

    def _check(self, identity: str | None) -> None:
        if identity != self.identity:
            raise StoreGone(f"the store at {self.address} was started anew: it knows nothing of this run")

    def close(self) -> None:
        super().close()
        self._etcd.close()

    # -- the log ---------------------------------------------------------------------------------------------------

    def entries(self, start: int) -> list[str]:
        """Return the entries of the log from `start` on. Raises StoreGone where the log is gone or has a gap."""
        texts: list[str] = []
        while True:
            first, end = self._entry_key(start + len(texts)), after(f"{self._root}/log/")
            identity, batch = self._etcd.with_range(f"{self._root}/identity", first, end, _BATCH)
            self._check(identity)
            for key, text in batch:
                if key != self._entry_key(start + len(texts)):
                    missing = self._entry_key(start + len(texts))
                    raise StoreGone(f"the store at {self.address} has lost {missing}: somebody else writes there")
                texts.append(_passed_over(key) if text is None else text)
            if len(batch) < _BATCH:
                return texts

    def _entry_key(self, position: int) -> str:
        """Key of entry number `position`; keys sort like the numbers."""
        return f"{self._root}/log/{position:012d}"

    def _write(self, position: int, text: str) -> bool:
        exists = {"key": b64(f"{self._root}/identity"), "target": "VERSION", "result": "GREATER", "version": "0"}
        stored = self._etcd.create(self._entry_key(position), text, exists)
        if stored is None:
            self.look()
            raise StoreGone(f"the store at {self.address} refuses entries")
        return stored == text

    def read_on(self, follower: LogFollower) -> None:
        """Read the log, then watch it, and check every `LOOK_SECONDS` that the store still answers."""
        while not follower.stopped:
            first, end = self._entry_key(follower.next), after(f"{self._root}/log/")
            with contextlib.closing(self._etcd.watch(first, end)) as watch:
                # entries that were written before the watch began
                follower.deliver(self.entries(follower.next))
                self._follow(watch, follower)

    def _follow(self, watch: EtcdWatch, follower: LogFollower) -> None:
        """Deliver entries until the watch ends or has missed entries."""
        while not follower.stopped:
            changes = watch.next(LOOK_SECONDS)
            if changes is None:
                return
            for key, text in self._etcd.opened(changes):
                if key == self._entry_key(follower.next):  # earlier entries were read before the watch
                    follower.deliver([_passed_over(key) if text is None else text])
            if not changes and self.entries(follower.next):  # a server that hangs or is cut off reports no changes
                return


def _leases(etcd: Etcd, root: str) -> list[bytes]:
    """Return the last sign of life of each host of a run."""
    first = f"{root}/key/lease/"
    return etcd.range(first, after(first), _BATCH)


def _passed_over(key: str) -> str:
    """Text in place of an unsigned entry, the same for every reader; readers ignore its unknown kind."""
    return json.dumps(["", {"kind": "unsigned", "key": key}])
