"""Runs one member: passes events to `protocol.step` and executes the effects that it returns, in one thread.

`inbox` collects events, `parts` sorts messages, `membership/entries` reads the log, `effects` executes, `training`
trains. Every sign of a lost peer (the inbox's "lost", a `DeadEntry`, `PeerLost`, a time limit) is fed as `Broken`.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from varuna_capslog.base import files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError, DiskFailed
from varuna_capslog.elastic.host.hooks import notice_of
from varuna_capslog.elastic.member.effects import Effects
from varuna_capslog.elastic.member.holdings import Holdings
from varuna_capslog.elastic.member.inbox import Inbox
from varuna_capslog.elastic.member.parts import ChangeReport, Incoming, Parts
from varuna_capslog.elastic.member.process_groups import ProcessGroups, Proposals
from varuna_capslog.elastic.member.start_up import MemberStart, RuntimeOptions, WaitingTime
from varuna_capslog.elastic.member.training import NotApplied, Training
from varuna_capslog.elastic.member.work import Work
from varuna_capslog.elastic.notices.interface import Kind, Notice
from varuna_capslog.elastic.store.opening import MembershipStore, StoreGone
from varuna_capslog.membership import entries, protocol
from varuna_capslog.membership import messages as m
from varuna_capslog.membership.changes import Job, Phase, State, find_ahead, stay_with
from varuna_capslog.membership.entries import HintEntry, NoticeEntry, Roster
from varuna_capslog.membership.generation import Member
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.small_motion import LINK

__all__ = ["End", "NoticePolicy", "Runtime", "take_part"]

# -- Turns a notice into a request to the protocol, by its kind, its deadline and the bytes that must still move.
#
# - A hint asks for shadow copies: layers that would move are copied ahead, and no member leaves.
# - A notice to leave asks for a planned change: layers are copied ahead, then it is made at a step boundary.
# - A notice to leave now asks for the change at the next boundary, even if nothing is copied ahead.
# - Where the move cannot be finished in time, layers that no other member holds are written to a checkpoint first.


CHANGE_SECONDS = 1.0
"""Assumed seconds of a change, without two steps and the transfer of layers, which are added."""


class NoticePolicy:
    """Turns the log's notices and hints into events of one member's protocol. Called by the member's thread."""

    def __init__(self, parts: Parts, training: Training) -> None:
        self._me, self._parts, self._training = parts.me, parts, training
        self._mine: Notice | None = None  # with the earliest deadline
        self._gave_up = 0  # the generation in which its deadline was found too close to prepare
        self._known: tuple[tuple[frozenset[m.Change], Member, int, int], Mapping[int, int]] | None = None

    def event_of(self, entry: NoticeEntry | HintEntry, state: State) -> m.ProtocolEvent:
        """Return the protocol's event for a notice or hint in the log."""
        member, notice = entry.member, notice_of(entry, entry.member)
        if member == self._me and notice.deadline is not None:
            before = self._mine.deadline if self._mine is not None else None
            if before is None or notice.deadline.at < before.at:
                self._mine = notice
        return self._event(notice, member, state)

    def watch(self, state: State) -> m.ProtocolEvent | None:
        """Return an urgent wish to leave once this member's deadline is too close to copy ahead; called every step."""
        notice, number = self._mine, state.record.number
        if (
            notice is None
            or self._gave_up == number
            or ("leave", self._me) not in state.wishes.changes
            or state.wishes.urgent
        ):
            return None
        return self._event(notice, self._me, state) if self._is_late(notice, self._me, state) else None

    def _event(self, notice: Notice, member: Member, state: State) -> m.ProtocolEvent:
        if notice.kind is Kind.HINT:
            return m.Hint(("leave", member))
        late, save = self._is_late(notice, member, state), False
        if late:
            changes = state.wishes.changes | {("leave", member)}
            layout, stay = state.roles.layout, stay_with(state.record, changes)
            # the remaining members do not hold all layers: a checkpoint must come first
            save = layout is not None and bool(stay) and not layout.covers(stay)
            if member == self._me:
                self._gave_up = state.record.number
        return m.Wished(("leave", member), urgent=late or notice.kind is Kind.NOW, save=save)

    def _is_late(self, notice: Notice, member: Member, state: State) -> bool:
        """True where the deadline comes before the member's layers can have moved."""
        if notice.kind is Kind.HINT or notice.deadline is None:
            return False
        return notice.deadline.remaining(time.monotonic()) < self._move_seconds(member, state)

    def _move_seconds(self, member: Member, state: State) -> float:
        """Estimated seconds until no other member needs `member` any more."""
        remaining_bytes = sum(
            size for layer, size in self._moves(member, state).items() if not self._training.is_sent(layer)
        )
        return remaining_bytes / LINK + 2 * self._training.usual_seconds + CHANGE_SECONDS

    def _moves(self, member: Member, state: State) -> Mapping[int, int]:
        """Layer -> bytes that the member has to send when it leaves."""
        sizes, seats, proposals = self._parts.work.layer_bytes, self._parts.seats, self._parts.proposals
        # a vote may name a joining member before its `AskEntry` is read here
        known_changes = {change for change in state.wishes.changes if change[1] in seats}
        changes = frozenset(known_changes | {("leave", member)})
        if state.roles.layout is None or member not in state.record.members:
            return {}
        key = (changes, member, state.record.number, len(proposals.known))
        if self._known is None or self._known[0] != key:
            ahead = find_ahead(member, state.record, state.roles.layout, changes, seats, proposals.place, sizes)
            self._known = (key, {layer: sizes[layer] * len(targets) for layer, targets in ahead.targets.items()})
        return self._known[1]


