"""Executes the protocol's effects at one member: store requests, messages, transfers of states, groups, steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.elastic.member.parts import MemberLoop, Parts, encode
from varuna_capslog.elastic.member.training import Training
from varuna_capslog.elastic.member.work import Opening
from varuna_capslog.elastic.store.opening import MembershipStore, StoreGone
from varuna_capslog.engine.communicator import PeerLost
from varuna_capslog.engine.pair_groups import NotOpened
from varuna_capslog.membership import messages as m
from varuna_capslog.membership.changes import Phase, first_owner, stay_with
from varuna_capslog.membership.entries import AskEntry, BrokenEntry
from varuna_capslog.membership.generation import INITIAL, Generation, Member
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.small_motion import Loss, Weighed, follows_a_loss
from varuna_capslog.plans.plan import Plan

__all__ = ["Effects"]

_OPENINGS = 5
"""Attempts in a row to open the communicator's pair groups, after which a member gives up."""


class Effects:
    """Executor of the protocol's effects for one member. Called by its one thread."""

    def __init__(self, parts: Parts, store: MembershipStore, training: Training, loop: MemberLoop) -> None:
        self._parts, self._store, self._training, self._loop = parts, store, training, loop
        self._decided: m.Decided | None = None
        self._refused: str | None = None
        self._not_opened = 0

    def carry_out(self, effect: m.Effect) -> Iterable[m.ProtocolEvent]:
        """Execute an effect, in the protocol's order, and return the events that follow at once.

        Raises:
            StepRefused: a step was voted down; the states that this member held are on disk.
            CapslogError: the store is lost at a change (all is on disk), or the work failed.
        """
        work, probe, state = self._parts.work, self._parts.probe, self._loop.state
        match effect:
            case m.ReadStore():
                return self._ask_store(lambda: self._store.read(state.record.number))
            case m.CompareAndSet():
                probe("founding")
                record = self._with_plan(effect.record)
                answer = self._ask_store(lambda: self._store.compare_and_set(effect.expected, record))
                probe("founded")
                return answer
            case m.Cast(_, _, m.Contribution()):
                return self._bring(effect)
            case m.Cast():
                return self._training.vote(effect)
            case m.Compute():
                self._training.todo = effect
            case m.Apply():
                self._training.apply(effect)
            case m.Abort():
                self._abort(effect.generation)
            case m.Send():
                probe("send")
                lies = self._parts.holdings.at(effect.layer, effect.stamp)
                self._parts.send_state("layer", effect.target, effect.generation, effect.layer, effect.stamp, lies)
            case m.Load(generation, layer, stamp):
                read = work.initial(layer) if stamp == INITIAL else work.load(layer, stamp)
                self._parts.holdings.take(layer, stamp, read)
                return (m.Received(generation, layer),)
            case m.Decided():
                self._gathered(effect)
            case m.Install():
                return self._install(effect)
            case m.Prepare(hinted=True):
                self._training.prepare(effect.changes, hinted=True)
            case m.Prepare():
                self._prepare(effect)
            case m.SaveAll():
                self._training.save_all = True
            case m.LetLeave():
                for member in effect.members:
                    self._parts.peers.send(member, "farewell", generation=effect.generation)
            case m.Ask():
                self._loop.append(AskEntry(state.me, state.host, state.capacity))
            case m.Persist():
                probe("persist")
                held = self._parts.holdings.everything(state.held)
                work.persist(held, state.record)
                about = {"states": len(held), "member": self._parts.me, "generation": state.record.number}
                work.note("persisted", why=effect.why, **about)
                if state.phase is Phase.STOPPED and self._refused is not None:
                    raise StepRefused(self._refused)
                if state.phase is Phase.STOPPED:
                    why = f"{effect.why}; what this member held is on disk, and the same command continues the run"
                    raise CapslogError(why)
            case m.Wait():
                work.note("waiting", why=effect.why, generation=state.record.number)
            case m.Discard():
                self._refused = work.discard(effect.step)
            case m.Release():
                self._loop.release()
        return ()

    def _ask_store(self, question: Callable[[], Generation]) -> tuple[m.ProtocolEvent, ...]:
        try:
            return (m.StoreSays(question()),)
        except StoreGone:
            return (m.StoreLost(),)

    def _with_plan(self, record: Generation) -> Generation:
        """Return the record with a plan for its members: after a loss perhaps a small motion's, with the copies that
        exist. Without a plan while a member's seat is unknown here.
        """
        seats = [self._parts.seats.get(member) for member in record.members]
        known_seats = [seat for seat in seats if seat is not None]
        if not known_seats or len(known_seats) < len(seats):
            return record
        began = time.perf_counter()
        plan = self._parts.proposals.of(known_seats)
        weighed = self._weighed(record, known_seats, plan)
        self._parts.report.proposal_seconds = time.perf_counter() - began
        if weighed is not None:
            plan, copies = weighed.plan or plan, weighed.copies
            return dataclasses.replace(record, plan=plan, copies=copies, motion=weighed.event_fields)
        return record if plan is None else dataclasses.replace(record, plan=plan)

    def _weighed(self, record: Generation, seats: Sequence[Seat], plan: Plan | None) -> Weighed | None:
        state, parts = self._loop.state, self._parts
        before, members = state.roles.layout, state.record.members
        if before is None or not follows_a_loss(state, record):
            return None
        usual, gap = self._training.usual_seconds, parts.report.gap_seconds
        back = usual * max(0, state.at.step - state.checkpoint.step)
        return parts.work.weigh(Loss(before, members, seats, plan, parts.peers.rate, usual, gap, back))

    # -- the first round ----------------------------------------------------------------------------------------------

    def _bring(self, effect: m.Cast) -> Iterable[m.ProtocolEvent]:
        """Send this member's contribution to all participants and to itself; the protocol collects the values."""
        assert isinstance(effect.value, m.Contribution)
        value = dataclasses.replace(effect.value, proofs=self._proofs())
        text = encode(value).decode()
        for member in self._loop.state.record.participants:
            if member != self._parts.me:
                self._parts.peers.send(member, "value", generation=effect.generation, value=text)
        self._parts.holdings.catch_up(self._training.coming_own)  # while the others' contributions are on their way
        return (m.Heard(effect.generation, 0, self._parts.me, value),)

    def _proofs(self) -> frozenset[m.Proof]:
        """Digests of layers that were copied ahead, from this member as their owner or as holder of the copy. An owner
        gives those that were begun beside training, of the boundary where the copies are; without them it gives both
        of its boundaries.
        """
        state, holdings = self._loop.state, self._parts.holdings
        proofs = set()
        for layer in state.roles.own & self._training.sent_ahead:
            stamps = [stamp for number, stamp in state.held if number == layer]
            begun = [stamp for stamp in stamps if holdings.has_digest(layer, stamp)]
            proofs |= {m.Proof(layer, stamp, True, holdings.digest_at(layer, stamp).hex()) for stamp in begun or stamps}
        for layer in state.roles.shadows:
            stamp = holdings.stands_at(layer, state.held)
            if stamp is not None:
                proofs.add(m.Proof(layer, stamp, False, holdings.digest_at(layer, stamp).hex()))
        return frozenset(proofs)

    def _gathered(self, effect: m.Decided) -> None:
        """Store the result of the first round, which is the same at all participants."""
        self._parts.probe("gathered")
        self._decided = effect
        # all participants are loaded now: the group can open, if that has not begun
        self._parts.path.begin(effect.generation, self._loop.state.record.members)
        if effect.distrusted:
            layers = sorted(effect.distrusted)
            self._parts.work.note("damaged", layers=layers, generation=effect.generation)
        for member, value in effect.values.items():
            self._parts.seats[member] = Seat(member, value.host, value.capacity)
        self._parts.report.decided()

    # -- planned changes ----------------------------------------------------------------------------------------------

    def _prepare(self, effect: m.Prepare) -> None:
        if not self._training.prepare(effect.changes):
            return
        self._parts.probe("prepare")
        record = self._loop.state.record
        stay, coming = stay_with(record, effect.changes), self._training.coming
        pairs = sorted(self._parts.work.pairs(coming)) if coming is not None else []
        if self._parts.me in stay:
            for member in set(stay) - set(record.members):
                self._parts.peers.send(member, "meet", generation=record.number, members=stay, pairs=pairs)
        self._parts.path.meet(record.number + 1, stay, pairs)

    # -- from one generation to the next ------------------------------------------------------------------------------

    def _abort(self, generation: int) -> None:
        """End this member's part in the generation; unless that was planned, report the generation as broken."""
        self._parts.probe("abort")
        self._training.abort()
        self._parts.holdings.shelve(self._loop.state.held)
        self._parts.path.leave(self._loop.state.wishes.planned)
        if not self._loop.state.wishes.planned:
            self._loop.append(BrokenEntry(generation, self._parts.me))

    def _install(self, effect: m.Install) -> Iterable[m.ProtocolEvent]:
        parts, record, decided = self._parts, self._loop.state.record, self._decided
        parts.probe("install")
        assert decided is not None
        assert decided.generation == effect.generation
        broken = (m.Broken(effect.generation),)
        group = self._parts.path.take(record)
        if group is None:
            return broken
        communicator, knowledge = group
        states = parts.holdings.all_at(sorted(self._loop.state.roles.own), effect.base)
        parts.report.opened(record.members, self._loop.roster.dead, decided.moved_bytes)
        opening = Opening(
            record.number, effect.base, effect.layout, record.members, parts.report.why, decided.moved_bytes, knowledge
        )
        try:
            parts.work.open(opening, communicator, states)
        except NotOpened as error:
            self._not_opened += 1
            if self._not_opened >= _OPENINGS:
                raise CapslogError(
                    f"{error}; that was so {_OPENINGS} times in a row: mend what keeps the devices from connecting, or "
                    "set pipeline.transport=gloo"
                ) from error
            return broken
        except PeerLost:
            return broken
        self._not_opened = 0
        parts.holdings.open(self._loop.state.roles.own, self._loop.state.roles.copies, effect.base)
        self._send_copies(effect, decided.values)
        seats = [parts.seats[member] for member in record.members if member in parts.seats]
        parts.proposals.look_ahead(record, seats)
        parts.report.before = record.members
        parts.probe("installed")
        if record.copies is not None and parts.me == record.members[0]:  # the first vote asks for new cuts already
            return (m.Wished(("rebalance", parts.me)),)
        return ()

    def _send_copies(self, effect: m.Install, brought: Mapping[Member, m.Contribution]) -> None:
        """Send the copies that other members lack and this one sends as first owner."""
        parts, base, layout, members = self._parts, effect.base, effect.layout, self._loop.state.record.members
        for member in members:
            for layer in layout.copied.get(member, ()):
                lacks = member != self._parts.me and (layer, base) not in brought[member].held
                if lacks and first_owner(layer, layout, members) == self._parts.me:
                    state = parts.work.state(layer, copy=not parts.job.sync)
                    parts.send_state("copy", member, effect.generation, layer, base, state)
