"""The data path of a generation, opened in a thread of its own while everything else goes on."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator, connect_group
from varuna_capslog.membership.generation import Member

__all__ = ["Group", "Groups"]

Group = tuple[Communicator, tuple[Any, ...]]

_LOOK_SECONDS = 0.005


class Groups:
    """Opens groups ahead of their use, and throws away those that were not used. Called by one thread.

    Args:
        rendezvous: a store client of the caller's own, where the members of a group meet.
        seconds: longest wait for the others, and then for any message of theirs.
        knows: what this member tells the others of a group as soon as it is open; called in another thread.
    """

    def __init__(
        self, me: Member, rendezvous: Callable[[], dist.Store], seconds: float, knows: Callable[[], Any]
    ) -> None:
        self._me, self._rendezvous, self._seconds, self._knows = me, rendezvous, seconds, knows
        self._opening: dict[tuple[int, str], Future[Group]] = {}

    def begin(self, generation: int, members: Sequence[Member]) -> None:
        """Begins to open the group of these members, by rank; nothing where that was begun, or it is not for us."""
        if self._me not in members:
            return
        self.drop(generation)
        name = _name(generation, members)
        if (generation, name) in self._opening:
            return
        future: Future[Group] = Future()
        self._opening[(generation, name)] = future
        rank, size = members.index(self._me), len(members)

        def open_it() -> None:
            try:
                communicator = connect_group(self._rendezvous(), name, rank, size, self._seconds)
                future.set_result((communicator, tuple(communicator.gather(self._knows()))))
            except Exception as error:
                # without its traceback, which would keep the store's connection until the next long garbage collection
                future.set_exception(CapslogError(f"the group of generation {generation} cannot be opened: {error}"))

        threading.Thread(target=open_it, name=f"connect-{generation}", daemon=True).start()

    def is_settled(self, generation: int, members: Sequence[Member]) -> bool:
        """Whether nothing is gained by waiting: the group is open, could not be opened, or was not begun here."""
        future = self._opening.get((generation, _name(generation, members)))
        return future is None or future.done()

    def take(self, generation: int, members: Sequence[Member], hopeless: Callable[[], bool]) -> Group | None:
        """The open group, which is the caller's from now on, and what each rank knows; None if it could not be opened,
        or has become hopeless.
        """
        self.begin(generation, members)
        future = self._opening.pop((generation, _name(generation, members)))
        while not future.done():
            if hopeless():
                future.add_done_callback(_throw_away)
                return None
            with contextlib.suppress(TimeoutError):
                future.exception(timeout=_LOOK_SECONDS)
        return future.result() if future.exception() is None else None

    def drop(self, generation: int | None = None) -> None:
        """Throws away what was opened for generations before this one; all, where none is given."""
        for key in [key for key in self._opening if generation is None or key[0] < generation]:
            self._opening.pop(key).add_done_callback(_throw_away)


def _name(generation: int, members: Iterable[Member]) -> str:
    """Another set of members is another group."""
    return f"{generation}-{hashlib.blake2b(' '.join(members).encode(), digest_size=6).hexdigest()}"


def _throw_away(future: Future[Group]) -> None:
    if future.exception() is None:
        future.result()[0].abort()
