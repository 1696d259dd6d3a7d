"""The data path of one member: the communicator of the present generation, and the next one, opened ahead of its use.

`Groups` opens groups in threads of their own; this says which one is at work, which one ends, and what breaks it off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from varuna_capslog.elastic.member.groups import Group, Groups
from varuna_capslog.elastic.member.inbox import Senses
from varuna_capslog.elastic.member.wire import Change
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.membership.ahead import stay_with
from varuna_capslog.membership.generation import Generation, Member

__all__ = ["DataPath"]


class DataPath:
    """Called by the member's one thread.

    Args:
        meet_seconds: longest wait of a planned change for a data path that is being opened ahead.
    """

    def __init__(self, groups: Groups, senses: Senses, meet_seconds: float) -> None:
        self._groups, self._senses, self._meet_seconds = groups, senses, meet_seconds
        self._communicator: Communicator | None = None
        self._old: Communicator | None = None
        self._meet_until = 0.0

    def begin(self, generation: int, members: Sequence[Member]) -> None:
        """Begins to open a generation's data path; nothing where that was begun, or this member is not in it."""
        self._groups.begin(generation, members)

    def meet(self, generation: int, members: Sequence[Member]) -> None:
        """As `begin`, for a planned change that waits for it; see `has_met`."""
        self._meet_until = time.monotonic() + self._meet_seconds
        self.begin(generation, members)

    def has_met(self, record: Generation, changes: Iterable[Change], dead: set[Member]) -> bool:
        """Whether the data path of the generation that these changes lead to is open, so that no member waits for it.

        A newcomer that does not come holds up a change for a while only.
        """
        stay = stay_with(record, frozenset(changes))
        hopeless = time.monotonic() > self._meet_until or not dead.isdisjoint(stay)
        return hopeless or self._groups.is_settled(record.number + 1, stay)

    def take(self, record: Generation) -> Group | None:
        """The open data path of a generation; None where it could not be opened, or a member of it is lost."""
        self._senses.engage(record.number, frozenset(record.members))
        group = self._groups.take(record.number, record.members, self._senses.disturbed)
        if group is None:
            return None
        self._communicator = group[0]
        self._senses.guard(group[0])
        if self._senses.disturbed():
            return None
        if self._old is not None:  # ending it takes ten milliseconds, which training need not wait for
            threading.Thread(target=self._old.abort, name="end-group", daemon=True).start()
            self._old = None
        return group

    def leave(self, planned: bool) -> None:
        """The present generation is answered no more.

        Args:
            planned: all members have voted for it, so none waits, and none is to be disturbed: the communicator ends
                when the next one is open.
        """
        self._senses.guard(None)
        communicator, self._communicator = self._communicator, None
        if planned:
            self._old = communicator or self._old
        elif communicator is not None:
            communicator.abort()

    def barrier(self) -> None:
        """Waits for all members of the generation. Raises PeerLost."""
        assert self._communicator is not None
        self._communicator.barrier()

    def close(self) -> None:
        """Ends everything that is open or being opened."""
        self._groups.drop()
        for communicator in (self._communicator, self._old):
            if communicator is not None:
                communicator.abort()
