"""Opens the store of a run, of the kind that its address names: the run's own server (`server`, in the supervisor that
begins the run; client `own_store`), or etcd (`etcd_store`). Other modules import nothing else of the stores.
"""

from __future__ import annotations

from varuna_capslog.base.trust.secret import Secret
from varuna_capslog.elastic.network import parse_address
from varuna_capslog.elastic.store.etcd_store import EtcdMembershipStore
from varuna_capslog.elastic.store.log import ENDED, MembershipStore, StoreGone, StoreRefuses
from varuna_capslog.elastic.store.own_store import OwnMembershipStore
from varuna_capslog.elastic.store.server import StoreServer

__all__ = ["ENDED", "MembershipStore", "OwnMembershipStore", "StoreGone", "StoreRefuses", "StoreServer", "open_store"]


def open_store(
    address: str, secret: Secret, identity: str | None = None, answer_seconds: float | None = None
) -> MembershipStore:
    """Store at "host:port", or at "etcd://host:port,.../prefix".

    identity: of the expected store, if known. answer_seconds: time without an answer after which the store counts as
    gone; None: the kind's default. Raises StoreRefuses where it has another secret, StoreGone where it does not answer.
    """
    if "://" in address:
        return EtcdMembershipStore(address, secret, identity, answer_seconds)
    ((endpoint,), _) = parse_address(address)
    return OwnMembershipStore(*endpoint, secret, identity, answer_seconds)
