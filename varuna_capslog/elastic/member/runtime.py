"""One member at work: feeds `protocol.step` with what happens and carries out what it answers.

The protocol decides, this module acts: it trains while the protocol says Compute, talks to the store and the other
members, and stops at once when a peer is gone. All of it is one thread; `senses` hears for it, `holdings` has the
states, `groups` opens the data path, `training` makes the steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError, DiskFailed, StepRefused
from varuna_capslog.elastic.host.roster import Roster
from varuna_capslog.elastic.member.change_report import Story, reasons
from varuna_capslog.elastic.member.groups import Groups
from varuna_capslog.elastic.member.holdings import Holdings
from varuna_capslog.elastic.member.inbox import Senses
from varuna_capslog.elastic.member.notice_policy import Departures
from varuna_capslog.elastic.member.peers import PeerMessage
from varuna_capslog.elastic.member.runtime_options import RuntimeOptions
from varuna_capslog.elastic.member.timeouts import WaitingTime
from varuna_capslog.elastic.member.training import Training
from varuna_capslog.elastic.member.wire import decode, encode
from varuna_capslog.elastic.member.work import LayerState, Opening, Work
from varuna_capslog.elastic.store.torch_store import MembershipStore, StoreGone
from varuna_capslog.engine.communicator import Communicator, PeerLost
from varuna_capslog.membership import messages as m
from varuna_capslog.membership import protocol
from varuna_capslog.membership.ahead import first_owner, stay_with
from varuna_capslog.membership.first_round import FirstRound, Proof
from varuna_capslog.membership.generation import INITIAL, Generation, Layout, Member, Stamp
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.state import Job, Phase
from varuna_capslog.training.layer_state import digest

__all__ = ["End", "Runtime"]

_FLUSH_SECONDS = 5.0
_LISTEN_SECONDS = 1.0


@dataclass(frozen=True)
class End:
    """How a member's part ended: the last step it applied; asked to stop; released before the run's end."""

    step: int
    stopped: bool
    released: bool


class Runtime:
    """One member of the run.

    Args:
        me: never used before.
        store: its identity is the run's token; see `Peers`.
    """

    def __init__(self, me: Member, work: Work, store: MembershipStore, options: RuntimeOptions | None = None) -> None:
        options = options or RuntimeOptions()
        self.me, self._host = me, options.host
        self._stop_wished = options.stop_wished
        self.work, self._store = work, store
        self._patience = options.patience
        self.probe = options.probe
        self.job = Job(work.layer_bytes, self.place, options.sync, options.shadows)
        self.state = protocol.newcomer(me, options.host, options.capacity, checkpoint=options.checkpoint)
        self.holdings = Holdings(work)
        self.training = Training(self)
        self._departures = Departures(self)
        self.senses = Senses(me, options.host, store, store.identity, options.address)
        self._groups = Groups(me, store.rendezvous, self._patience.peer, work.knows)
        self.communicator: Communicator | None = None
        self._old: Communicator | None = None
        self.roster = Roster()
        self._here: set[Member] = set()
        self.seats: dict[Member, Seat] = {}
        self._events: deque[m.Event] = deque()
        self._feeding = False
        self._mail: list[PeerMessage] = []
        self._first = FirstRound()
        self._round: dict[Member, m.Contribution] = {}
        self._looked = 0
        self._meet_until = 0.0
        self._before: tuple[Member, ...] = ()
        self._end: End | None = None
        self._refused: str | None = None
        self._waiting = WaitingTime(self._patience)
        self.story = Story()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> End:
        """Takes part until the run ends, this member is released, or it fails.

        Raises:
            StepRefused: a step was voted down; what was held is on disk.
            DiskFailed: the run's folder takes no more; that ends the run for all.
            CapslogError: the store is lost at a change (all is on disk), this member was declared lost, or a failure
                of its own.
        """
        try:
            self._catch_up()
            if self._end is None:
                self.feed(m.Enter())
            while self._end is None:
                if self.training.due:
                    with self.senses.busy(self._patience.alone(self.training.usual_seconds)):
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
            self.senses.close(_FLUSH_SECONDS)
            self._groups.drop()
            for communicator in (self.communicator, self._old):
                if communicator is not None:
                    communicator.abort()

    def look_at_deadline(self) -> None:
        """Before a step: a deadline of this member's may have come too close for what was planned."""
        event = self._departures.watch()
        if event is not None:
            self.feed(event)

    @property
    def ended(self) -> bool:
        """Whether its part is over."""
        return self._end is not None

    def end(self, stopped: bool) -> None:
        """The run has ended with the present boundary, and all is written."""
        step = self.state.at.step
        self.append({"kind": "finished", "step": step, "stopped": stopped, "asked": self.work.asked})
        self._end = End(step, stopped, False)

    def _end_for_all(self, error: DiskFailed) -> None:
        """Whoever took the writing over would fail in the same way, and its disk could not even tell why."""
        failure = {"member": self.me, "cause": str(error), "kind": "user", "time": time.time()}
        self.append({"kind": "finished", "step": self.state.at.step, "stopped": True, "failure": failure})

    def _catch_up(self) -> None:
        """Reads the log up to now: of what was before this member its own wish to come matters to nobody yet."""
        self._store.append({"kind": "hello", "member": self.me, "host": self._host})
        until = time.monotonic() + self._patience.peer
        while True:
            try:
                kind, what = self.senses.inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise StoreGone(f"the store's log does not answer {self.me} within {self._patience.peer:g} s") from None
            if kind == "mail":
                self._mail.append(what)
            elif kind == "store lost":
                raise StoreGone(str(what))
            elif kind == "log":
                until = time.monotonic() + self._patience.peer  # a long log may take longer than any one answer
                self._note(what)
                if what.get("kind") == "finished":
                    self._end = End(int(what.get("step", 0)), False, True)
                if what.get("kind") == "hello" and what.get("member") == self.me:
                    return

    def _listen(self) -> None:
        """Waits for something to happen, at most until patience is at an end."""
        wait = self._loses_patience() - time.monotonic()
        try:
            kind, what = self.senses.inbox.get(timeout=max(0.0, min(wait, _LISTEN_SECONDS)))
        except queue.Empty:
            if self.state.phase is Phase.WAIT and self._stop_wished():  # all is on disk
                self._end = End(self.state.at.step, True, False)
            elif time.monotonic() >= self._loses_patience():
                self._patience_ends()
            return
        with self.senses.busy(self._patience.alone(self.training.usual_seconds)):
            self._happened(kind, what)
            self.drain()

    def drain(self) -> None:
        """Takes all that has been heard."""
        with contextlib.suppress(queue.Empty):
            while self._end is None:
                self._happened(*self.senses.inbox.get_nowait())

    def _happened(self, kind: str, what: Any) -> None:
        if kind == "mail":
            self._mail.append(what)
            self.feed()
        elif kind == "log":
            self._logged(what)
        elif kind == "lost" and self.senses.is_engaged(what):
            self.feed(m.Broken(self.state.record.number))
        elif kind == "store lost":
            self.feed(m.StoreLost())

    def _note(self, entry: Mapping[str, Any]) -> None:
        """What an entry says whatever this member is at."""
        self.roster.take(entry)
        kind, member = entry.get("kind"), str(entry.get("member"))
        if kind == "dead" and member == self.me:
            raise CapslogError(f"{self.me} was declared lost ({entry.get('why')}); a new member may take its place")
        if kind == "hello":
            self._here.add(member)
        elif kind == "ask":
            self.seats[member] = Seat(member, str(entry.get("host", member)), int(entry.get("capacity", 0)))

    def _logged(self, entry: Mapping[str, Any]) -> None:
        self._note(entry)
        kind, member = entry.get("kind"), str(entry.get("member"))
        if kind == "generation":
            self.feed(m.StoreSays(self.roster.generation))
        elif kind in ("dead", "left"):
            self.feed(m.Suspects(self._suspected()))
            if kind == "dead" and self.senses.is_engaged(member):
                self.feed(m.Broken(self.state.record.number))
        elif kind == "broken" and member != self.me:
            self.feed(m.Broken(int(entry["generation"])))
        elif kind == "ask" and member not in self.roster.dead and member != self.me:
            self.feed(m.Asked(member))
        elif kind in ("notice", "hint"):
            self.feed(self._departures.heard(entry))
        elif kind == "finished":
            self._end_with_others()

    def _suspected(self) -> frozenset[Member]:
        """Who will not answer any more. Once a generation trains nobody waits for those that leave it."""
        roster = self.roster
        return frozenset(roster.dead if self.state.phase is Phase.RUN else roster.dead | roster.gone)

    def _end_with_others(self) -> None:
        """All is written, and the others have gone: whoever does not train has no more to do; nor has anybody after a
        failure that is everybody's.
        """
        finished = self.roster.finished
        if finished is None or self._end is not None:
            return
        if self.state.phase is not Phase.RUN or "failure" in finished:
            self._end = End(int(finished.get("step", 0)), False, True)

    # -- patience -----------------------------------------------------------------------------------------------------

    def _loses_patience(self) -> float:
        """When, if nothing happens until then."""
        return self._waiting.ends(self.state, self.training, self.roster)

    def _patience_ends(self) -> None:
        self._waiting.ended()
        phase, record = self.state.phase, self.state.record
        if phase is Phase.GATHER and not self._first.missing(record) <= self._here:
            return  # somebody is still loading, and its supervisor will say if it is lost
        if phase in (Phase.GATHER, Phase.INSTALL, Phase.RUN):
            # somebody does not answer; whoever it is, its supervisor will see that it has not stopped with the rest
            self.feed(m.Broken(record.number))
            return
        self.feed(m.Tick())

    # -- events in, effects out ---------------------------------------------------------------------------------------

    def feed(self, *events: m.Event) -> None:
        """Gives events to the protocol and carries out what it says, until nothing follows any more."""
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
                self._sort_mail()
                self.training.check_copies()
                if not self._events:
                    return
        finally:
            self._feeding = False

    def _one_event(self, event: m.Event) -> None:
        before = self.state
        self.state, effects = protocol.step(self.job, before, event)
        if self.state.phase is not before.phase or self.state.record.number != before.record.number:
            self._waiting.moved(self.state)
        if self.state.record.number != before.record.number:
            self._adopted()
        for effect in effects:
            self._events.extend(self._carry_out(effect))
        self.holdings.forget(self.state.held)
        if self.state.phase is Phase.SERVE and before.phase is not Phase.SERVE:
            self.probe("serve")
        self._end_with_others()

    def _adopted(self) -> None:
        """A newer generation: nothing that was only of the old one is needed any more."""
        record = self.state.record
        self._first = FirstRound()
        self.holdings.adopt()
        self.training.adopt()
        inside = self.me in record.participants
        self.senses.engage(record.number, frozenset(record.participants) if inside else frozenset())
        self.senses.peers.keep(record.participants)
        if self.state.phase is Phase.GATHER and self._here >= set(record.members):
            self._groups.begin(record.number, record.members)
        if suspected := self._suspected():
            self._events.append(m.Suspects(suspected))
        self.probe("adopted")

    def _carry_out(self, effect: m.Effect) -> Iterable[m.Event]:
        match effect:
            case m.ReadStore():
                return self._ask_store(lambda: self._store.read(self.state.record.number))
            case m.CompareAndSet():
                self.probe("founding")
                answer = self._ask_store(lambda: self._store.compare_and_set(effect.expected, effect.record))
                self.probe("founded")
                return answer
            case m.Cast():
                return self._cast(effect)
            case m.Compute():
                self.training.todo = effect
            case m.Apply():
                self.training.apply(effect)
            case m.Abort():
                self._abort(effect.generation)
            case m.Send():
                self.probe("send")
                state = self.holdings.at(effect.layer, effect.stamp)
                self.send_state("layer", effect.target, effect.generation, effect.layer, effect.stamp, state)
            case m.Load():
                layer, stamp = effect.layer, effect.stamp
                state = self.work.initial(layer) if stamp == INITIAL else self.work.load(layer, stamp)
                return self._received(effect.generation, layer, stamp, state)
            case m.Install():
                return self._install(effect)
            case m.Prepare():
                self._prepare(effect)
            case m.CopyAhead():
                self.training.prepare(effect.changes, self.seats, hinted=True)
            case m.SaveAll():
                self.training.save_all = True
            case m.Bid():
                for member in effect.members:
                    self.senses.peers.send(member, "farewell", generation=effect.generation)
            case m.Ask():
                self.append({"kind": "ask", "member": self.me, "host": self._host, "capacity": self.state.capacity})
            case m.Persist():
                self.probe("persist")
                self.work.persist(self.holdings.everything(self.state.held), self.state.record, effect.why)
                if self.state.phase is Phase.STOPPED:
                    self._stopped(effect.why)
            case m.Wait():
                self.work.note("waiting", why=effect.why, generation=self.state.record.number)
            case m.Discard():
                self._refused = self.work.discard(effect.step)
            case m.Release():
                self._end = End(self.state.at.step, False, True)
            case m.Drop():
                pass  # the holdings follow `state.held`
        return ()

    def _stopped(self, why: str) -> None:
        if self._refused is not None:
            raise StepRefused(self._refused)
        raise CapslogError(f"{why}; what this member held is on disk, and the same command continues the run")

    def _ask_store(self, question: Callable[[], Generation]) -> tuple[m.Event, ...]:
        try:
            return (m.StoreSays(question()),)
        except StoreGone:
            return (m.StoreLost(),)

    def append(self, entry: dict[str, Any]) -> None:
        """Tells the log; it only hastens things, and a lost store shows itself at the next change."""
        with contextlib.suppress(StoreGone):
            self._store.append(entry)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _cast(self, effect: m.Cast) -> Iterable[m.Event]:
        if not isinstance(effect.value, m.Contribution):
            return self.training.vote(effect)
        proofs = self._proofs()
        self._first.add(self.me, effect.value, proofs)
        text = encode(effect.value).decode()
        for member in self.state.record.participants:
            if member != self.me:
                self.senses.peers.send(member, "value", generation=effect.generation, value=text, proofs=proofs)
        return self._tally()

    def _proofs(self) -> list[Proof]:
        """Of the layers that moved ahead, as their owner or as holder of the shadow."""
        state, ahead = self.state, self.training.sent_ahead
        layers = [(layer, True) for layer in sorted(state.own & ahead)]
        layers += [(layer, False) for layer in sorted(state.shadows)]
        return [
            Proof(layer, state.at, owner, digest(self.holdings.at(layer, state.at)).hex())
            for layer, owner in layers
            if (layer, state.at) in state.held
        ]

    def _tally(self) -> tuple[m.Event, ...]:
        """The first round, once all values of it are here: the same for everybody who has them."""
        record = self.state.record
        if self.state.phase is not Phase.GATHER or not self._first.is_complete(record):
            return ()
        self.probe("gathered")
        self._groups.begin(record.number, record.members)  # all are here, if they were not before
        damaged = self._first.damaged()
        values = self._round = self._first.values(record, damaged)
        if damaged:
            mine = frozenset(entry for entry in self.state.held if (self.me, entry[0]) in damaged)
            self.state = dataclasses.replace(self.state, held=self.state.held - mine)
            self.work.note("damaged", layers=sorted({layer for _, layer in damaged}), generation=record.number)
        for member, value in values.items():
            self.seats[member] = Seat(member, value.host, value.capacity)
        self.story.transfer_began = time.monotonic()
        return (m.Tally(record.number, 0, values),)

    # -- planned changes ----------------------------------------------------------------------------------------------

    def _prepare(self, effect: m.Prepare) -> None:
        if not self.training.prepare(effect.changes, self.seats):
            return
        self.probe("prepare")
        record = self.state.record
        stay = stay_with(record, effect.changes)
        self._meet_until = time.monotonic() + self._patience.gather
        if self.me in stay:
            for newcomer in set(stay) - set(record.members):
                self.senses.peers.send(newcomer, "meet", generation=record.number, members=stay)
        self._groups.begin(record.number + 1, stay)

    def has_met(self, changes: Iterable[m.Change]) -> bool:
        """Whether the data path of the generation that these changes lead to is open, so that nobody will wait for it;
        a newcomer that does not come holds up a change for a while only.
        """
        record = self.state.record
        stay = stay_with(record, frozenset(changes))
        hopeless = time.monotonic() > self._meet_until or not self.roster.dead.isdisjoint(stay)
        return hopeless or self._groups.is_settled(record.number + 1, stay)

    # -- mail ---------------------------------------------------------------------------------------------------------

    def send_state(
        self, kind: str, target: Member, generation: int, layer: int, stamp: Stamp, state: LayerState
    ) -> None:
        """Sends a layer; it must not change before the receiver is known to have it."""
        self.senses.peers.send(
            target, kind, state, generation=generation, layer=layer, stamp=list(stamp), digest=digest(state).hex()
        )

    def _sort_mail(self) -> None:
        mail, self._mail = self._mail, []
        self._mail = [message for message in mail if not self._take(message)]

    def _take(self, message: PeerMessage) -> bool:
        """Whether a message is done with; False keeps it for later."""
        generation, number = int(message.header["generation"]), self.state.record.number
        phase = self.state.phase
        if generation > number:
            if message.kind == "value" and generation > self._looked:
                self._looked = generation
                self._events.extend(self._ask_store(lambda: self._store.read(number)))
            return False
        if generation < number:
            return True
        if message.kind == "meet":  # we are about to be let in
            if phase is Phase.OUTSIDE and self.state.wants_in:
                self._groups.begin(generation + 1, message.header["members"])
                self.senses.peers.send(message.sender, "met", generation=generation)  # opens the connection ahead
            return True
        if message.kind == "met":
            return True
        if message.kind == "value":
            value = decode(str(message.header["value"]).encode())
            assert isinstance(value, m.Contribution)
            self._first.add(message.sender, value, map(Proof.read, message.header["proofs"]))
            self._events.extend(self._tally())
            return True
        if message.kind == "farewell":
            self.probe("farewell")
            self._events.append(m.Farewell(generation))
            return True
        if phase is Phase.GATHER or (phase is Phase.INSTALL and message.kind != "layer"):
            return False
        if phase is not (Phase.INSTALL if message.kind == "layer" else Phase.RUN):
            return True
        if message.kind == "update":
            updates: dict[int, LayerState] = {layer: {} for layer in message.header["layers"]}
            for address, tensor in message.tensors.items():
                index, _, name = address.partition("/")
                updates[int(index)][name] = tensor
            for followed, update in updates.items():
                self.holdings.take_update(followed, int(message.header["step"]), update)
            return True
        layer = int(message.header["layer"])
        state, stamp = dict(message.tensors), Stamp(*message.header["stamp"])
        if message.kind == "layer" and (layer not in self.state.missing or stamp != self.state.at):
            return True
        if digest(state).hex() != message.header["digest"]:
            self.work.note("damaged", layers=[layer], sender=message.sender, generation=generation)
            self._events.append(m.Broken(generation))
        elif message.kind == "layer":
            self.probe("received")
            self._events.extend(self._received(generation, layer, stamp, state))
        else:
            self.holdings.follow(layer, stamp, state)
        return True

    def _received(self, generation: int, layer: int, stamp: Stamp, state: LayerState) -> tuple[m.Event, ...]:
        self.holdings.take(layer, stamp, state)
        return (m.Received(generation, layer),)

    # -- from one generation to the next ------------------------------------------------------------------------------

    def _abort(self, generation: int) -> None:
        """This member answers the generation never again; its states go to the shelf."""
        self.probe("abort")
        self.training.abort()
        self.holdings.shelve(self.state.held)
        self.senses.guard(None)
        communicator, self.communicator = self.communicator, None
        if self.state.planned:
            # all have voted: nobody waits, and nobody must be disturbed
            self._old = communicator or self._old
            return
        if communicator is not None:
            communicator.abort()
        self.append({"kind": "broken", "generation": generation, "member": self.me})

    def _install(self, effect: m.Install) -> Iterable[m.Event]:
        self.probe("install")
        record, state = self.state.record, self.state
        broken = (m.Broken(effect.generation),)
        self.senses.engage(record.number, frozenset(record.members))
        group = self._groups.take(record.number, record.members, self.senses.disturbed)
        if group is None:
            return broken
        communicator, told = group
        self.communicator = communicator
        self.senses.guard(communicator)
        if self.senses.disturbed():
            return broken
        if self._old is not None:  # ten milliseconds for which nobody needs to wait
            threading.Thread(target=self._old.abort, name="end-group", daemon=True).start()
            self._old = None
        own = self.holdings.own_at(state.own, effect.base)
        why = reasons(record.members, self._before, self.roster.dead)
        decision = self.job.decide(record, tuple(self._round.items()))  # remembered from the first round
        self.story.opened(why, decision.moved_bytes)
        opening = Opening(record.number, effect.base, effect.layout, record.members, why, decision.moved_bytes, told)
        try:
            self.work.open(opening, communicator, own)
        except PeerLost:
            return broken
        self.holdings.open(state.own, state.copies, effect.base)
        self._send_copies(effect)
        self._before = record.members
        self.probe("installed")
        return ()

    def _send_copies(self, effect: m.Install) -> None:
        """Sends the copies that others lack."""
        base, layout, members = effect.base, effect.layout, self.state.record.members
        for member in members:
            for layer in layout.copied.get(member, ()):
                lacks = member != self.me and (layer, base) not in self._round[member].held
                if lacks and first_owner(layer, layout, members) == self.me:
                    state = self.work.state(layer, copy=not self.job.sync)
                    self.send_state("copy", member, effect.generation, layer, base, state)

    def place(self, seats: Any) -> Layout | str:
        began = time.perf_counter()
        found = self.work.place(seats)
        self.story.search_seconds = time.perf_counter() - began
        return found
