"""One member at work: feeds `protocol.step` with what happens and carries out what it answers.

The protocol decides, this module acts: it trains while the protocol says Compute, talks to the store and the other
members, keeps the states that may still be needed, and stops at once when a peer is gone. One thread does all of this;
the others only put what they hear into its inbox and break off a collective that can no longer end.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from varuna_capslog.elastic import messages as m
from varuna_capslog.elastic import protocol
from varuna_capslog.elastic.generation import INITIAL, Generation, Member, Stamp
from varuna_capslog.elastic.hooks import notice_of
from varuna_capslog.elastic.notices import callback
from varuna_capslog.elastic.peers import Message, Peers
from varuna_capslog.elastic.recovery import Seat, list_moves, newest_boundary
from varuna_capslog.elastic.state import Job, Phase
from varuna_capslog.elastic.store import MembershipStore, StoreGone
from varuna_capslog.elastic.wire import decode, encode
from varuna_capslog.elastic.work import Followed, LayerState, Opening, Work
from varuna_capslog.engine.communicator import Communicator, PeerLost, connect_group
from varuna_capslog.engine.layer_state import digest
from varuna_capslog.errors import CapslogError, StepRefused

__all__ = ["End", "Patience", "Runtime"]


@dataclass(frozen=True)
class End:
    """How a member's part ended: the last step it applied; asked to stop; released before the run's end."""

    step: int
    stopped: bool
    released: bool


@dataclass(frozen=True)
class Patience:
    """Seconds of waiting. `peer`: any message of the data path; `change`: until somebody founds a generation without
    knowing who is lost; `holders`: for members that hold what otherwise only the checkpoint has.
    """

    peer: float = 30.0
    change: float = 1.0
    again: float = 0.3
    holders: float = 3.0


@dataclass
class _Copy:
    """A layer of another member that this one follows, and the boundary it stands at."""

    followed: Followed
    stamp: Stamp


@dataclass
class _Shadowing:
    """A planned change under way: what goes where ahead of it, and what comes here."""

    changes: frozenset[m.Change]
    targets: Mapping[int, tuple[Member, ...]]
    mine: frozenset[int]
    sent: dict[int, tuple[Member, ...]] = field(default_factory=dict)
    began: bool = False


@dataclass
class _Change:
    """When a change of generation began, and what is said of it afterwards."""

    last_apply: float | None = None
    search_seconds: float = 0.0
    transfer_began: float = 0.0
    transfer_seconds: float = 0.0
    moved_bytes: int = 0
    why: tuple[str, ...] = ()


class Runtime:
    """One member of the run.

    Args:
        me: never used before.
        capacity: bytes of this member's device; 0 where nobody asks.
        checkpoint: the newest complete one on disk.
        find: member -> address of its `Peers`.
        on_step: called with (step, action) at named points, for faults injected by tests; does nothing by default.
    """

    def __init__(
        self,
        me: Member,
        host: str,
        work: Work,
        store: MembershipStore,
        token: str,
        address: str = "127.0.0.1",
        capacity: int = 0,
        checkpoint: Stamp = INITIAL,
        sync: bool = True,
        shadows: bool = True,
        patience: Patience | None = None,
        probe: Callable[[str], None] = lambda point: None,
    ) -> None:
        self.me, self._host = me, host
        self._work, self._store = work, store
        self._patience = patience or Patience()
        self._probe = probe
        self.job = Job(work.layer_bytes, self._place, sync, shadows)
        self.state = protocol.newcomer(me, host, capacity, checkpoint=checkpoint)
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._alarm = threading.Event()
        self._engaged: frozenset[Member] = frozenset()
        self._dead: set[Member] = set()
        self._seats: dict[Member, Seat] = {}
        self._communicator: Communicator | None = None
        self._old: Communicator | None = None
        self._connecting: dict[str, Future[Communicator]] = {}
        self._kept: dict[tuple[int, Stamp], LayerState] = {}
        self._arriving: set[tuple[int, Stamp]] = set()
        self._copies: dict[int, _Copy] = {}
        self._shelf: dict[int, _Copy] = {}
        self._updates: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        self._scales: dict[int, float] = {}
        self._mail: list[Message] = []
        self._values: dict[Member, tuple[m.Contribution, Mapping[str, str]]] = {}
        self._round: tuple[tuple[Member, m.Contribution], ...] = ()
        self._before: tuple[Member, ...] = ()
        self._todo: m.Compute | None = None
        self._computing: int | None = None
        self._shadowing: _Shadowing | None = None
        self._ahead: frozenset[int] = frozenset()
        self._live: Stamp | None = None
        self._stop = False
        self._refused: str | None = None
        self._end: End | None = None
        self._finishing = False
        self._since = time.monotonic()
        self._ticked = 0.0
        self._waiting = self._since
        self._change = _Change()
        self._step_began = 0.0
        self.peers = Peers(me, token, self._find, self._got, self._lost, address)
        store.put(f"address/{me}", self.peers.address)
        self._unfollow = store.follow(self._hear, lambda why: self._inbox.put(("store lost", why)))

    # -- threads that only listen -------------------------------------------------------------------------------------

    def _find(self, member: Member) -> str | None:
        # it may still be loading: whether it will ever come is for those to say who watch its process
        return self._store.get(f"address/{member}", wait_seconds=self._patience.peer)

    def _got(self, message: Message) -> None:
        self._inbox.put(("mail", message))

    def _hear(self, entry: dict[str, Any]) -> None:
        self._inbox.put(("log", entry))
        if entry.get("member") == self.me and entry.get("kind") in ("notice", "hint"):
            callback.tell(notice_of(entry, self._host))
        if entry.get("kind") == "dead" and entry.get("member") in self._engaged:
            self._break_off()

    def _lost(self, member: Member) -> None:
        self._inbox.put(("lost", member))
        if member in self._engaged and not self._finishing:
            self._break_off()

    def _break_off(self) -> None:
        """Whatever waits for a lost peer ends now."""
        self._alarm.set()
        communicator = self._communicator
        if communicator is not None:
            communicator.abort()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> End:
        """Takes part until the run ends, this member is released, or it fails.

        Raises:
            StepRefused: a step was voted down; what was held is on disk.
            CapslogError: the store is lost at a change (all is on disk), or a failure of this member's own.
        """
        try:
            self._catch_up()
            if self._end is None:
                self._feed(m.Enter())
            while self._end is None:
                if self._todo is not None:
                    self._compute()
                else:
                    self._listen()
            return self._end
        finally:
            self._unfollow()
            self.peers.flush(5.0)
            self.peers.close()
            for communicator in (self._communicator, self._old):
                if communicator is not None:
                    communicator.abort()

    def _catch_up(self) -> None:
        """Reads the log up to now: of what was before this member only the losses count."""
        self._store.append({"kind": "hello", "member": self.me, "host": self._host})
        until = time.monotonic() + self._patience.peer
        while True:
            try:
                kind, what = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise StoreGone(f"the store's log does not answer {self.me} within {self._patience.peer:g} s") from None
            if kind == "log" and what.get("kind") == "dead":
                self._dead.add(what["member"])
            elif kind == "log" and what.get("kind") == "hello" and what.get("member") == self.me:
                return
            elif kind == "log" and what.get("kind") == "finished":
                self._end = End(int(what.get("step", 0)), False, True)
            elif kind == "mail":
                self._mail.append(what)
            elif kind == "store lost":
                raise StoreGone(str(what))

    def _listen(self) -> None:
        """Waits for something to happen, at most until patience is at an end."""
        wait = self._next_tick() - time.monotonic()
        try:
            kind, what = self._inbox.get(timeout=max(0.0, min(wait, 1.0)))
        except queue.Empty:
            if time.monotonic() >= self._next_tick():
                self._patience_ends()
            return
        self._happened(kind, what)
        self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while self._end is None:
                self._happened(*self._inbox.get_nowait())

    def _happened(self, kind: str, what: Any) -> None:
        if kind == "mail":
            self._mail.append(what)
            self._sort_mail()
        elif kind == "log":
            self._logged(what)
        elif kind == "lost":
            if what in self._engaged and not self._finishing:
                self._feed(m.Broken(self.state.record.number))
        elif kind == "store lost":
            self._feed(m.StoreLost())

    def _logged(self, entry: Mapping[str, Any]) -> None:
        kind, member = entry.get("kind"), entry.get("member")
        if kind == "generation":
            self._feed(m.StoreSays(Generation.from_json(entry["record"], "the store")))
        elif kind == "dead" and isinstance(member, str):
            if member == self.me:
                raise CapslogError(f"{self.me} was declared lost ({entry.get('why')}); a new member may take its place")
            self._dead.add(member)
            self._feed(m.Suspects(frozenset(self._dead)))
            if member in self._engaged:
                self._feed(m.Broken(self.state.record.number))
        elif kind == "ask" and isinstance(member, str) and member not in self._dead:
            self._seats[member] = Seat(member, str(entry.get("host", member)), int(entry.get("capacity", 0)))
            if member != self.me:
                self._feed(m.Asked(member))
        elif kind == "notice" and isinstance(member, str):
            self._feed(m.Notice(("leave", member), bool(entry.get("urgent"))))
        elif kind == "finished" and self.state.phase is Phase.OUTSIDE:
            self._end = End(int(entry.get("step", 0)), False, True)

    # -- patience -----------------------------------------------------------------------------------------------------

    def _next_tick(self) -> float:
        match self.state.phase:
            case Phase.CHANGE:
                first = self._patience.change
            case Phase.WAIT:
                first = self._patience.holders
            case Phase.GATHER | Phase.INSTALL | Phase.RUN:
                first = self._patience.peer
            case _:
                first = self._patience.again
        since = max(self._since, self._waiting) if self.state.phase is Phase.RUN else self._since
        if self._ticked <= since:
            return since + first
        return self._ticked + (self._patience.again if self.state.phase is not Phase.WAIT else first)

    def _patience_ends(self) -> None:
        self._ticked = time.monotonic()
        if self.state.phase in (Phase.GATHER, Phase.INSTALL, Phase.RUN):
            # somebody does not answer; whoever it is, its supervisor will see that it has not stopped with the rest
            self._feed(m.Broken(self.state.record.number))
            return
        self._feed(m.Tick())

    # -- events in, effects out ---------------------------------------------------------------------------------------

    def _feed(self, *events: m.Event) -> None:
        waiting = deque(events)
        while waiting:
            event = waiting.popleft()
            before = self.state
            self.state, effects = protocol.step(self.job, before, event)
            if self.state.phase is not before.phase or self.state.record.number != before.record.number:
                self._since, self._ticked = time.monotonic(), 0.0
            if self.state.record.number != before.record.number:
                self._adopted()
                if self._dead:
                    waiting.append(m.Suspects(frozenset(self._dead)))
            for effect in effects:
                waiting.extend(self._carry_out(effect))
            self._forget()
        self._sort_mail()

    def _forget(self) -> None:
        """Frees what the protocol holds no more; what is on its way into its hands stays."""
        held = self.state.held
        self._arriving -= held
        gone = [entry for entry in self._kept if entry not in held and entry not in self._arriving]
        for entry in gone:
            del self._kept[entry]

    def _adopted(self) -> None:
        """A newer generation: nothing that was only of the old one is needed any more."""
        self._values.clear()
        self._updates.clear()
        self._arriving.clear()
        self._ahead = frozenset(self._shadowing.sent) if self._shadowing is not None else frozenset()
        self._shadowing = None
        self._todo = self._computing = None
        record = self.state.record
        self._engaged = frozenset(record.participants) - {self.me}
        self._alarm.clear()
        if self._engaged & self._dead:
            self._alarm.set()
        if self.state.phase is Phase.GATHER and self.me in record.members:
            self._begin_connecting(record.number, record.members)

    def _carry_out(self, effect: m.Effect) -> Iterable[m.Event]:
        match effect:
            case m.ReadStore():
                return self._read_store()
            case m.CompareAndSet():
                return self._compare_and_set(effect)
            case m.Cast():
                return self._cast(effect)
            case m.Compute():
                self._todo = effect
            case m.Apply():
                self._apply(effect)
            case m.Abort():
                self._abort(effect.generation)
            case m.Send():
                state = self._state_at(effect.layer, effect.stamp)
                self._send_state("layer", effect.target, effect.generation, effect.layer, effect.stamp, state)
            case m.Load():
                fresh = effect.stamp == INITIAL
                layer = effect.layer
                state = self._work.initial(layer) if fresh else self._work.load(layer, effect.stamp)
                self._kept[(layer, effect.stamp)] = state
                return self._keep_received(effect.generation, layer, effect.stamp, state)
            case m.Install():
                return self._install(effect)
            case m.Prepare():
                self._prepare(effect)
            case m.Bid():
                for member in effect.members:
                    self.peers.send(member, "farewell", generation=effect.generation)
            case m.Ask():
                entry = {"kind": "ask", "member": self.me, "host": self._host, "capacity": self.state.capacity}
                self._append(entry)
            case m.Persist():
                self._work.persist(self._everything_held(), self.state.record, effect.why)
                if self.state.phase is Phase.STOPPED:
                    self._stopped(effect.why)
            case m.Wait():
                self._work.note("waiting", why=effect.why, generation=self.state.record.number)
            case m.Discard():
                self._refused = self._work.discard(effect.step)
            case m.Release():
                self._end = End(self.state.at.step, False, True)
            case m.Drop():
                pass  # `_kept` follows `state.held`
        return ()

    def _stopped(self, why: str) -> None:
        if self._refused is not None:
            raise StepRefused(self._refused)
        raise CapslogError(f"{why}; what this member held is on disk, and the same command continues the run")

    def _read_store(self) -> tuple[m.Event, ...]:
        try:
            return (m.StoreSays(self._store.read(self.state.record.number)),)
        except StoreGone:
            return (m.StoreLost(),)

    def _compare_and_set(self, effect: m.CompareAndSet) -> tuple[m.Event, ...]:
        try:
            found = self._store.compare_and_set(effect.expected, effect.record)
        except StoreGone:
            return (m.StoreLost(),)
        return (m.StoreSays(found),)

    def _append(self, entry: dict[str, Any]) -> None:
        # the log only hastens things: a lost store shows itself at the next change
        with contextlib.suppress(StoreGone):
            self._store.append(entry)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _cast(self, effect: m.Cast) -> Iterable[m.Event]:
        if isinstance(effect.value, m.Contribution):
            digests = {str(layer): text for layer, text in self._shadow_digests().items()}
            self._values[self.me] = (effect.value, digests)
            text = encode(effect.value).decode()
            for member in self.state.record.participants:
                if member != self.me:
                    self.peers.send(member, "value", generation=effect.generation, value=text, digests=digests)
            return self._tally()
        assert self._communicator is not None
        self._probe("vote")
        try:
            outcome = self._work.vote(effect.round, encode(effect.value))
        except PeerLost:
            return (m.Broken(effect.generation),)
        self._probe("voted")
        self._scales[effect.round] = outcome.scale
        self._stop = self._stop or outcome.stop
        votes: dict[Member, m.Value] = {}
        for member, ballot in zip(self.state.record.members, outcome.ballots, strict=True):
            vote = decode(ballot)
            # what is not finite only in the sum is not finite for everybody
            votes[member] = vote if outcome.finite else m.Vote(finite=False)
        return (m.Tally(effect.generation, effect.round, votes),)

    def _tally(self) -> tuple[m.Event, ...]:
        """The first round, once all values of it are here: the same for everybody who has them."""
        record = self.state.record
        if self.state.phase is not Phase.GATHER or set(self._values) != set(record.participants):
            return ()
        values: dict[Member, m.Contribution] = {}
        damaged = self._damaged_shadows()
        for member, (value, _) in self._values.items():
            held = frozenset(entry for entry in value.held if (member, entry[0]) not in damaged)
            values[member] = m.Contribution(held, value.host, value.capacity, value.checkpoint, value.voted)
            self._seats[member] = Seat(member, value.host, value.capacity)
        self._change.transfer_began = time.monotonic()
        self._round = tuple((member, values[member]) for member in record.participants)
        return (m.Tally(record.number, 0, values),)

    def _shadow_digests(self) -> dict[int, str]:
        """Of the layers that moved ahead, as owner or as holder of the shadow: they are compared before anybody relies
        on a shadow.
        """
        state = self.state
        layers = (state.own & self._ahead) | state.shadows
        found = {}
        for layer in layers:
            if (layer, state.at) in state.held:
                with contextlib.suppress(KeyError):
                    found[layer] = digest(self._state_at(layer, state.at)).hex()
        return found

    def _damaged_shadows(self) -> set[tuple[Member, int]]:
        """(member, layer) of shadows that differ from their owner's state."""
        layout = self.state.layout
        found: set[tuple[Member, int]] = set()
        if layout is None:
            return found
        for member, (_, digests) in self._values.items():
            for text, mine in digests.items():
                layer = int(text)
                if layer in layout.owned.get(member, ()):
                    continue
                for other, (_, theirs) in self._values.items():
                    owns = layer in layout.owned.get(other, ())
                    if owns and theirs.get(text, mine) != mine:
                        found.add((member, layer))
        return found

    # -- a step -------------------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        todo, self._todo = self._todo, None
        assert todo is not None
        generation, step = todo.generation, todo.step
        self._drain()
        if self._end is not None or self.state.record.number != generation or self.state.phase is not Phase.RUN:
            return
        try:
            if self._work.is_done(self.state.at.step) or self._stop:
                self._finish()
                return
            checkpoint = self._work.between(self.state.at)
            if checkpoint is not None:
                self._feed(m.Checkpointed(checkpoint))
            self._step_began = time.monotonic()
            self._computing = step
            self._send_shadows()
            self._probe("compute")
            finite = self._work.compute(step)
        except PeerLost:
            self._feed(m.Broken(generation))
            return
        self._probe("computed")
        if self.state.phase is not Phase.RUN or self.state.record.number != generation:
            return
        self._send_updates(generation, step)
        self._drain()
        self._advance()
        self._check_shadows()
        self._waiting = time.monotonic()
        self._feed(m.Computed(generation, step, finite))
        self._check_copies()

    def _finish(self) -> None:
        """The last boundary: all members write the end together."""
        stamp = self.state.at
        self._work.finish(stamp, self._stop)
        assert self._communicator is not None
        self._finishing = True
        # who is gone from here on has finished, or would have: everything is written
        with contextlib.suppress(PeerLost):
            self._communicator.barrier()
        self._append({"kind": "finished", "step": stamp.step, "stopped": self._stop})
        self._end = End(stamp.step, self._stop, False)

    def _apply(self, effect: m.Apply) -> None:
        """The step becomes state; the boundary before it is kept until the next vote."""
        self._probe("apply")
        before, after = effect.before, Stamp(effect.step, effect.generation)
        assert self._live == before, (self._live, before)
        for layer in self.state.own:
            self._kept[(layer, before)] = self._work.state(layer, copy=True)
        self._probe("applying")
        self._work.apply(effect.step)
        self._live = after
        self._computing = None
        self._advance()
        reached = {layer: copy.stamp.step for layer, copy in self._copies.items()}
        self._updates = {
            (layer, step): update
            for (layer, step), update in self._updates.items()
            if step > reached.get(layer, effect.step - 1)
        }
        if self._shadowing is None:  # shadows on their way may lag behind by more
            self._scales = {step: scale for step, scale in self._scales.items() if step >= effect.step - 1}
        self._probe("applied")
        now = time.monotonic()
        if self._change.why:
            self._tell_change(now)
        self._change.last_apply = now

    # -- copies and shadows -------------------------------------------------------------------------------------------

    def _primary(self, layer: int) -> bool:
        """Whether this member is the first owner of a layer: the one that sends it."""
        layout = self.state.layout
        if layout is None:
            return False
        return (
            next((member for member in self.state.record.members if layer in layout.owned.get(member, ())), None)
            == self.me
        )

    def _followers(self, layer: int) -> tuple[Member, ...]:
        layout = self.state.layout
        assert layout is not None
        kept = [member for member in self.state.record.members if layer in layout.copied.get(member, ())]
        sent = self._shadowing.sent.get(layer, ()) if self._shadowing is not None else ()
        return tuple(dict.fromkeys([*kept, *sent]))

    def _send_state(
        self, kind: str, target: Member, generation: int, layer: int, stamp: Stamp, state: LayerState
    ) -> None:
        self.peers.send(
            target, kind, state, generation=generation, layer=layer, stamp=list(stamp), digest=digest(state).hex()
        )

    def _send_updates(self, generation: int, step: int) -> None:
        for layer in sorted(self.state.own):
            if not self._primary(layer):
                continue
            followers = self._followers(layer)
            if not followers:
                continue
            update = dict(self._work.update(layer))
            if not self.job.sync:  # the vote does not wait for its arrival, and the step changes it
                update = {name: tensor.clone() for name, tensor in update.items()}
            for member in followers:
                self.peers.send(member, "update", update, generation=generation, layer=layer, step=step)

    def _advance(self) -> None:
        """Every followed layer makes the voted steps whose updates are here."""
        for layer, copy in self._copies.items():
            while copy.stamp != self._live and self._live is not None and copy.stamp.step < self._live.step:
                step = copy.stamp.step + 1
                update = self._updates.get((layer, step))
                if update is None or step not in self._scales:
                    break
                claimed = (layer, copy.stamp) in self.state.held
                if claimed:
                    self._kept[(layer, copy.stamp)] = copy.followed.state(copy=True)
                copy.followed.apply(update, step, self._scales[step])
                copy.stamp = Stamp(step, self.state.record.number)
                del self._updates[(layer, step)]

    def _check_copies(self) -> None:
        """Tells the protocol when what the vote waits for is here."""
        state = self.state
        if state.phase is not Phase.RUN or self._computing != state.round or state.copied == state.round:
            return
        self._advance()
        self._check_shadows()
        for layer in state.copies | state.shadows:
            copy = self._copies.get(layer)
            if copy is None or copy.stamp != state.at:
                return
            needs_update = self.job.sync or layer in state.shadows
            if needs_update and (layer, state.round) not in self._updates:
                return
        if state.copies or state.shadows:
            self._feed(m.Copied(state.record.number, state.round))

    # -- planned changes: copy ahead ----------------------------------------------------------------------------------

    def _prepare(self, effect: m.Prepare) -> None:
        """Finds out, as every member does alike, what would move, and begins to send or to wait for it."""
        shadowing = self._shadowing
        if shadowing is not None and shadowing.changes == effect.changes:
            return
        record, layout = self.state.record, self.state.layout
        assert layout is not None
        leave = {member for kind, member in effect.changes if kind == "leave"}
        join = sorted(member for kind, member in effect.changes if kind == "join")
        stay = [member for member in record.members if member not in leave]
        stay += [member for member in join if member not in record.members and member not in leave]
        seats = [self._seats.get(member, Seat(member, member, 0)) for member in stay]
        self._begin_connecting(record.number + 1, tuple(stay))
        wanted = self._place(seats) if seats else "no device is left"
        targets: dict[int, list[Member]] = {}
        mine: set[int] = set()
        if not isinstance(wanted, str):
            held = {
                member: [
                    (layer, self.state.at) for layer in (*layout.owned.get(member, ()), *layout.copied.get(member, ()))
                ]
                for member in record.members
            }
            boundary = newest_boundary(len(self.job.layer_bytes), held, lambda stamp: True, INITIAL)
            owned = {member: wanted.owned.get(member, ()) for member in stay if member in record.members}
            for move in list_moves(boundary, owned, self.job.layer_bytes):
                if move.target == self.me:
                    mine.add(move.layer)
                elif self._primary(move.layer):
                    targets.setdefault(move.layer, []).append(move.target)
        self._shadowing = _Shadowing(
            effect.changes, {layer: tuple(members) for layer, members in targets.items()}, frozenset(mine)
        )

    def _send_shadows(self) -> None:
        """At the beginning of a step: what moves ahead, at this boundary. Updates follow from this step on."""
        shadowing = self._shadowing
        if shadowing is None or shadowing.began:
            return
        shadowing.began = True
        for layer, members in shadowing.targets.items():
            state = self._work.state(layer, copy=True)
            for member in members:
                self._send_state("shadow", member, self.state.record.number, layer, self.state.at, state)
            shadowing.sent[layer] = members

    def _check_shadows(self) -> None:
        """Prepared, once all that comes here has come and stands at this step's boundary."""
        shadowing, state = self._shadowing, self.state
        if shadowing is None or state.prepared == shadowing.changes or state.cast:
            return
        copies = [self._copies.get(layer) for layer in shadowing.mine]
        if all(copy is not None and copy.stamp == state.at for copy in copies):
            self._feed(m.Prepared(state.record.number, shadowing.changes, shadowing.mine))

    # -- mail ---------------------------------------------------------------------------------------------------------

    def _sort_mail(self) -> None:
        if not self._mail:
            return
        mail, self._mail = self._mail, []
        for message in mail:
            if not self._take(message):
                self._mail.append(message)
        self._check_copies()

    def _take(self, message: Message) -> bool:
        """Whether a message is done with; False keeps it for later."""
        generation, number = int(message.header["generation"]), self.state.record.number
        phase = self.state.phase
        if message.kind == "value" and generation > number:
            self._feed(*self._read_store())
            number = self.state.record.number
        if generation != number:
            return generation < number
        if message.kind == "value":
            value = decode(str(message.header["value"]).encode())
            assert isinstance(value, m.Contribution)
            self._values[message.sender] = (value, message.header["digests"])
            self._feed(*self._tally())
            return True
        if message.kind == "farewell":
            self._feed(m.Farewell(generation))
            return True
        layer = int(message.header["layer"])
        if message.kind == "update":
            if phase in (Phase.GATHER, Phase.INSTALL):
                return False
            self._updates[(layer, int(message.header["step"]))] = message.tensors
            return True
        if phase is Phase.GATHER or (phase is Phase.INSTALL and message.kind != "layer"):
            return False
        state = dict(message.tensors)
        if digest(state).hex() != message.header["digest"]:
            self._work.note("damaged", layer=layer, sender=message.sender)
            self._feed(m.Broken(generation))
            return True
        stamp = Stamp(*message.header["stamp"])
        if message.kind == "layer":
            if phase is Phase.INSTALL and layer in self.state.missing and stamp == self.state.at:
                self._feed(*self._keep_received(generation, layer, stamp, state))
        elif phase is Phase.RUN:
            self._copies[layer] = _Copy(self._work.follow(layer, state), stamp)
        return True

    def _keep_received(self, generation: int, layer: int, stamp: Stamp, state: LayerState) -> tuple[m.Event, ...]:
        self._kept[(layer, stamp)] = state
        self._arriving.add((layer, stamp))
        return (m.Received(generation, layer),)

    # -- from one generation to the next ------------------------------------------------------------------------------

    def _abort(self, generation: int) -> None:
        """This member answers the generation never again; its states go to the shelf."""
        self._probe("abort")
        self._todo = self._computing = None
        if self._live is not None:
            live = self._live
            for layer, state in self._work.shelve().items():
                self._kept[(layer, live)] = state
            for layer, copy in self._copies.items():
                if (layer, copy.stamp) in self.state.held:
                    self._kept[(layer, copy.stamp)] = copy.followed.state(copy=False)
            self._shelf, self._copies = self._copies, {}
            self._live = None
        communicator, self._communicator = self._communicator, None
        if self.state.planned:
            self._old = communicator  # all have voted: nobody waits, and nobody must be disturbed
        else:
            if communicator is not None:
                communicator.abort()
            self._append({"kind": "broken", "generation": generation, "member": self.me})

    def _begin_connecting(self, number: int, members: tuple[Member, ...]) -> None:
        """Opens the group of a generation beside everything else; `_install` waits for it."""
        if self.me not in members:
            return
        name = _group_name(number, members)
        if name in self._connecting:
            return
        for stale in [other for other in self._connecting if int(other.split("-")[0]) < number]:
            self._connecting.pop(stale).add_done_callback(_throw_away)
        future: Future[Communicator] = Future()
        self._connecting[name] = future

        def connect() -> None:
            try:
                rank = members.index(self.me)
                store = self._store.rendezvous()
                future.set_result(connect_group(store, name, rank, len(members), self._patience.peer))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=connect, name=f"connect-{number}", daemon=True).start()

    def _install(self, effect: m.Install) -> Iterable[m.Event]:
        record, state = self.state.record, self.state
        future = self._connecting.pop(_group_name(record.number, record.members))
        self._engaged = frozenset(record.members) - {self.me}
        while not future.done():
            if self._alarm.is_set():
                future.add_done_callback(_throw_away)
                return (m.Broken(effect.generation),)
            with contextlib.suppress(TimeoutError):
                future.exception(timeout=0.005)
        if future.exception() is not None:
            return (m.Broken(effect.generation),)
        communicator = self._communicator = future.result()
        if self._old is not None:
            self._old.abort()
            self._old = None
        own = {layer: self._kept[(layer, effect.base)] for layer in sorted(state.own)}
        change = self._change
        change.transfer_seconds = time.monotonic() - change.transfer_began
        moved = self.job.decide(record, self._round).moved_bytes  # remembered from the first round
        change.why = self._why()
        change.moved_bytes += moved
        opening = Opening(record.number, effect.base, effect.layout, record.members, change.why, moved)
        try:
            self._work.open(opening, communicator, own)
        except PeerLost:
            return (m.Broken(effect.generation),)
        self._live = effect.base
        for layer in own:
            del self._kept[(layer, effect.base)]
        self._open_copies(effect)
        self._before = record.members
        if self._alarm.is_set():
            return (m.Broken(effect.generation),)
        return ()

    def _open_copies(self, effect: m.Install) -> None:
        """Takes up the copies that are here, and sends those that others lack."""
        base, layout = effect.base, effect.layout
        for layer in self.state.copies:
            shelved = self._shelf.get(layer)
            if shelved is not None and shelved.stamp == base:
                self._copies[layer] = shelved
                self._kept.pop((layer, base), None)
            elif (layer, base) in self._kept:
                self._copies[layer] = _Copy(self._work.follow(layer, self._kept.pop((layer, base))), base)
        self._shelf = {}
        for member in self.state.record.members:
            if member == self.me:
                continue
            held = self._values[member][0].held
            for layer in layout.copied.get(member, ()):
                if (layer, base) not in held and layer in self.state.own and self._primary(layer):
                    state = self._work.state(layer, copy=not self.job.sync)
                    self._send_state("copy", member, effect.generation, layer, base, state)

    def _why(self) -> tuple[str, ...]:
        members, before = self.state.record.members, self._before
        if not before:
            return (f"{len(members)} member(s) begin",)
        lost = [member for member in before if member not in members and member in self._dead]
        left = [member for member in before if member not in members and member not in self._dead]
        new = [member for member in members if member not in before]
        found = [("lost", lost), ("left", left), ("joined", new)]
        return tuple(f"{', '.join(names)} {what}" for what, names in found if names) or ("the same members again",)

    def _tell_change(self, now: float) -> None:
        """The first step of a generation is done: what the change cost."""
        change, record = self._change, self.state.record
        pause = None if change.last_apply is None else self._step_began - change.last_apply
        if self.me == record.members[0]:
            self._work.note(
                "morph" if change.last_apply is not None else "begin",
                generation=record.number,
                members=list(record.members),
                why=list(change.why),
                step=self.state.at.step,
                search_seconds=change.search_seconds,
                transfer_seconds=change.transfer_seconds,
                pause_seconds=pause,
                first_step_seconds=now - self._step_began,
                moved_bytes=change.moved_bytes,
            )
        self._change = _Change()

    # -- what is held -------------------------------------------------------------------------------------------------

    def _state_at(self, layer: int, stamp: Stamp) -> LayerState:
        """A held state. Raises KeyError where there is none: then the protocol and this memory disagree."""
        found = self._kept.get((layer, stamp))
        if found is not None:
            return found
        if self._live == stamp and layer in self.state.own:
            return self._work.state(layer, copy=False)
        copy = self._copies.get(layer)
        if copy is not None and copy.stamp == stamp:
            return copy.followed.state(copy=False)
        raise KeyError((layer, stamp))

    def _everything_held(self) -> dict[tuple[int, Stamp], LayerState]:
        found = {}
        for layer, stamp in sorted(self.state.held):
            with contextlib.suppress(KeyError):
                found[(layer, stamp)] = self._state_at(layer, stamp)
        return found

    def _place(self, seats: Any) -> Any:
        began = time.perf_counter()
        found = self._work.place(seats)
        self._change.search_seconds = time.perf_counter() - began
        return found


def _group_name(number: int, members: Iterable[Member]) -> str:
    """A name for the data path of a generation; another set of members is another group."""
    return f"{number}-{hashlib.blake2b(' '.join(members).encode(), digest_size=6).hexdigest()}"


def _throw_away(future: Future[Communicator]) -> None:
    if future.exception() is None:
        future.result().abort()
