"""State of one member, and its way from one generation to the next, whatever the cause of the change."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar, cast

from varuna_capslog.membership import messages as m
from varuna_capslog.membership.generation import EMPTY, INITIAL, Generation, Held, Member, MemberLayout, Stamp
from varuna_capslog.membership.messages import Change
from varuna_capslog.membership.recovery import Place, Seat, list_moves, newest_boundary

__all__ = [
    "Ahead",
    "Job",
    "Phase",
    "Roles",
    "State",
    "Step",
    "adopt",
    "broken",
    "find_ahead",
    "first_owner",
    "hint",
    "outside",
    "stay_with",
    "stop_answering",
    "store_lost",
    "store_says",
    "suspects",
    "tick",
    "tightened",
    "wish",
]


# -- State of one member: `State`, the phases that it goes through, and the `Job` that is the same for all.


_KEPT = 4
Result = TypeVar("Result")

Step = tuple["State", tuple[m.Effect, ...]]
"""State after an event, and the effects that the runtime must carry out, in order."""


class Phase(Enum):
    """Phase of a member."""

    OUTSIDE = "outside"  # not in the generation: not yet, or not any more
    GATHER = "gather"  # has adopted the generation and sent its holdings; waits for those of the others
    INSTALL = "install"  # knows its layers; waits for those that must still arrive
    RUN = "run"  # trains
    CHANGE = "change"  # never answers its generation again; founds the next one or waits for it
    WAIT = "wait"  # too few devices, or settled layers are missing; keeps its state
    SERVE = "serve"  # leaving: sends layers that others still need
    STOPPED = "stopped"  # the end: a step voted down, or no store at a change; all held states are on disk

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is slow


@dataclass(frozen=True, eq=False)
class Job:
    """Settings that are the same on every rank for a whole run.

    Attributes:
        layer_bytes: state of each layer. place: see `recovery.Place`; deterministic.
        sync: `protection: sync`: the vote on a step waits for its copies; False (`async`): copies are one step behind.
        shadows: layers are copied ahead of a planned change; False: it is made at the next boundary.
    """

    layer_bytes: tuple[int, ...]
    place: Place
    sync: bool = True
    shadows: bool = False

    _remembered: deque[tuple[Mapping[Member, m.Value], Generation, Any]] = field(
        default_factory=lambda: deque(maxlen=_KEPT), init=False, repr=False
    )

    def remembered(
        self,
        record: Generation,
        values: Mapping[Member, m.Value],
        make: Callable[[Job, Generation, Mapping[Member, m.Value]], Result],
    ) -> Result:
        """Return the result of `make` for a whole round, computed once per `values` object. In a simulation all members
        share that object; otherwise the cost of a change would grow with the square of their number.
        """
        for of, by, answer in self._remembered:
            if of is values and by == record:
                return cast(Result, answer)
        made = make(self, record, values)
        self._remembered.appendleft((values, record, made))
        return made


@dataclass(frozen=True, slots=True)
class Roles:
    """Layers of a member in the generation that was decided last.

    Attributes:
        own, copies, shadows: layers that it trains, keeps copies of, and copies ahead of a planned change.
        missing: owned layers still on their way. layout: of all members; shows if the survivors hold every layer.
    """

    own: frozenset[int] = frozenset()
    copies: frozenset[int] = frozenset()
    shadows: frozenset[int] = frozenset()
    missing: frozenset[int] = frozenset()
    layout: MemberLayout | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """Changes of the membership that a member knows to be wished, until they are part of a generation.

    Attributes:
        urgent: there is no time to copy ahead. hints: changes that may be wished later.
        save: its votes ask for a checkpoint before a change. saving: that checkpoint comes before the present step.
        prepared: changes for which its shadow copies are complete.
        planned: the change is decided, by a vote or in WAIT; this member may propose the next generation at once.
    """

    changes: frozenset[m.Change] = frozenset()
    urgent: bool = False
    hints: frozenset[m.Change] = frozenset()
    save: bool = False
    saving: bool = False
    prepared: frozenset[m.Change] = frozenset()
    planned: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """Everything that one member knows; changed by `step` only.

    Attributes:
        me: its name, never used before.
        record: newest generation that it has adopted or, in OUTSIDE, seen; EMPTY in a new process.
        round: 0 in GATHER, then the step under way. cast: it has cast its value in this round.
        computed: the step's gradients are here. copied: newest step for whose vote the copies are here.
        heard: values of rounds of this generation or later ones, kept until the round is complete.
        held: all training state that it can send.
        at: the boundary of its layers. base: where this generation began; None before that is decided.
        suspects: participants that the failure detector considers lost.
        unseen: newer generation seen while its vote was pending. wants_in: in OUTSIDE, it asks to join.
        regress: in WAIT, it waits for holders of settled steps, and may go back to the checkpoint instead.
        checkpoint: newest complete checkpoint that it knows of.
        voted: generation of its last vote on a step, and the boundary before that step.
    """

    me: Member
    host: str
    capacity: int = 0
    phase: Phase = Phase.OUTSIDE
    record: Generation = EMPTY
    round: int = 0
    cast: bool = False
    computed: bool = False
    copied: int = 0
    heard: frozenset[m.Heard] = frozenset()
    held: Held = frozenset()
    at: Stamp = INITIAL
    base: Stamp | None = None
    roles: Roles = Roles()
    suspects: frozenset[Member] = frozenset()
    wishes: Wishes = Wishes()
    unseen: Generation | None = None
    wants_in: bool = False
    regress: bool = False
    checkpoint: Stamp = INITIAL
    voted: tuple[int, Stamp] = (0, INITIAL)

    @property
    def votes(self) -> bool:
        """True where this member is a voter of its generation."""
        return self.me in self.record.members


# -- From one generation to the next
#
# The part of `protocol.step` that answers notices, lost peers and the store. Every cause (leave, crash, hang,
# partition, join, straggler) ends in the same three acts: stop answering, found the successor or hear of it, adopt
# it.


# -- Preparation of a planned change: the layers that will move, and the members that get copies while training goes
#    on.
#
# Every member computes the same layers by itself, from the present layout and the wishes in a vote, which all know.


@dataclass
class Ahead:
    """Preparation of a planned change at one member.

    Attributes:
        targets: layer -> future owners and holders of copies that lack it, for the layers that this member sends.
        mine: layers that are sent to this member.
        sent: layer -> members that got a copy in this generation, for any change; they get every update.
        began: copies of this change have been sent. hinted: it may never be made; no vote waits for it.
        layout: after the change; None where the next generation will wait.
    """

    changes: frozenset[Change]
    targets: Mapping[int, tuple[Member, ...]]
    mine: frozenset[int]
    sent: dict[int, tuple[Member, ...]] = field(default_factory=dict)
    began: bool = False
    hinted: bool = False
    layout: MemberLayout | None = None

    def due(self) -> list[tuple[int, tuple[Member, ...]]]:
        """Return (layer, members that lack it) to send now; each copy is sent once."""
        self.began = True
        due = []
        for layer, members in self.targets.items():
            fresh = tuple(member for member in members if member not in self.sent.get(layer, ()))
            if fresh:
                self.sent[layer] = (*self.sent.get(layer, ()), *fresh)
                due.append((layer, fresh))
        return due


def first_owner(layer: int, layout: MemberLayout, members: Sequence[Member]) -> Member | None:
    """Return the first owner of a layer by rank, which sends it; None where no member owns it."""
    return next((member for member in members if layer in layout.owned.get(member, ())), None)


def stay_with(record: Generation, changes: Collection[Change]) -> list[Member]:
    """Return the members of the generation after these changes, by rank, if nothing else happens."""
    leave = {member for kind, member in changes if kind == "leave"}
    join = sorted(member for kind, member in changes if kind == "join")
    stay = [member for member in record.members if member not in leave]
    return stay + [member for member in join if member not in record.members and member not in leave]


def find_ahead(
    me: Member,
    record: Generation,
    layout: MemberLayout,
    changes: frozenset[Change],
    seats: Mapping[Member, Seat],
    place: Place,
    layer_bytes: Sequence[int],
) -> Ahead:
    """Find the layers that move for these changes. Joining members get none: they are not in this generation.

    seats: of all members and of those that asked to join; they must be equal at all members, or the results differ.
    """
    stay = stay_with(record, changes)
    wanted = place([seats[member] for member in stay]) if stay else "no device is left"
    if isinstance(wanted, str):  # the next generation will wait
        return Ahead(changes, {}, frozenset())
    held = {member: [(layer, INITIAL) for layer in layout.holds(member)] for member in record.members}
    boundary = newest_boundary(len(layer_bytes), held, lambda stamp: True, INITIAL)
    # with copies: the first vote of the next generation waits for them
    roles = {member: wanted.holds(member) for member in stay if member in record.members}
    targets: dict[int, list[Member]] = {}
    mine: set[int] = set()
    for move in list_moves(boundary, roles, layer_bytes):
        if move.target == me:
            mine.add(move.layer)
        elif first_owner(move.layer, layout, record.members) == me:
            targets.setdefault(move.layer, []).append(move.target)
    sent = {layer: tuple(members) for layer, members in targets.items()}
    return Ahead(changes, sent, frozenset(mine), layout=wanted)


# -- changes of the membership


def hint(state: State, change: m.Change) -> Step:
    """Add a change that may be wished later to this member's votes, without another effect here."""
    if state.phase is Phase.OUTSIDE or change[1] not in state.record.members:
        return state, ()
    return replace(state, wishes=replace(state.wishes, hints=state.wishes.hints | {change})), ()


