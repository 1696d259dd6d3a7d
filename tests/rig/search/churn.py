"""A long history of many members: as many join as leave, for thousands of changes, and a run's state must not grow.

It has the same protocol, world and rules as the short histories of `histories`. Changes come in bursts, as a cloud
takes many machines at once, and the run makes a step or two between them. The simulation forgets what no living member
can read again, so that it does not grow either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.rig.search.histories import Stuck, begin, take
from tests.rig.search.random_history import Delivery, History, HistoryOutcome, RandomHistory
from tests.rig.search.world import Transition, Violation
from varuna_capslog.membership import messages as m
from varuna_capslog.membership import protocol
from varuna_capslog.membership.changes import Phase, State
from varuna_capslog.membership.entries import (
    DeadEntry,
    Entry,
    GenerationEntry,
    HelloEntry,
    LeftEntry,
    Roster,
    WorkerEntry,
)
from varuna_capslog.membership.generation import Member, Stamp

__all__ = ["CHANGES", "ChurnSimulation", "Sizes", "draw_crowd", "play_crowd"]


CHANGES = {
    "crash": 60, "leave": 60, "urgent leave": 30, "founder": 30, "false alarm": 30, "hiccup": 10,
    "late leave": 1, "join": 0,
}  # fmt: skip
"""How often each strikes beside the others. `founder`: whoever has proposed the next generation dies before anybody
hears of it. A late leave brings the only checkpoints. Joins come as others have gone."""

_PATIENCE = 400
_STALE = 64
_BURST_SHARE, _LEAST_BURST = 1 / 30, 6
"""A burst has at most this share of the members, or so many."""

_QUIET = 3
"""Rounds of the whole group for which nothing strikes after a burst, on average."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run's state after `changes` changes, each the largest since the last look.

    Attributes:
        entry_bytes: bytes of a generation's entry in the store's log.
        lineage: number of entries of its lineage.
        state: number of a member's holdings, values heard, wishes and suspects together.
        log_bytes: bytes of all entries so far.
    """

    changes: int
    generations: int
    step: int
    members: int
    entry_bytes: int
    lineage: int
    state: int
    log_bytes: int


def draw_crowd(seed: int, members: int, changes: int) -> History:
    """A long history: half as many layers as members, each with one copy; mail comes twice now and then."""
    return History(
        seed=seed, members=members, num_layers=max(2, members // 2), redundancy=1, sync=True, shadows=False, fewest=2,
        replicas=1, faults=changes, steps=1 << 60, double=0.02,
    )  # fmt: skip


def largest_burst(members: int) -> int:
    """Return the largest number of changes in a burst."""
    return max(_LEAST_BURST, int(members * _BURST_SHARE))


class ChurnSimulation(RandomHistory):
    """Simulation of continuous churn: a world whose members keep being replaced."""

    def __init__(self, history: History, transition: Transition) -> None:
        super().__init__(history, transition, compare=True)
        self.log = Roster()
        self.detected: set[int] = set()  # members whose failure detectors will report
        self.largest = Sizes(0, 0, 0, 0, 0, 0, 0, 0)
        self.old: list[Delivery] = []
        self.unanimous: set[tuple[int, int]] = set()
        self.asked: dict[tuple[int, int], tuple[frozenset[m.Change] | None, bool]] = {}
        self.doomed = 0

    @property
    def changes(self) -> int:
        return sum(self.outcome.faults.values())

    def add(self, state: State, memory: frozenset[tuple[int, Stamp]] | None = None) -> int:
        self.write(WorkerEntry(state.me, state.host, 0))
        self.write(HelloEntry(state.me, state.host))
        return super().add(state, memory)

    def write(self, entry: Entry) -> int:
        """An entry of the log, as hosts and members of a run write it; its bytes."""
        value = entry.to_json()
        size = len(json.dumps(value))
        self.log.take(value)
        self.largest = replace(self.largest, log_bytes=self.largest.log_bytes + size)
        return size

    # -- mail ----------------------------------------------------------------------------------------------------------

    def deliver(self, mail: Delivery) -> None:
        before = self.record.number
        if mail[0] == "suspect":
            self.detected.discard(mail[1])
        if mail[0] == "cas" and self.doomed and mail[2].expected == before:  # the store has it, and its founder is gone
            self.doomed -= 1
            self.lose([mail[1]], "founder")
        if mail[0] != "tally" or mail[2] in self.records:  # else no living member is in that generation any more
            super().deliver(mail)
        self.repeat(mail)
        if self.record.number != before:
            self.founded()

    def repeat(self, mail: Delivery) -> None:
        """Now and then a message from long ago arrives once more, of a generation that may be forgotten by then."""
        if self.dice.random() > 1 / 16:
            return
        match mail:
            case ("tally", i, number, turn) if (values := self.casts.get((number, turn))) is not None:
                mail = ("told", i, m.Tally(number, turn, values))
            case ("tally" | "compute" | "suspect", *_):
                return
        if len(self.old) == _STALE:
            position = self.dice.randrange(_STALE)
            self.old[position], mail = mail, self.old[position]
            self.pool.append(mail)
        else:
            self.old.append(mail)

    def is_unanimous(self, number: int, turn: int) -> bool:
        """Return True for a unanimous vote; votes found unanimous are remembered, since values are cast once."""
        unanimous = (number, turn) in self.unanimous or super().is_unanimous(number, turn)
        if unanimous:
            self.unanimous.add((number, turn))
        return unanimous

    def asked_of(self, number: int, turn: int) -> tuple[frozenset[m.Change] | None, bool]:
        """Return as the base class does, remembered: all members that apply a step ask this of the same vote."""
        if (number, turn) not in self.asked:
            self.asked[number, turn] = super().asked_of(number, turn)
        return self.asked[number, turn]

    def founded(self) -> None:
        """The store holds a new generation."""
        record, seen, last = self.record, self.largest, self.record.number - 1
        self.outcome.went_back += self.records[last].regress and last in self.truth.bases
        size = self.write(GenerationEntry(record))
        self.largest = replace(
            self.largest, entry_bytes=max(seen.entry_bytes, size), lineage=max(seen.lineage, len(record.lineage))
        )
        self.forget()

    def forget(self) -> None:
        """Drop everything that no living member can read again."""
        living = [state for i, state in enumerate(self.states) if self.alive[i]]
        oldest = min((state.record.number for state in living), default=self.record.number)
        for of_generation in (self.records, self.truth.bases, self.truth.rounds, self.truth.behind):
            for number in [number for number in of_generation if number < min(oldest, self.record.number - 1)]:
                del of_generation[number]
        for of_round in (self.casts, self.offers, self.asked):
            for key in [key for key in of_round if key[0] < oldest]:
                del of_round[key]
        self.unanimous = {key for key in self.unanimous if key[0] >= oldest}
        settled = self.truth.settled.step
        self.truth.parents = {
            after: parent for after, parent in self.truth.parents.items() if after.step >= settled - 1
        }
        self.saves = {stamp: done for stamp, done in self.saves.items() if stamp.generation >= oldest}
        for i, alive in enumerate(self.alive):
            if not alive:
                self.memory[i] = frozenset()
                self.waiting.pop(i, None)

    # -- changes -------------------------------------------------------------------------------------------------------

    def strike(self) -> None:
        """Make a change; members join as others have left, so that their number stays near that at the beginning."""
        present = [i for i, state in enumerate(self.states) if self.alive[i]]
        lacking = self.history.members - len(present)
        missed = min(1.0, lacking / (1 + largest_burst(self.history.members)))
        if lacking > 0 and self.dice.random() < 0.3 + 0.7 * missed:
            self.count("join")
            self._enter()
        else:
            kind = self.dice.choices(list(CHANGES), list(CHANGES.values()))[0]
            i = self.dice.choice([i for i in present if self.states[i].phase is not Phase.OUTSIDE] or present)
            self._take_away(kind, i, present)

    def _take_away(self, kind: str, i: int, present: Sequence[int]) -> None:
        match kind:
            case "crash":
                self.lose([i], kind)
            case "founder":
                self.doomed += 1
                self.lose([i], "crash")  # so that somebody proposes
            case "false alarm":
                self.count(kind)
                self.feed(i, m.Suspects(frozenset([self.states[self.dice.choice(present)].me])))
                self._tell()
            case "hiccup":
                self.count(kind)
                self.feed(i, m.Broken(self.states[i].record.number))
            case "late leave":
                self.count(kind)
                event = m.Wished(("leave", self.states[i].me), urgent=True, save=True)
                self.pool += [("told", j, event) for j in present]
            case _:
                self.count(kind)
                self.feed(i, m.Wished(("leave", self.states[i].me), kind == "urgent leave"))

    def count(self, kind: str) -> None:
        self.outcome.faults[kind] += 1

    def lose(self, victims: Sequence[int], kind: str) -> None:
        """Kill these members without notice; their hosts report it."""
        for i in victims:
            if self.alive[i]:
                self.count(kind)
                self.alive[i] = False
                self.write(DeadEntry(self.states[i].me, "was killed", self.states[i].host, "killed"))
        self._tell()

    def emit(self, i: int, effect: m.Effect) -> None:
        if isinstance(effect, m.Release):
            self.write(LeftEntry(self.states[i].me))
        super().emit(i, effect)

    def _tell(self) -> None:
        self.views.clear()
        living = {i for i, alive in enumerate(self.alive) if alive}
        self.pool += [("suspect", i) for i in sorted(living - self.detected)]
        self.detected |= living

    def view(self, i: int) -> frozenset[Member]:
        """Suspects as in shorter histories, without members that are in no generation that counts."""
        if not self.views:
            named = {member for record in self.records.values() for member in record.participants}
            self.views[None] = frozenset(member for member in named if not self.alive[self.index[member]])
        return self.views[None]

    def trains(self) -> bool:
        """Return True if all voters of the newest generation have made a step of it."""
        voters = [self.index[member] for member in self.record.members]
        return bool(voters) and all(
            self.alive[i] and self.states[i].phase is Phase.RUN and self.states[i].at.generation == self.record.number
            for i in voters
        )

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def look(self) -> Sizes:
        """Return the largest sizes since the last look."""
        state = max(
            len(member_state.held)
            + len(member_state.heard)
            + len(member_state.suspects)
            + len(member_state.wishes.changes)
            + len(member_state.wishes.hints)
            for i, member_state in enumerate(self.states)
            if self.alive[i]
        )
        sizes = replace(
            self.largest, changes=self.changes, generations=self.record.number, step=self.truth.settled.step,
            members=len(self.record.members), state=state,
        )  # fmt: skip
        self.largest = replace(sizes, entry_bytes=0, lineage=0)
        return sizes


def play_crowd(
    history: History,
    look: Callable[[Sizes], None] = lambda sizes: None,
    every: int = 500,
    transition: Transition = protocol.step,
) -> HistoryOutcome:
    """Play a long history until all of its changes were made and every member of the last generation trains.

    Args:
        look: called with the sizes after each `every` changes, and at the end.

    Raises:
        Violation: a rule is broken.
        Stuck: the run makes no progress.
    """
    world = ChurnSimulation(history, transition)
    begin(world)
    try:
        _run(world, look, every)
    except (Violation, Stuck) as error:
        raise type(error)(f"{error}; after {world.changes} changes of {history}") from error
    look(world.look())
    world.outcome.generations, world.outcome.step = world.record.number, world.truth.settled.step
    return world.outcome


def _run(world: ChurnSimulation, look: Callable[[Sizes], None], every: int) -> None:
    dice, outcome, many = world.dice, world.outcome, world.history.members
    due: list[int] = []
    trained_at = next_look = 0
    while True:
        if not due and world.trains():
            trained_at = outcome.events
            remaining = world.history.faults - world.changes
            if remaining <= 0:
                outcome.ended = "trained"
                return
            first = outcome.events + int(dice.uniform(0.5, 1.5) * _QUIET * many)
            count = min(remaining, dice.randint(1, largest_burst(many)))
            due = sorted(first + dice.randrange(2 * many) for _ in range(count))
        until = due[0] if due else outcome.events + many // 2
        while outcome.events < until:
            if world.pool:
                take(world)
            else:
                world.wake()
                outcome.events += many
        if due:
            due.pop(0)
            world.strike()
            if world.changes >= next_look + every:
                next_look += every
                look(world.look())
        if outcome.events - trained_at > _PATIENCE * many + (due[-1] - trained_at if due else 0):
            raise Stuck(f"no step was made in {outcome.events - trained_at} events")
