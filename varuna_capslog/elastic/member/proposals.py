"""The plan of the next generation, known to all members before they copy ahead the layers that move for it.

A plan that two machines might not find alike (`Work.proposes`) is searched by one member: by the first voter, while
training goes on, which sends it to the others, or else by the member that founds the generation. The record carries it.
Where such a search takes long, the first voter searches plans for the changes that may come as soon as a generation
trains, in a thread beside the training, so that nobody waits, and sends them to the others, since it may be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from varuna_capslog.base.threads import OwnedThread, logged
from varuna_capslog.elastic.member.inbox import Peers
from varuna_capslog.elastic.member.work import Work
from varuna_capslog.membership.generation import Generation, Member, MemberLayout
from varuna_capslog.membership.recovery import Place, Seat
from varuna_capslog.plans.plan import Plan

__all__ = ["Proposals"]


class Proposals:
    """The plans of generations that may follow the present one, by their members. Called by the member's one thread."""

    def __init__(self, me: Member, work: Work, peers: Peers, place: Place) -> None:
        self._me, self._work, self._peers, self._place = me, work, peers, place
        self.known: dict[tuple[Member, ...], Plan | None] = {}
        self._newest = 0

    def settle(self, record: Generation, seats: Sequence[Seat]) -> bool:
        """True where the plan of these members is known here; the first voter searches it and tells the others."""
        members = _members(seats)
        if not self._work.proposes or members in self.known:
            return True
        if self._me != record.members[0]:
            return False
        plan = self.of(seats)
        text = None if plan is None else plan.to_json()
        for member in record.members[1:]:
            self._peers.send(member, "plan", generation=record.number, members=members, plan=text)
        return True

    def heard(self, members: Sequence[Member], plan: Any) -> None:
        """Takes a plan that the first voter has sent. Raises CapslogError for a text that is no plan."""
        self.known[tuple(members)] = None if plan is None else Plan.from_json(plan, "the plan of the next generation")

    def look_ahead(self, record: Generation, seats: Sequence[Seat]) -> None:
        """Searches plans of generations that may follow this one, which has begun; its first voter does so."""
        self._newest = record.number
        if not self._work.proposes or self._me != record.members[0] or len(seats) < len(record.members):
            return

        def search() -> None:
            for finding in self._work.look_ahead(seats):
                if self._newest != record.number:
                    return
                for member in record.members[1:] if finding else ():
                    self._peers.send(member, "ahead", generation=record.number, found=finding)

        OwnedThread("look-ahead", search, logged).start()

    def of(self, seats: Sequence[Seat]) -> Plan | None:
        """The plan for the record of a generation of these seats; searched here where nobody has told it."""
        members = _members(seats)
        if members not in self.known:
            self.known[members] = self._work.propose(seats)
        return self.known[members]

    def place(self, seats: Sequence[Seat], plan: Plan | None = None) -> MemberLayout | str:
        """The layers that each member would own and copy, as far as it is known here; see `recovery.Place`."""
        return self._place(seats, plan or self.known.get(_members(seats)))


def _members(seats: Sequence[Seat]) -> tuple[Member, ...]:
    return tuple(seat.member for seat in seats)
