"""Joins the ranks that torchrun, or a supervisor of ours, has started, by the variables that it gives them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from varuna_capslog.engine.communicator import Communicator, connect

__all__ = ["connected"]


@contextlib.contextmanager
def connected(generation: str, timeout_seconds: float = 60.0) -> Iterator[Communicator]:
    """A communicator of all ranks while the block runs; of this process alone where no variables say otherwise.

    Args:
        generation: a name that no other group of these ranks has had.
        timeout_seconds: longest wait for any message of a peer.

    Raises:
        PeerLost: not all ranks arrive.
    """
    # torchrun's agent serves the store itself, and every restart of the group needs names of its own
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    rank = int(os.environ.get("RANK", "0"))
    communicator = connect(
        rank,
        int(os.environ.get("WORLD_SIZE", "1")),
        os.environ.get("MASTER_ADDR", "127.0.0.1"),
        int(os.environ.get("MASTER_PORT", "0")),
        f"{generation}-{restart}",
        timeout_seconds,
        host_store=rank == 0 and not hosted,
    )
    yield communicator
    # only after success: a failed rank ends its process, which tells the others at once
    communicator.barrier()
    communicator.close()