# -- The main loop of one member


_FLUSH_SECONDS = 5.0
_LISTEN_SECONDS = 1.0
_MEMORY = "memory"
"""Kind of a failure that ends the run for all members; each of them writes the states that it holds."""


@dataclass(frozen=True)
class End:
    """End of a member's part. step: the last applied one. stopped: on request. released: it left, or others ended."""

    step: int
    stopped: bool
    released: bool


class Runtime:
    """Main loop of one member."""

    def __init__(self, start: MemberStart, work: Work, store: MembershipStore, options: RuntimeOptions) -> None:
        self.me = me = start.me
        self._start, self._store = start, store
        self._timeouts = timeouts = options.timeouts
        report = ChangeReport()
        job = Job(work.layer_bytes, report.timed(work.place), options.sync, options.shadows)
        self.roster = Roster()
        self.inbox = Inbox(start, store)
        path = ProcessGroups(me, self.inbox, store.rendezvous, timeouts, work.knows, work.begin_pairs)
        peers = self.inbox.peers
        proposals = Proposals(me, work, peers, job.place)
        self.parts = Parts(me, work, job, Holdings(work), peers, path, options.probe, report, proposals)
        self.state = State(me, start.host, options.capacity, checkpoint=start.checkpoint)
        self.training = Training(self.parts, self)
        self._notices = NoticePolicy(self.parts, self.training)
        self._incoming = Incoming(self.parts)
        self._effects = Effects(self.parts, store, self.training, self)
        self._events: deque[m.ProtocolEvent] = deque()
        self._feeding = False
        self._end: End | None = None
        self._waiting = WaitingTime(timeouts)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> End:
        """Take part until the run ends, this member is released, or it fails.

        Raises:
            StepRefused: a step was voted down; the held states are on disk.
            DiskFailed: the run's folder cannot be written, which ends the run for all members.
            CapslogError: the store is lost at a change (all is on disk), or this member was declared lost or failed.
        """
        try:
            self._catch_up()
            if self._end is None:
                self.feed(m.Enter())
            while self._end is None:
                if self.training.todo is not None:
                    with self.inbox.busy(self._timeouts.without_events(self.training.usual_seconds)):
                        self.training.step()
                else:
                    self._listen()
            return self._end
        except DiskFailed as error:
            self._end_for_all(error)
            raise
        except OSError as error:  # of a log or a TensorBoard file, which are written beside the rest
            if not files.is_full(error):
                raise
            why = f"a record of {self.me} cannot be written: {error.strerror}; free space or choose another run_dir"
            self._end_for_all(full := DiskFailed(why))
            raise full from error
        finally:
            self.inbox.close(_FLUSH_SECONDS)
            self.parts.path.close()
            self.parts.holdings.close()

    def look_at_deadline(self) -> None:
        """Check before a step if the deadline of this member is now too close to copy its layers ahead."""
        event = self._notices.watch(self.state)
        if event is not None:
            self.feed(event)

    @property
    def ended(self) -> bool:
        """True once this member has finished, stopped or been released."""
        return self._end is not None

    def end(self, stopped: bool) -> None:
        """End the run at the present boundary, once everything is written."""
        step = self.state.at.step
        self.append(entries.FinishedEntry(step, stopped, self.parts.work.asked))
        self._end = End(step, stopped, False)

    def release(self) -> None:
        """Release this member: it has no part in the run any more."""
        self._end = End(self.state.at.step, False, True)

    def stop_for_memory(self, why: str) -> NoReturn:
        """Write what this member holds and end the run for all, who do the same. Raises CapslogError with `why`."""
        self._one_event(m.Broken(self.state.record.number))
        self._persist(why)
        failure = {"member": self.me, "cause": why, "kind": _MEMORY, "time": wall_seconds()}
        self.append(entries.FinishedEntry(self.state.at.step, stopped=True, failure=failure))
        raise CapslogError(why)

    def _persist(self, why: str) -> None:
        held = self.parts.holdings.everything(self.state.held)
        self.parts.work.persist(held, self.state.record)
        about = {"states": len(held), "member": self.me, "generation": self.state.record.number}
        self.parts.work.note("persisted", why=why, **about)

    def _end_for_all(self, error: DiskFailed) -> None:
        """End the run for all members: another member that wrote instead would fail in the same way."""
        failure = {"member": self.me, "cause": str(error), "kind": error.kind, "time": wall_seconds()}
        self.append(entries.FinishedEntry(self.state.at.step, stopped=True, failure=failure))

    def _catch_up(self) -> None:
        """Read the log up to now; earlier entries need no answer from this member.

        In a new run, wait for the first generation, which a host founds once all members that begin together are named:
        a member that asks earlier would found one with itself alone. After `Timeouts.change` the member asks anyway.
        """
        self._store.append(entries.HelloEntry(self.me, self._start.host).to_json())
        answer = f"the store's log does not answer {self.me} within {self._timeouts.peer:g} s"
        until = time.monotonic() + self._timeouts.peer
        while True:
            try:
                kind, payload = self.inbox.events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise StoreGone(answer) from None
            if kind == "log":
                until = time.monotonic() + self._timeouts.peer  # a long log may take longer than any one answer
            entry = self._heard_outside(kind, payload)
            if self._end is not None or entry == entries.HelloEntry(self.me, self._start.host):
                break
        until = time.monotonic() + self._timeouts.change
        while self._end is None and self.roster.generation.number == 0 and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                self._heard_outside(*self.inbox.events.get(timeout=max(0.0, until - time.monotonic())))

    def _heard_outside(self, kind: str, payload: Any) -> entries.Entry | None:
        """Handle an event that comes before this member asks to take part; return it if it is an entry of the log."""
        if kind == "mail":
            self._incoming.add(payload)
        elif kind == "store lost":
            raise StoreGone(str(payload))
        elif kind == "failed":
            raise payload
        elif kind == "log":
            entry = self._note(payload)
            if isinstance(entry, entries.FinishedEntry):
                self._end = End(entry.step, False, True)
            return entry
        return None

    def _listen(self) -> None:
        """Wait for the next event, at most until the present time limit."""
        wait = self._limit() - time.monotonic()
        try:
            kind, payload = self.inbox.events.get(timeout=max(0.0, min(wait, _LISTEN_SECONDS)))
        except queue.Empty:
            if self.state.phase is Phase.WAIT and self._start.stop_wished():  # all is on disk
                self._end = End(self.state.at.step, True, False)
            elif time.monotonic() >= self._limit():
                self._limit_passed()
            return
        with self.inbox.busy(self._timeouts.without_events(self.training.usual_seconds)):
            self._happened(kind, payload)
            self.drain()

    def drain(self) -> None:
        """Take all events in the inbox."""
        with contextlib.suppress(queue.Empty):
            while self._end is None:
                self._happened(*self.inbox.events.get_nowait())

    def _happened(self, kind: str, payload: Any) -> None:
        if kind == "mail":
            self._incoming.add(payload)
            self.feed()
        elif kind == "log":
            self._take_entry(payload)
        elif kind == "lost" and self.inbox.is_engaged(payload):
            self.feed(m.Broken(self.state.record.number))
        elif kind == "store lost":
            self.feed(m.StoreLost())
        elif kind == "failed":
            raise payload

    def _note(self, value: Mapping[str, Any]) -> entries.Entry | None:
        """Take and return an entry of the log, whatever the phase of this member."""
        entry = self.roster.take(value)
        if isinstance(entry, entries.DeadEntry) and entry.member == self.me:
            raise CapslogError(f"{self.me} was declared lost ({entry.why}); a new member may take its place")
        if isinstance(entry, entries.AskEntry):
            self.parts.seats[entry.member] = Seat(entry.member, entry.host or entry.member, entry.capacity)
        return entry

    def _suspected(self) -> frozenset[Member]:
        """Members that will not answer any more. Once a generation trains, members that left it are not waited for."""
        roster = self.roster
        return frozenset(roster.dead if self.state.phase is Phase.RUN else roster.dead | roster.gone)

    def _take_entry(self, value: Mapping[str, Any]) -> None:
        entry = self._note(value)
        match entry:
            case entries.GenerationEntry():
                self.feed(m.StoreSays(self.roster.generation))
            case entries.DeadEntry(member) | entries.LeftEntry(member):
                self.feed(m.Suspects(self._suspected()))
                if isinstance(entry, entries.DeadEntry) and self.inbox.is_engaged(member):
                    self.feed(m.Broken(self.state.record.number))
            case entries.BrokenEntry(generation, member) if member != self.me:
                self.feed(m.Broken(generation))
            case entries.AskEntry(member) if member not in self.roster.dead and member != self.me:
                self.feed(m.Wished(("join", member)))
            case entries.NoticeEntry() | entries.HintEntry():
                self.feed(self._notices.event_of(entry, self.state))
            case entries.FinishedEntry():
                self._end_with_others()

    def _end_with_others(self) -> None:
        """End this member's part once the log says that the run has ended. A member that trains reaches the end itself,
        unless the run ended by a failure that would stop every member.
        """
        finished = self.roster.finished
        if finished is None or self._end is not None:
            return
        if finished.failure is not None and finished.failure.get("kind") == _MEMORY and self.state.held:
            self._persist(str(finished.failure.get("cause")))
        if self.state.phase is not Phase.RUN or finished.failure is not None:
            self._end = End(finished.step, False, True)

    # -- time limits --------------------------------------------------------------------------------------------------

    def _limit(self) -> float:
        """Time at which this member stops waiting if nothing happens."""
        return self._waiting.ends(self.state, self.training.usual_seconds, self.training.waits_since, self.roster)

    def _limit_passed(self) -> None:
        self._waiting.limit_passed()
        phase, record = self.state.phase, self.state.record
        heard = {heard.sender for heard in self.state.heard if (heard.generation, heard.round) == (record.number, 0)}
        if phase is Phase.GATHER and not set(record.participants) - heard <= self.roster.here:
            return  # a participant is still loading; its host reports it if it is lost
        if phase in (Phase.GATHER, Phase.INSTALL, Phase.RUN):
            # some member does not answer; its host kills it as hung (`HostWorkers.kill_hung`)
            self.feed(m.Broken(record.number))
            return
        self.feed(m.Tick())

    # -- events in, effects out ---------------------------------------------------------------------------------------

    def feed(self, *events: m.ProtocolEvent) -> None:
        """Give events to the protocol and execute its effects, until no further event follows."""
        self._events.extend(events)
        if self._feeding:
            return
        self._feeding = True
        try:
            while True:
                while self._events and self._end is None:
                    self._one_event(self._events.popleft())
                if self._end is not None:
                    return
                self._events.extend(self._incoming.sort(self.state))
                self.training.check_copies()
                if not self._events:
                    return
        finally:
            self._feeding = False

    def _one_event(self, event: m.ProtocolEvent) -> None:
        before = self.state
        self.state, effects = protocol.step(self.parts.job, before, event)
        if self.state.phase is not before.phase or self.state.record.number != before.record.number:
            self._waiting.restart(self.state)
        if self.state.record.number != before.record.number:
            self._adopted()
        try:
            for effect in effects:
                self._events.extend(self._effects.carry_out(effect))
        except NotApplied as failed:  # Apply is the first effect of a tally, which is taken back as if it was lost
            self.state = before
            event = self.training.pressed(before.round, failed.lack, voted=True)
            self._one_event(event)
            return
        self.parts.holdings.forget(self.state.held)
        if self.state.phase is Phase.SERVE and before.phase is not Phase.SERVE:
            self.parts.probe("serve")
        self._end_with_others()

    def _adopted(self) -> None:
        """Adopt a newer generation: drop all that belongs only to the old generation."""
        record = self.state.record
        self.parts.holdings.adopt()
        self.parts.proposals.known.clear()
        self.training.adopt()
        inside = self.me in record.participants
        self.inbox.engage(record.number, frozenset(record.participants) if inside else frozenset())
        self.parts.peers.keep(record.participants)
        if self.state.phase is Phase.GATHER and self.roster.here >= set(record.members):
            self.parts.path.begin(record.number, record.members)
        if suspected := self._suspected():
            self._events.append(m.Suspects(suspected))
        self.parts.probe("adopted")

    def append(self, entry: entries.Entry) -> None:
        """Append an entry to the log; dropped if the store is lost, which the next change of the generation notices."""
        with contextlib.suppress(StoreGone):
            self._store.append(entry.to_json())


def take_part(
    start: MemberStart,
    store: MembershipStore,
    work: Work,
    options: RuntimeOptions,
    runtime: type[Runtime] = Runtime,
) -> tuple[End, int]:
    """Take part until the run ends or this member is released, and close the work. Raises CapslogError as
    `Runtime.run`. Returns the end, and its exit status: 0, or 130 where a person asked for the stop.
    """
    try:
        end = runtime(start, work, store, options).run()
    finally:
        work.close()
    return end, 130 if end.stopped and work.asked else 0