def wish(state: State, change: m.Change, urgent: bool, save: bool = False) -> Step:
    """Add a change to the next vote; a generation in WAIT has no votes and makes it at once."""
    kind, member = change
    if state.phase is Phase.OUTSIDE:
        gives_up = change == ("leave", state.me) and state.wants_in
        return outside(state, state.record, wants_in=False) if gives_up else (state, ())
    if (member in state.record.members) == (kind == "join"):
        return state, ()
    wishes = state.wishes
    wishes = replace(
        wishes, changes=wishes.changes | {change}, urgent=wishes.urgent or urgent, save=wishes.save or save
    )
    if state.phase is Phase.WAIT:  # a joining member may hold the missing layers, so do not go back yet
        return stop_answering(replace(state, wishes=replace(wishes, planned=True), regress=False))
    return replace(state, wishes=wishes), ()


def broken(state: State) -> Step:
    """Handle a fault of the generation: the loss of a member, which is not known yet, or damaged data."""
    if not state.votes or state.phase not in (Phase.GATHER, Phase.INSTALL, Phase.RUN):
        return state, ()
    if state.unseen is not None:
        return adopt(state, state.unseen)
    return stop_answering(state)


def tightened(state: State, capacity: int) -> Step:
    """Give the step up and found a generation of the same members, with a plan for a smaller device. The others, which
    still compute, stop when the generation's communication ends.
    """
    if not state.votes or state.phase is not Phase.RUN or state.cast:
        return state, ()
    state, effects = stop_answering(replace(state, capacity=capacity))
    return state, (*effects, *_proposal(state)) if state.phase is Phase.CHANGE else effects


