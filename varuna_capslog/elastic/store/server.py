"""The server of torch's store, in the process of the supervisor that begins the run."""

from __future__ import annotations

import datetime
import socket
import uuid

import torch.distributed as dist

from varuna_capslog.base.errors import CapslogError

__all__ = ["OPEN_SECONDS", "StoreServer", "first_line", "serve_store"]

OPEN_SECONDS = 12.0
"""For a new connection: torch asks the name server for the name of every peer, and one lost answer costs 5 s."""


class StoreServer:
    """The process's own TCPStore server. It has no access control: its port belongs into a private network.

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


def serve_store(port: int = 0) -> tuple[StoreServer, int]:
    """Serve an empty store in this process, on all its addresses, until the server is closed.

    Returns:
        The server, and its port.
    """
    server = StoreServer(port)
    return server, server.port


def first_line(error: BaseException) -> str:
    """The first line of an error of torch's, whose other lines are C++ stacks."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
