"""The store of a run, of whichever kind its address names: what all other modules import of the stores."""

from __future__ import annotations

from varuna_capslog.elastic.network import parse_address
from varuna_capslog.elastic.store.etcd_store import EtcdMembershipStore
from varuna_capslog.elastic.store.log import MembershipStore, StoreGone
from varuna_capslog.elastic.store.tcp_store import StoreServer, TcpMembershipStore

__all__ = ["MembershipStore", "StoreGone", "StoreServer", "TcpMembershipStore", "open_store"]


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