def suspects(state: State, members: frozenset[Member]) -> Step:
    """Set the suspected members; only participants of this member's generation count."""
    state = replace(state, suspects=members.intersection(state.record.participants))
    if (state.phase is Phase.CHANGE and state.votes) or _concerned(state):
        return stop_answering(state)
    return state, ()


def _concerned(state: State) -> bool:
    """True where this voter waits, or will wait, for a suspected member; a leaving member founds nothing."""
    if not state.votes:
        return False
    match state.phase:
        case Phase.GATHER | Phase.INSTALL:  # leaving members may still have to send
            return not state.suspects.isdisjoint(state.record.participants)
        case Phase.RUN:
            return not state.suspects.isdisjoint(state.record.members)
        case _:
            return False


def stop_answering(state: State) -> Step:
    """Stop answering this generation for ever. Found the next one at once if that is planned, or if this member knows
    the lost ones and the others hold every layer. Otherwise others may know more, so it waits for `Tick`.
    """
    effects: list[m.Effect] = []
    if state.phase is not Phase.CHANGE:
        effects.append(m.Abort(state.record.number))
        state = replace(state, phase=Phase.CHANGE, heard=_heard_of(state, state.record.number + 1))
        if state.unseen is not None:
            state, more = adopt(state, state.unseen)
            return state, (*effects, *more)
    lost = not state.suspects.isdisjoint(state.record.participants)
    remaining = frozenset(state.record.participants) - state.suspects
    sure = state.wishes.planned or (lost and state.roles.layout is not None and state.roles.layout.covers(remaining))
    return state, (*effects, *(_proposal(state) if sure else (m.ReadStore(),)))


def _proposal(state: State) -> tuple[m.Effect, ...]:
    """Return the compare-and-set that founds the next generation. Only a voter may: since it has stopped answering, its
    generation has ended, and only a voter knows for sure if a step was applied, and from which boundary.
    """
    if not state.votes:
        return (m.ReadStore(),)
    record, gone = state.record, state.suspects
    leave = {member for kind, member in state.wishes.changes if kind == "leave"}
    stay = [member for member in stay_with(record, state.wishes.changes) if member not in gone]
    leaving = [member for member in record.members if member in leave and member not in gone]
    if state.at.generation != record.number:  # no step was applied yet: leaving members may hold needed layers
        leaving += [member for member in record.leaving if member not in gone and member not in stay]
    regress = state.regress or (record.regress and state.base is None)
    proposal = record.successor(stay, leaving, state.base, state.checkpoint, state.at.step, regress)
    # The last members to leave write what they hold before the record lets them go.
    before = () if stay else (m.Persist("the last devices leave; the run is parked"),)
    return (*before, m.CompareAndSet(record.number, proposal))


