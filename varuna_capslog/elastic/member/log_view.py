"""What the store's log has told one member so far: who is there, who is lost, and the seats that a plan is made of.

A fold over entries, without a clock. `Runtime` hands in every entry and decides what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.host.roster import Roster
from varuna_capslog.membership.entries import AskEntry, DeadEntry, Entry, HelloEntry
from varuna_capslog.membership.generation import Member
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.state import Phase

__all__ = ["LogView"]


class LogView:
    """The log as one member has read it.

    Attributes:
        roster: hosts, workers and generations.
        here: members that have loaded and read the log.
        seats: of all that took part in the present generation's first round, and of those that asked to be let in.
    """

    def __init__(self, me: Member) -> None:
        self._me = me
        self.roster = Roster()
        self.here: set[Member] = set()
        self.seats: dict[Member, Seat] = {}

    def take(self, value: Mapping[str, Any]) -> Entry | None:
        """Adds the next entry, as the store keeps it; None where its kind is unknown.

        Raises:
            CapslogError: this member was declared lost.
        """
        entry = self.roster.take(value)
        match entry:
            case DeadEntry(self._me):
                raise CapslogError(f"{self._me} was declared lost ({entry.why}); a new member may take its place")
            case HelloEntry(member):
                self.here.add(member)
            case AskEntry(member):
                self.seats[member] = Seat(member, entry.host or member, entry.capacity)
        return entry

    def suspected(self, phase: Phase) -> frozenset[Member]:
        """Members that will not answer any more. Once a generation trains, no member waits for those that leave it."""
        return frozenset(self.roster.dead if phase is Phase.RUN else self.roster.dead | self.roster.gone)
