"""Process groups of one member: the communicator of the present generation, and those of possible next ones.

The next groups are opened ahead, each in a thread of its own beside training. Unused groups are aborted.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread, logged
from varuna_capslog.elastic.member.inbox import Inbox, Peers
from varuna_capslog.elastic.member.start_up import Timeouts
from varuna_capslog.elastic.member.work import Work
from varuna_capslog.engine.communicator import Communicator, connect_group
from varuna_capslog.membership.changes import stay_with
from varuna_capslog.membership.generation import Generation, Member, MemberLayout
from varuna_capslog.membership.messages import Change
from varuna_capslog.membership.recovery import Place, Seat
from varuna_capslog.plans.plan import Plan

__all__ = ["ProcessGroups", "Proposals"]


Group = tuple[Communicator, tuple[Any, ...]]
Pairs = Iterable[tuple[int, int]]

_LOOK_SECONDS = 0.005


class ProcessGroups:
    """Communicators of one member. Called by its one thread.

    Args:
        rendezvous: returns a separate client of the store, through which the members of a group find each other.
        timeouts: `peer`: longest wait for the others to connect, and then for any message of theirs; `gather`: longest
            wait of a planned change for a group that is being opened ahead.
        knows: see `Work`; called in another thread once a group is open.
        begin_pairs: see `Work`.
    """

    def __init__(
        self,
        me: Member,
        inbox: Inbox,
        rendezvous: Callable[[], dist.Store],
        timeouts: Timeouts,
        knows: Callable[[], Any],
        begin_pairs: Callable[[Communicator, Pairs], None],
    ) -> None:
        self._me, self._inbox, self._rendezvous = me, inbox, rendezvous
        self._timeouts, self._knows, self._begin_pairs = timeouts, knows, begin_pairs
        self._opening: dict[tuple[int, str], Future[Group]] = {}
        self._communicator: Communicator | None = None
        self._old: Communicator | None = None
        self._meet_until = 0.0

    def begin(self, generation: int, members: Sequence[Member], pairs: Pairs = ()) -> None:
        """Begin to open the group of these members, by rank, unless that has begun or this member is not among them.
        pairs: of ranks, each of which gets a group, too; empty where they are not known yet.
        """
        if self._me not in members:
            return
        self._drop(generation)
        name = _name(generation, members)
        if (generation, name) in self._opening:
            return
        future: Future[Group] = Future()
        self._opening[(generation, name)] = future
        rank, size = members.index(self._me), len(members)

        def open_it() -> None:
            try:
                communicator = connect_group(self._rendezvous(), name, rank, size, self._timeouts.peer)
                knowledge = tuple(communicator.gather(self._knows()))
                self._begin_pairs(communicator, pairs)
                future.set_result((communicator, knowledge))
            except Exception as error:
                # a new error without the traceback, which would keep the store's connection open until it is collected
                future.set_exception(CapslogError(f"the group of generation {generation} cannot be opened: {error}"))

        OwnedThread(f"connect-{generation}", open_it, future.set_exception).start()

    def meet(self, generation: int, members: Sequence[Member], pairs: Pairs) -> None:
        """Begin to open the group of a planned change, which waits for it; see `begin` and `has_met`."""
        self._meet_until = time.monotonic() + self._timeouts.gather
        self.begin(generation, members, pairs)

    def has_met(self, record: Generation, changes: Iterable[Change], dead: set[Member]) -> bool:
        """True where the group of the generation after these changes is open, or need not be waited for: a joining
        member that does not come delays a change by `Timeouts.gather` at most.
        """
        stay = stay_with(record, frozenset(changes))
        hopeless = time.monotonic() > self._meet_until or not dead.isdisjoint(stay)
        opening = self._opening.get((record.number + 1, _name(record.number + 1, stay)))
        if hopeless or opening is None:
            return True
        if not opening.done():
            return False
        return opening.exception() is not None or opening.result()[0].pair_groups_settled

    def take(self, record: Generation) -> Group | None:
        """Return the open group of a generation; None where it could not be opened or one of its members is lost."""
        self._inbox.engage(record.number, frozenset(record.members))
        self.begin(record.number, record.members)
        future = self._opening.pop((record.number, _name(record.number, record.members)))
        while not future.done():
            if self._inbox.disturbed():
                future.add_done_callback(_throw_away)
                return None
            with contextlib.suppress(TimeoutError):
                future.exception(timeout=_LOOK_SECONDS)
        if future.exception() is not None:
            return None
        group = future.result()
        self._communicator = group[0]
        self._inbox.guard(group[0])
        if self._inbox.disturbed():
            return None
        if self._old is not None:  # ending it takes ten milliseconds, which training need not wait for
            OwnedThread("end-group", self._old.abort, logged).start()
            self._old = None
        return group

    def leave(self, planned: bool) -> None:
        """Stop using the communicator of the present generation. planned: all members have voted for the change, so
        none waits for this one: the communicator is aborted only once the next one is open.
        """
        self._inbox.guard(None)
        communicator, self._communicator = self._communicator, None
        if planned:
            self._old = communicator or self._old
        elif communicator is not None:
            communicator.abort()

    def barrier(self) -> None:
        """Wait for all members of the generation. Raises PeerLost."""
        assert self._communicator is not None
        self._communicator.barrier()

    def close(self) -> None:
        """Abort all communicators, also those that are being opened."""
        self._drop()
        for communicator in (self._communicator, self._old):
            if communicator is not None:
                communicator.abort()

    def _drop(self, generation: int | None = None) -> None:
        """Abort groups that were opened ahead for generations before this one; None: all."""
        for key in [key for key in self._opening if generation is None or key[0] < generation]:
            self._opening.pop(key).add_done_callback(_throw_away)


def _name(generation: int, members: Iterable[Member]) -> str:
    """Name of a group, unique to its generation and members."""
    return f"{generation}-{hashlib.blake2b(' '.join(members).encode(), digest_size=6).hexdigest()}"


def _throw_away(future: Future[Group]) -> None:
    if future.exception() is None:
        future.result()[0].abort()


# -- The plan of the next generation, known to all members before they copy ahead the layers that move for it.
#
# Where two machines might compute different plans (`Work.proposes`), one member searches the plan: for a planned change
# the first voter, which sends it to the others; else the member that founds the generation. The record contains it.
# As soon as a generation trains, the first voter also searches plans for likely next changes, in a thread beside
# training, so that no member waits for them. It sends them to the others, since it may be lost itself.


class Proposals:
    """Plans of generations that may follow the present one, by their members. Called by the member's one thread."""

    def __init__(self, me: Member, work: Work, peers: Peers, place: Place) -> None:
        self._me, self._work, self._peers, self._place = me, work, peers, place
        self.known: dict[tuple[Member, ...], Plan | None] = {}
        self._newest = 0

    def settle(self, record: Generation, seats: Sequence[Seat]) -> bool:
        """True where the plan of these members is known here; the first voter searches it and sends it to all."""
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

    def record(self, members: Sequence[Member], plan: Any) -> None:
        """Record a plan that the first voter has sent. Raises CapslogError for a text that is no plan."""
        self.known[tuple(members)] = None if plan is None else Plan.from_json(plan, "the plan of the next generation")

    def look_ahead(self, record: Generation, seats: Sequence[Seat]) -> None:
        """Begin to search plans of generations that may follow this one; only its first voter does."""
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
        """Return the plan for the record of a generation of these seats; searched here if no member has sent it."""
        members = _members(seats)
        if members not in self.known:
            self.known[members] = self._work.propose(seats)
        return self.known[members]

    def place(self, seats: Sequence[Seat], plan: Plan | None = None) -> MemberLayout | str:
        """Return the layers that each member would own and copy, by a known plan if any; see `recovery.Place`."""
        return self._place(seats, plan or self.known.get(_members(seats)))


def _members(seats: Sequence[Seat]) -> tuple[Member, ...]:
    return tuple(seat.member for seat in seats)