def tick(state: State) -> Step:
    """Handle a time limit that has passed."""
    match state.phase:
        case Phase.CHANGE:
            return state, _proposal(state)
        case Phase.WAIT if state.regress:
            return stop_answering(replace(state, wishes=replace(state.wishes, planned=True)))
        case Phase.GATHER | Phase.INSTALL | Phase.SERVE:
            return state, (m.ReadStore(),)
        case Phase.OUTSIDE if state.wants_in:
            return state, (m.ReadStore(),)
        case _:
            return state, ()


def store_says(state: State, record: Generation) -> Step:
    """Handle a record of the store; a record older than the known one changes nothing."""
    if record.number > state.record.number:
        if state.phase is Phase.RUN and state.cast:
            # Its vote may have completed the round: wait for the tally or for the end of communication.
            newest = max(record, state.unseen or record, key=lambda seen: seen.number)
            return replace(state, unseen=newest), ()
        return adopt(state, record)
    if record.number == state.record.number and state.phase is Phase.OUTSIDE and state.wants_in:
        return outside(state, record, wants_in=True)
    return state, ()


def adopt(state: State, record: Generation) -> Step:
    """Take part in a generation of the store, or go outside if it was founded without this member."""
    effects: list[m.Effect] = []
    if state.phase not in (Phase.OUTSIDE, Phase.CHANGE):
        effects.append(m.Abort(state.record.number))
    inside = state.phase is not Phase.OUTSIDE
    if not record.members and inside:  # parked: no member is left to receive states from this one
        effects.append(m.Persist("the run is parked"))
    if state.me not in record.participants or not record.members:
        leaves = ("leave", state.me) in state.wishes.changes or (inside and not state.votes)
        leaves = leaves or state.me in record.leaving
        state, more = outside(state, record, wants_in=not leaves and (inside or state.wants_in))
        return state, (*effects, *more)
    members, wishes = frozenset(record.members), state.wishes
    # Joins are dropped and must be asked for again, or members that disagree on who is lost would alternate for ever.
    changes = frozenset(change for change in wishes.changes if change[0] == "leave" and change[1] in members)
    if not inside and not state.wants_in:  # it no longer wants to join
        changes |= {("leave", state.me)}
    state = replace(
        state,
        phase=Phase.GATHER,
        record=record,
        round=0,
        cast=True,
        heard=_heard_of(state, record.number),
        base=None,
        roles=replace(state.roles, missing=frozenset()),
        suspects=state.suspects.intersection(record.participants),
        wishes=Wishes(
            changes,
            urgent=wishes.urgent and bool(changes),
            hints=frozenset(change for change in wishes.hints if change[1] in members),
            save=wishes.save and bool(changes),
        ),
        unseen=None,
        wants_in=False,
        regress=False,
    )
    if _concerned(state):
        state, more = stop_answering(state)
        return state, (*effects, *more)
    value = m.Contribution(state.held, state.host, state.capacity, state.checkpoint, state.voted)
    return state, (*effects, m.Cast(record.number, 0, value))


def outside(state: State, record: Generation, wants_in: bool) -> Step:
    """Go outside the generation, but keep the layers: the generation may still need them."""
    state = replace(
        state,
        phase=Phase.OUTSIDE,
        record=record,
        round=0,
        cast=False,
        heard=_heard_of(state, record.number + 1),
        suspects=frozenset(),
        roles=replace(state.roles, missing=frozenset()),
        wishes=Wishes(),
        unseen=None,
        wants_in=wants_in,
        regress=False,
    )
    if not wants_in:
        return state, (m.Release(),)
    if not record.members:  # no member can be training: this one founds the next generation
        successor = record.successor((state.me,), (), None, state.checkpoint, regress=record.regress)
        return state, (m.CompareAndSet(record.number, successor),)
    return state, (m.Ask(record.members),)


def _heard_of(state: State, generation: int) -> frozenset[m.Heard]:
    """Values of this generation and later ones; older values are dropped."""
    return frozenset(heard for heard in state.heard if heard.generation >= generation)


def store_lost(state: State) -> Step:
    """Handle the loss of the store: a running generation goes on; in a change, write the state to disk and stop."""
    serves = not state.votes and state.phase in (Phase.GATHER, Phase.SERVE)
    if state.phase is not Phase.CHANGE and not serves:
        return state, ()
    why = "the membership store is lost, and the next generation cannot be founded without it"
    return replace(state, phase=Phase.STOPPED), (m.Persist(why),)
