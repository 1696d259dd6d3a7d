"""The store of a run, of whichever kind its address names: what all other modules import of the stores.

The default is the run's own server (`server`), which the supervisor that begins the run serves, with `own_store` as its
client. `etcd_store` is the other kind.
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
    """The store at "host:port", or at "etcd://host:port,.../prefix".

    Args:
        secret: of the run.
        identity: of the store that is meant, where the caller knows it; see `OwnMembershipStore`.
        answer_seconds: after so long without an answer the store counts as gone; None: as each kind has it.

    Raises:
        StoreRefuses: it has another secret.
        StoreGone: it does not answer.
    """
    if "://" in address:
        return EtcdMembershipStore(address, secret, identity, answer_seconds)
    ((endpoint,), _) = parse_address(address)
    return OwnMembershipStore(*endpoint, secret, identity, answer_seconds)
