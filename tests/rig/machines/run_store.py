"""The store of a chaos run: one server that can be lost for good, or three etcd servers of which one can be lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.rig.etcd_servers import EtcdServers
from varuna_capslog.base.secret import Secret
from varuna_capslog.elastic.store.etcd_store import begin_run
from varuna_capslog.elastic.store.opening import MembershipStore, StoreGone, StoreServer, open_store
from varuna_capslog.membership.entries import Entry
from varuna_capslog.membership.generation import Generation

__all__ = ["RunStore"]


class RunStore:
    """The run's store, and this process's connection to it.

    Args:
        kind: "tcp": the run's own server; "etcd": a cluster of three servers.
        folder: for etcd's data.
        lease_seconds: of the run's hosts.
        secret: of the run.
        host: where the servers listen.

    Attributes:
        address: of the newest store.
    """

    def __init__(self, kind: str, folder: Path, lease_seconds: float, secret: Secret, host: str = "127.0.0.1") -> None:
        self.is_cluster = kind == "etcd"
        self.address = ""
        self._folder, self._lease_seconds, self._secret, self._host = folder, lease_seconds, secret, host
        self._etcd: EtcdServers | None = None
        self._server: StoreServer | None = None
        self._client: MembershipStore | None = None
        self._begun = 0

    @property
    def is_lost(self) -> bool:
        """True while there is no store."""
        return self._client is None

    @property
    def is_whole(self) -> bool:
        """True if the store can lose a server: a single server, or a cluster whose servers all answer."""
        return self._etcd is None or all(self._etcd.answers(number) for number in range(len(self._etcd.ports)))

    def begin(self, keys: Mapping[str, str], heard: Callable[[dict[str, Any]], None]) -> None:
        """A new store that holds these keys.

        Args:
            heard: called with every entry of the log, in a thread of its own.

        Raises:
            CapslogError: no etcd is installed, or it does not answer.
        """
        if self.is_cluster:
            self._etcd = self._etcd or EtcdServers(self._folder, 3, self._host)
            self.address = self._etcd.address(f"chaos/{self._begun}")
            identity = begin_run(self.address, self._lease_seconds, self._secret)
        else:
            self._server = StoreServer(self._secret, self._host)
            port = self._server.port
            self.address, identity = f"127.0.0.1:{port}", self._server.identity
        self._begun += 1
        self._client = open_store(self.address, self._secret, identity)
        for key, value in keys.items():
            self._client.put(key, value)
        self._client.follow(heard, lambda why: None)

    def lose(self) -> None:
        """End the only server, and lose all its data."""
        assert self._server is not None
        assert self._client is not None
        self._client.close()
        self._server.close()
        self._server = self._client = None

    def kill_server(self, number: int) -> None:
        """Kill one of etcd's servers."""
        assert self._etcd is not None
        self._etcd.kill(number)

    def start_server_again(self, number: int) -> None:
        """Start the killed server again with the data that it kept."""
        assert self._etcd is not None
        self._etcd.start_again(number)

    def append(self, entry: Entry) -> None:
        """Appends an entry to the log; does nothing where the store is lost."""
        if self._client is not None:
            with contextlib.suppress(StoreGone):
                self._client.append(entry.to_json())

    def found(self, generation: Generation) -> None:
        """Founds the first generation, unless there is one or the store is lost."""
        if self._client is not None:
            with contextlib.suppress(StoreGone):
                self._client.compare_and_set(0, generation)

    def close(self) -> None:
        """Close the client and the servers."""
        for service in (self._client, self._server, self._etcd):
            if service is not None:
                service.close()
