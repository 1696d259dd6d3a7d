"""Rendezvous of the ranks of an ordinary run: torch's store, for the processes of one machine."""

from __future__ import annotations

import datetime
import socket

import torch.distributed as dist

__all__ = ["LOCAL", "local_store"]


# A run on several machines under torchrun meets in torchrun's own store.


LOCAL = "127.0.0.1"
_TIMEOUT = datetime.timedelta(seconds=300)


def local_store(port: int = 0, timeout: datetime.timedelta = _TIMEOUT) -> dist.TCPStore:
    """Store of torch for the processes of this machine alone: it has no access control, and torch would listen to all
    machines. Raises OSError where the port is taken.
    """
    listener = socket.create_server((LOCAL, port), backlog=1024)
    return dist.TCPStore(
        LOCAL,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )
