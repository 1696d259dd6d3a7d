"""torch.distributed's default group, which Varuna needs, opened and thrown away once per generation.

Everything that a process has of `torch.distributed` belongs to one `VarunaGroups` at a time. Groups are always aborted
before they are destroyed: gloo may wait for peers otherwise.
"""

from __future__ import annotations

import datetime
import threading
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from varuna_capslog.engine.communicator import Communicator, PeerLost

__all__ = ["VarunaGroups"]


class VarunaGroups:
    """The default group and all that Varuna makes beside it.

    Args:
        store: a client that nothing else uses.
        prefix: never used twice in a store.
        seconds: longest wait for the others, and for messages that have no other bound.

    Raises:
        PeerLost: not all ranks came in time.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, world_size: int, seconds: float) -> None:
        self._ending = threading.Lock()
        self._closed = False
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(prefix, store),
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=seconds),
            )
        except (RuntimeError, ValueError) as error:
            text = str(error).splitlines()[0]
            raise PeerLost(f"rank {rank} could not join {world_size} ranks of Varuna: {text}", None) from error

    def wait_for(self, seconds: float) -> None:
        """From now on the longest wait of sums and barriers in the default group and its likes."""
        for group in _all_groups():
            dist.set_timeout(datetime.timedelta(seconds=seconds), group)

    def abort(self) -> None:
        """Ends everything that is under way, here and at the peers; from any thread, also when it is over."""
        with self._ending:
            if not self._closed:
                for group in _all_groups():
                    _abort(group)

    def close(self) -> None:
        """Aborts all groups and forgets them; the next ones may be opened at once."""
        with self._ending:
            if self._closed:
                return
            self._closed = True
            groups = _all_groups()
            for group in groups:
                _abort(group)
            dist.destroy_process_group()
        # dropping the last reference waits for gloo's threads, so another thread does it
        threading.Thread(target=groups.clear, name="end-varuna-groups", daemon=True).start()


def _all_groups() -> list[Any]:
    while True:
        try:
            return list(distributed_c10d._world.pg_map)
        except RuntimeError:  # another thread is opening one
            continue


def _abort(group: Any) -> None:
    Communicator(group.rank(), group.size(), "varuna", datetime.timedelta(seconds=1), group).abort()
