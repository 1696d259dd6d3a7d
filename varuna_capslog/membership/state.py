"""State of one member: `State`, the phases that it goes through, and the `Job` that is the same for all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar, cast

from varuna_capslog.membership import messages as m
from varuna_capslog.membership.generation import EMPTY, INITIAL, Generation, Held, Member, MemberLayout, Stamp
from varuna_capslog.membership.recovery import Place

__all__ = ["Job", "Phase", "Roles", "State", "Step", "Wishes"]

_KEPT = 4
Result = TypeVar("Result")

Step = tuple["State", tuple[m.Effect, ...]]
"""State after an event, and the effects that the runtime must carry out, in order."""


class Phase(Enum):
    """Phase of a member."""

    OUTSIDE = "outside"  # not in the generation, and not wanted or not yet in
    GATHER = "gather"  # adopted it, told its layers, waits to hear those of the others
    INSTALL = "install"  # knows its layers, waits for those that must come
    RUN = "run"  # trains
    CHANGE = "change"  # answers its generation never again, tries to found the next or hears of it
    WAIT = "wait"  # the generation is too small for the job; its state is kept
    SERVE = "serve"  # leaving: sends layers that others still need
    STOPPED = "stopped"  # the end: refused step, or no store at a change; all that was held is on disk

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is slow


@dataclass(frozen=True, eq=False)
class Job:
    """Settings that are the same on every rank for a whole run.

    Attributes:
        layer_bytes: state of each layer.
        place: from seats to layout (see `recovery.Place`); deterministic, the same on every rank.
        sync: `protection: sync`, copies follow each step before its vote; False (`async`): one step behind.
        shadows: planned changes copy ahead before they commit; False: they commit at the next boundary.
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
        """Return what `make` makes of a whole round of a generation, made once for this very object of values.

        It is the same for all members. In a simulation they get one object; without this the cost of a change would
        grow with the square of their number.
        """
        for of, by, answer in self._remembered:
            if of is values and by == record:
                return cast(Result, answer)
        made = make(self, record, values)
        self._remembered.appendleft((values, record, made))
        return made


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles of a member for the layers of the last decided generation.

    Attributes:
        own, copies, shadows: layers it trains, keeps copies of, holds ahead of a planned change.
        missing: own layers still on their way.
        layout: of all members, to judge whether the survivors hold everything.
    """

    own: frozenset[int] = frozenset()
    copies: frozenset[int] = frozenset()
    shadows: frozenset[int] = frozenset()
    missing: frozenset[int] = frozenset()
    layout: MemberLayout | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """The changes of the membership that a member knows to be wished, until they are part of a generation.

    Attributes:
        urgent: there is no time to prepare them.
        hints: members of the generation that may be told to leave.
        save: its votes ask for a checkpoint before a change begins.
        saving: that checkpoint comes before the computation that is under way.
        prepared: the wishes for which its shadows are complete.
        planned: it stopped because a vote said so; the new generation may be proposed at once.
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
    """All that one member knows; changed by `step` only. A process that has just started knows of no generation.

    Attributes:
        me: never used before.
        record: the newest generation it adopted, or, OUTSIDE, the newest it saw.
        round: 0 while it gathers, then the step that is under way.
        cast: it has cast in this round.
        computed, copied: the gradients and copies that the vote waits for are here (`copied`: the step of the copies).
        heard: single values of rounds of this generation or later ones, kept until the round is complete.
        held: all of the training state that it can send, whatever for; at first what earlier members wrote to disk
            (`Persist`) and this one can read.
        at: the boundary of its own layers.
        base: where this generation began; None before that is decided.
        suspects: participants that the failure detector takes for lost.
        unseen: a newer generation seen while its own vote was out.
        wants_in: OUTSIDE, it asks to be let in.
        regress: WAIT, it waits for holders of settled steps, and may go back to the checkpoint instead.
        checkpoint: the newest complete one that it knows of.
        voted: generation and boundary of its last vote on a step.
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
        """True if this member is a voter of its generation."""
        return self.me in self.record.members
