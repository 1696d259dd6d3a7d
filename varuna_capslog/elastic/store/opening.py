"""The store of a run, of whichever kind its address names: what all other modules import of the stores.

The default is torch's TCPStore, which the supervisor that begins the run serves. Entry n of its log is the key
`log/<n>`, written once by compare-and-set on nothing. `etcd_store` is the other kind.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import socket
import uuid
from collections.abc import Callable, Sequence

import torch.distributed as dist

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.network import parse_address
from varuna_capslog.elastic.store.etcd_store import EtcdMembershipStore
from varuna_capslog.elastic.store.lines import OPEN_SECONDS, StoreLine, StoreLines, first_line
from varuna_capslog.elastic.store.log import LOOK_SECONDS, LogFollower, MembershipStore, StoreGone

__all__ = ["MembershipStore", "StoreGone", "StoreServer", "TcpMembershipStore", "open_store"]

_FOR_EVER = datetime.timedelta(days=7)  # it waits in poll(), which counts milliseconds in an int
_LARGEST_BATCH = 256


def open_store(address: str, identity: str | None = None, answer_seconds: float | None = None) -> MembershipStore:
    """The store at "host:port", or at "etcd://host:port,.../prefix".

    Args:
        identity: of the store that is meant, where the caller knows it; see `TcpMembershipStore`.
        answer_seconds: after so long without an answer the store counts as gone; None: as each kind has it.
    """
    if "://" in address:
        return EtcdMembershipStore(address, identity, answer_seconds)
    ((endpoint,), _) = parse_address(address)
    return TcpMembershipStore(*endpoint, identity, answer_seconds)


class StoreServer:
    """The TCPStore server of this process, on all its addresses. It has no access control: its port belongs into a
    private network.

    Args:
        port: 0: any free one.

    Raises:
        CapslogError: the port cannot be used.
    """

    def __init__(self, port: int = 0) -> None:
        # IPv4, so that a peer on this machine has a name in /etc/hosts: the server asks for the names of its peers in
        # the one thread that also answers, and a name server that loses a question would stop it for seconds.
        try:
            listener = socket.create_server(("0.0.0.0", port), backlog=1024)
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=OPEN_SECONDS),
                master_listen_fd=listener.detach(),
            )
        except (RuntimeError, OSError, OverflowError) as error:
            raise CapslogError(f"no store can be served on port {port}: {first_line(error)}; choose another") from error
        self.port = port
        self.identity = uuid.uuid4().hex
        store.set("identity", self.identity)
        self._store: dist.TCPStore | None = store

    def close(self) -> None:
        """End the server; its clients see that the store is gone."""
        self._store = None


class TcpMembershipStore(MembershipStore):
    """A client of a `StoreServer`.

    Args:
        identity: which server it must be; None: the first one that answers.
        answer_seconds: after so long without an answer the store counts as gone; None: `lines.ANSWER_SECONDS`.

    Raises:
        StoreGone: no store answers there.
    """

    def __init__(self, host: str, port: int, identity: str | None = None, answer_seconds: float | None = None) -> None:
        super().__init__()
        self.lines = StoreLines(host, port, identity, answer_seconds)
        self.address, self.identity = self.lines.address, self.lines.identity

    def count(self, name: str) -> int:
        return self.lines.call(lambda client: int(client.add(f"count/{name}", 1)))

    def put(self, key: str, value: str) -> None:
        self.lines.call(lambda client: client.set(f"key/{key}", value))

    def get(self, key: str, wait_seconds: float = 0.0) -> str | None:
        name = f"key/{key}"

        def job(client: dist.TCPStore) -> str | None:
            if wait_seconds > 0 and not client.check([name]):
                with contextlib.suppress(dist.DistStoreError):  # waited in vain; a broken connection shows below
                    client.wait([name], datetime.timedelta(seconds=wait_seconds))
            return client.get(name).decode() if client.check([name]) else None

        return self.lines.call(job, self.lines.answer_seconds + wait_seconds)

    def rendezvous(self) -> dist.Store:
        self.look()  # a broken connection must not be handed out
        line = self.lines.line()
        try:
            return line.call(lambda client: client, self.lines.answer_seconds)  # it outlives the line's thread
        finally:
            line.close()

    def look(self) -> None:
        self.lines.call(lambda client: client.check(["identity"]))

    def entries(self, start: int) -> Sequence[str]:
        return self.lines.call(lambda client: _entries(client, start))

    def _write(self, position: int, text: str) -> bool:
        return self.lines.call(lambda client: client.compare_set(_key(position), "", text)) == text.encode()

    def close(self) -> None:
        super().close()
        self.lines.close()

    # -- following the log -----------------------------------------------------------------------------------------

    def read_on(self, follower: LogFollower) -> None:
        """Reads with a line that waits in the store, and looks now and then whether the store is still there."""
        line: StoreLine | None = None
        try:
            while not follower.stopped:
                if line is None:
                    line = self.lines.line()
                    line.send(_pump(follower, line))
                try:
                    heard = follower.heard.get(timeout=LOOK_SECONDS)
                except queue.Empty:
                    self.look()
                    continue
                if heard is None or heard[0] is not line:
                    continue
                if isinstance(heard[1], BaseException):
                    line = None
                    continue
                follower.deliver([heard[1]])
        finally:
            if line is not None:
                line.close()


def _pump(follower: LogFollower, line: StoreLine) -> Callable[[dist.TCPStore], None]:
    """What the line's thread does: puts (line, text) of every entry that follows into the follower's queue.

    In place of a text it puts the exception that ends it: then the line is broken.
    """
    position = follower.next

    def job(client: dist.TCPStore) -> None:
        try:
            client.set_timeout(_FOR_EVER)
            known = _entries(client, position)  # a late reader has much to read, and one by one takes seconds
            for text in known:
                follower.heard.put((line, text))
            at = position + len(known)
            while not follower.stopped:
                follower.heard.put((line, client.get(_key(at)).decode()))
                at += 1
        except RuntimeError as error:
            follower.heard.put((line, error))

    return job


def _entries(client: dist.TCPStore, start: int) -> Sequence[str]:
    """All entries from `start` on, in growing batches: the log has no gaps."""
    texts: list[str] = []
    size = 1
    while True:
        keys = [_key(start + len(texts) + offset) for offset in range(size)]
        if client.check(keys):
            texts += [value.decode() for value in client.multi_get(keys)]
            size = min(2 * size, _LARGEST_BATCH)
        elif size == 1:
            return texts
        else:
            size = max(1, size // 4)


def _key(position: int) -> str:
    return f"log/{position}"
