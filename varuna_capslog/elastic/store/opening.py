"""Opens the store of a run by its address: the run's own server (`server`, in the supervisor that begins the run), or
etcd (`etcd_store`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from varuna_capslog.base.secret import Secret
from varuna_capslog.elastic.network import parse_address
from varuna_capslog.elastic.store.etcd_store import EtcdMembershipStore
from varuna_capslog.elastic.store.log import ENDED, LOOK_SECONDS, LogFollower, MembershipStore, StoreGone, StoreRefuses
from varuna_capslog.elastic.store.server import ANSWER_SECONDS, PURPOSE, StoreClient, StoreServer, bytes_of, text_of

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["ENDED", "MembershipStore", "OwnMembershipStore", "StoreGone", "StoreRefuses", "StoreServer", "open_store"]


# -- Client of the run's own `server`, for members, hosts and `torch.distributed`'s groups.


class OwnMembershipStore(MembershipStore):
    """Client of a `StoreServer`.

    identity: of the expected server; None: the one that answers first. answer_seconds: without an answer after this
    time the store counts as gone; None: `server.ANSWER_SECONDS`. Raises StoreRefuses where the server has another
    secret, StoreGone where no store answers.
    """

    def __init__(
        self, host: str, port: int, secret: Secret, identity: str | None = None, answer_seconds: float | None = None
    ) -> None:
        super().__init__()
        seconds = answer_seconds or ANSWER_SECONDS
        self.client = StoreClient(host, port, secret.key(PURPOSE), identity or "", seconds)
        self.look()
        self.address, self.identity = self.client.address, self.client.identity
        self._signs = self.client.another()  # separate: its end tells the server that the host has ended

    def count(self, name: str) -> int:
        return int(self.client.ask("add", f"count/{name}", 1))

    def put(self, key: str, value: str) -> None:
        self.client.ask("set", f"key/{key}", text_of(value))

    def get(self, key: str, wait_seconds: float = 0.0) -> str | None:
        values = self.client.values([f"key/{key}"], wait_seconds)
        return None if values is None else values[0].decode()

    def get_all(self, keys: Sequence[str]) -> dict[str, str | None]:
        texts = self.client.ask("values", [f"key/{key}" for key in keys])
        return {key: None if text is None else bytes_of(text).decode() for key, text in zip(keys, texts, strict=True)}

    def give_sign(self, host: str, sign: str) -> None:
        self._signs.ask("sign", f"key/lease/{host}", text_of(sign))

    def rendezvous(self) -> dist.Store:
        from varuna_capslog.elastic.store.rendezvous import OwnRendezvous

        self.look()  # torch must not get a store that hangs
        return OwnRendezvous(self.client.another())

    def look(self) -> None:
        self.client.ask("look")

    def close(self) -> None:
        super().close()
        self.client.close()
        self._signs.close()

    # -- the log ---------------------------------------------------------------------------------------------------

    def entries(self, start: int) -> Sequence[str]:
        texts: list[str] = []
        while True:
            batch, length = self._batch(start + len(texts), 0.0)
            texts += batch
            if start + len(texts) >= length:
                return texts

    def _write(self, position: int, text: str) -> bool:
        stored = self.client.ask("write", position, text_of(text))
        if stored is None:
            raise StoreGone(f"the store at {self.address} has lost entries of its log")
        return bool(stored == text_of(text))

    def read_on(self, follower: LogFollower) -> None:
        """Let the store wait for entries, but ask often enough to notice a store that hangs or is cut off."""
        while not follower.stopped:
            follower.deliver(self._batch(follower.next, LOOK_SECONDS)[0])

    def _batch(self, start: int, wait: float) -> tuple[list[str], int]:
        texts, length = self.client.ask("entries", start, wait, wait=wait)
        return [bytes_of(text).decode() for text in texts], int(length)


# -- A store of either kind


def open_store(
    address: str, secret: Secret, identity: str | None = None, answer_seconds: float | None = None
) -> MembershipStore:
    """Open the store at "host:port", or at "etcd://host:port,.../prefix".

    identity: of the expected store, if known. answer_seconds: without an answer after this time the store counts as
    gone; None: the kind's default. Raises StoreRefuses where it has another secret, StoreGone where it does not answer.
    """
    if "://" in address:
        return EtcdMembershipStore(address, secret, identity, answer_seconds)
    ((endpoint,), _) = parse_address(address)
    return OwnMembershipStore(*endpoint, secret, identity, answer_seconds)
