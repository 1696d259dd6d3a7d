"""A world with mail: everything that was sent and can still arrive, and every action that could come next.

`explore` walks it. Worlds are values here: an action makes another world and leaves the old one as it was, and `key` is
equal for worlds with the same future.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from varuna_capslog.membership import messages as m
from varuna_capslog.membership.ahead import find_ahead
from varuna_capslog.membership.generation import Generation
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.state import Job, Phase, State, newcomer
from varuna_capslog.rig.search.forgetting import adopts, brought, living, valid
from varuna_capslog.rig.search.world import Transition, World, make_job

__all__ = ["Action", "MailWorld", "Scenario"]

Action = tuple[Any, ...]

_ANSWERING = (Phase.GATHER, Phase.INSTALL, Phase.RUN)


@dataclass(frozen=True)
class Scenario:
    """What to explore.

    Attributes:
        members: processes in generation 1 from the beginning; the rest of `processes` come as newcomers.
        faults: how many of `kinds` strike, at any moment each.
        kinds: "crash", "hang", "cut", "store", "hiccup" (communication fails, nobody is lost), "damage" (of a copy made
            ahead, or of a layer on its way; not among the default kinds).
        once: each of them strikes at most once.
        leaves: how many members get a notice, at any moment.
        hints: how many times a member hears that one, itself or another, may be told to leave; at any moment.
        late: how many members get a notice that leaves no time for the move, so that a checkpoint is to come first.
        steps: training ends there.
        singly: rounds are heard value by value.
        stale: a watch may deliver records that were replaced since; False: the newest only.
        hasty: how many `Tick`s come too early; besides, one comes where nothing else is left to happen.
    """

    members: int = 3
    processes: int = 3
    faults: int = 1
    kinds: tuple[str, ...] = ("crash", "hang", "cut", "store", "hiccup")
    once: bool = False
    leaves: int = 0
    hints: int = 0
    late: int = 0
    steps: int = 2
    singly: bool = False
    stale: bool = False
    hasty: int = 0
    job: Job = field(default_factory=lambda: make_job(3))
    redundancy: int = 1


class MailWorld(World):
    """A world with its mail: everything that was sent and not yet acted on."""

    def __init__(self, scenario: Scenario, transition: Transition, compare: bool) -> None:
        super().__init__(scenario.job, scenario.redundancy, transition, compare, "damage" in scenario.kinds)
        self.scenario = scenario
        self.mail: frozenset[Action] = frozenset()
        self.hung: frozenset[int] = frozenset()
        self.cut: frozenset[int] = frozenset()  # those cut off from the rest
        self.store_cut = False  # the store is with them
        self.store_up = True
        self.faults, self.kinds = scenario.faults, scenario.kinds
        self.leaves, self.hasty = scenario.leaves, scenario.hasty
        self.hints, self.late = scenario.hints, scenario.late
        self.comers = scenario.processes - scenario.members
        for number in range(scenario.processes):
            self.add(newcomer(f"m{number}", f"h{number}"))

    def begin(self) -> None:
        """Founds generation 1 and trains nothing yet: all own layers are initialised."""
        names = [f"m{number}" for number in range(self.scenario.members)]
        self.record = self.record.successor(names)
        self.records[1] = self.record
        for i in range(self.scenario.members):
            self.feed(i, m.Enter())
            self.feed(i, m.StoreSays(self.record))
        for i in range(self.scenario.members):
            self.feed(i, m.Tally(1, 0, dict(self.casts[1, 0])))
        for entry in sorted(self.mail, key=repr):
            if entry[0] == "send":
                self.feed(entry[4], m.Received(entry[1], entry[2]))
        self.tidy()

    def emit(self, i: int, effect: m.Effect) -> None:
        match effect:
            case m.CompareAndSet():
                self.mail |= {("cas", i, effect)}
            case m.Send():
                self.mail |= {("send", effect.generation, effect.layer, i, self.index[effect.target])}
            case m.Load():
                self.mail |= {("send", effect.generation, effect.layer, -1, i)}
            case m.Compute() if not self.job.sync:
                self.mail |= {("offer", effect.generation, effect.step, i)}
            case m.Ask():
                self.mail |= {("ask", i, self.index[member]) for member in effect.members}
            case m.Bid():
                self.mail |= {("bye", effect.generation, i, self.index[member]) for member in effect.members}
            case m.Prepare() if self.job.shadows:
                self.mail = frozenset(entry for entry in self.mail if entry[:2] != ("prepare", i))
                self.mail |= {("prepare", i, effect.generation, effect.changes)}
            case m.Release():  # the process ends
                self.alive[i] = False
            case m.ReadStore() if self.states[i].phase is Phase.OUTSIDE:
                self.mail |= {("read", i)}
            case _:
                pass

    # -- what can happen -----------------------------------------------------------------------------------------------

    def reach(self, i: int, j: int) -> bool:
        """Whether mail passes between two members (or the disk, -1)."""
        return i < 0 or j < 0 or (i in self.cut) == (j in self.cut)

    def reach_store(self, i: int) -> bool:
        """Whether a member reaches the store."""
        return self.store_up and (i in self.cut) == self.store_cut if self.cut else self.store_up

    def lost_to(self, i: int) -> frozenset[int]:
        """Whom a perfect failure detector at i takes for lost."""
        ended = [not self.alive[j] or state.phase is Phase.STOPPED for j, state in enumerate(self.states)]
        return frozenset(
            j for j in range(len(ended)) if j != i and (ended[j] or j in self.hung or not self.reach(i, j))
        )

    def actions(self) -> Iterator[tuple[Action, bool]]:
        """Everything that could happen next, and whether it is a fault (or haste), which progress must not need."""
        quiet = True
        for action in self._ordinary():
            quiet = False
            yield action, False
        if quiet or self.hasty:
            for i, state in enumerate(self.states):
                if self.alive[i] and i not in self.hung and state.phase is not Phase.STOPPED and self._may_tick(i):
                    yield ("tick" if quiet else "hasty tick", i), not quiet
        yield from self._faults()

    def _ordinary(self) -> Iterator[Action]:
        for entry in self.mail:
            if self._deliverable(entry):
                yield ("mail", entry)
        for i, state in enumerate(self.states):
            if i in self.hung:
                yield ("resume", i)
            elif self.alive[i] and state.phase is not Phase.STOPPED:
                yield from self._of_member(i)
        if self.cut:
            yield ("heal",)
        voters = [self.index[member] for member in self.record.members]
        if voters and not any(self.alive[i] for i in voters) and self.store_up:
            yield ("park",)

    def _of_member(self, i: int) -> Iterator[Action]:
        state = self.states[i]
        number = state.record.number
        due = state.phase is Phase.RUN and not state.computed and state.round <= self.scenario.steps
        if due and not self.is_saving(i):
            yield ("compute", i)
        if state.phase is Phase.RUN and state.copied != state.round and self._offered(i):
            yield ("copied", i)
        if state.cast and state.phase in (Phase.GATHER, Phase.RUN):
            yield from self._rounds(i)
        if self.reach_store(i):
            known = max(number, state.unseen.number if state.unseen else 0)
            for newer in range(
                known + 1 if self.scenario.stale else max(known + 1, self.record.number), self.record.number + 1
            ):
                yield ("watch", i, newer)
        elif not self.store_up and state.phase is Phase.CHANGE:
            yield ("no store", i)
        if state.phase is Phase.OUTSIDE:
            if not state.wants_in and number == 0 and self.comers:
                yield ("enter", i)
            return
        names = frozenset(self.states[j].me for j in self.lost_to(i)) & frozenset(state.record.participants)
        if names != state.suspects:
            yield ("suspect", i, names)
        if state.phase in _ANSWERING and state.votes and self._broken(i):
            yield ("broken", i)
        notice = ("leave", state.me)
        if self.leaves and state.phase in (Phase.RUN, Phase.WAIT) and state.votes and notice not in state.changes:
            yield ("notice", i)
        if self.late and state.votes and notice not in state.changes:
            yield ("late", i)
        for member in state.record.members if self.hints else ():
            if ("leave", member) not in state.hints:
                yield ("hint", i, member)

    def _rounds(self, i: int) -> Iterator[Action]:
        state = self.states[i]
        key = (state.record.number, state.round)
        voters = state.record.members if state.round else state.record.participants
        if self.scenario.singly:
            heard = {entry.sender for entry in state.heard if (entry.generation, entry.round) == key}
            for member in self.casts.get(key, ()):
                if member not in heard and self.reach(i, self.index[member]):
                    yield ("hear", i, key, member)
        elif self.is_complete(*key) and all(self.reach(i, self.index[member]) for member in voters):
            yield ("tally", i, key)

    def _offered(self, i: int) -> bool:
        """Whether the owners of all that i follows have sent what the vote waits for."""
        state = self.states[i]
        if state.layout is None or not (state.copies or state.shadows):
            return False
        need = set(state.copies | state.shadows)
        for kind, *rest in self.mail:
            if kind == "offer" and rest[:2] == [state.record.number, state.round] and self.reach(i, rest[2]):
                need.difference_update(state.layout.owned.get(self.states[rest[2]].me, ()))
        return not need

    def _broken(self, i: int) -> bool:
        """Whether somebody that i waits for is gone, or has left the generation."""
        number, gone = self.states[i].record.number, self.lost_to(i)
        for member in self.states[i].record.participants:
            j = self.index[member]
            if j in gone or self.left[j] >= number or self.states[j].phase is Phase.STOPPED:
                return True
        return False

    def _may_tick(self, i: int) -> bool:
        state = self.states[i]
        if state.phase is Phase.CHANGE:
            pending = any(entry[0] == "cas" and entry[1] == i for entry in self.mail)
            return state.votes and not pending and self.reach_store(i)
        if state.phase is Phase.WAIT:
            return state.regress
        if state.phase is Phase.OUTSIDE and state.wants_in and self.reach_store(i):
            asked = any(entry[0] in ("ask", "cas", "read") and entry[1] == i for entry in self.mail)
            return not asked and self.record.number == state.record.number
        return False

    def _deliverable(self, entry: Action) -> bool:
        match entry:
            case ("cas", i, _):
                return self.reach_store(i)
            case ("read", i):
                alike = self.states[i].record.number == self.record.number  # else the watch tells
                return alike and self.alive[i] and i not in self.hung and self.reach_store(i)
            case ("send", number, layer, source, target):  # what comes before its decision waits for it
                state = self.states[target]
                wanted = state.record.number == number and layer in state.missing
                return wanted and self.alive[target] and target not in self.hung and self.reach(source, target)
            case ("prepare", i, number, changes):
                state = self.states[i]
                soon = state.phase is Phase.RUN and not state.cast and state.copied != state.round
                return soon and state.record.number == number and i not in self.hung and state.prepared != changes
            case ("bye" | "ask", *_, source, target):
                return self.alive[target] and target not in self.hung and self.reach(source, target)
            case _:
                return False

    def _faults(self) -> Iterator[tuple[Action, bool]]:
        if not self.faults:
            return
        kinds = self.kinds
        running = [i for i in range(len(self.states)) if self.alive[i] and self.states[i].phase is not Phase.STOPPED]
        inside = [i for i in running if self.states[i].phase is not Phase.OUTSIDE or self.states[i].wants_in]
        for i in inside:
            if "crash" in kinds:
                yield ("crash", i), True
            if "hang" in kinds and i not in self.hung:
                yield ("hang", i), True
            if "cut" in kinds and not self.cut and len(inside) > 1:
                yield ("cut", i, False), True
                if self.store_up:
                    yield ("cut", i, True), True
            if "hiccup" in kinds and i not in self.hung and self.states[i].phase in _ANSWERING:
                yield ("hiccup", i), True
        if "store" in kinds and self.store_up:
            yield ("lose store",), True
        if "damage" in kinds:
            for i in inside:
                for layer in self.copies_ahead(i):
                    yield ("damage", i, layer), True
            for entry in self.mail:
                if entry[0] == "send" and entry[3] >= 0 and self._deliverable(entry):
                    yield ("damage", entry), True

    # -- doing it ------------------------------------------------------------------------------------------------------

    def copy(self) -> MailWorld:
        """This world once more, to change."""
        world = type(self).__new__(type(self))
        world.__dict__.update(self.__dict__)
        for name in ("states", "alive", "memory", "left"):
            setattr(world, name, list(getattr(self, name)))
        for name in ("records", "parents", "bases", "rounds", "behind", "saves"):
            setattr(world, name, dict(getattr(self, name)))
        world.casts = {key: dict(values) for key, values in self.casts.items()}
        return world

    def after(self, action: Action) -> MailWorld:
        """The world after an action; this one is left as it is."""
        world = self.copy()
        world.do(action)
        world.tidy()
        return world

    def do(self, action: Action) -> None:
        """Carries out an action in this world."""
        kind = "store" if action[0] == "lose store" else action[0]
        if kind in self.scenario.kinds:
            self.faults -= 1
            if self.scenario.once:
                self.kinds = tuple(other for other in self.kinds if other != kind)
        match action:
            case ("mail", entry):
                self._deliver(entry)
            case ("compute", i):
                number, step = self.states[i].record.number, self.states[i].round
                if self.job.sync:
                    self.mail |= {("offer", number, step, i)}
                self.compute(i, step)
            case ("copied", i):
                self.feed(i, m.Copied(self.states[i].record.number, self.states[i].round))
            case ("tally", i, (number, turn)):
                self.feed(i, m.Tally(number, turn, dict(self.casts[number, turn])))
            case ("hear", i, (number, turn), sender):
                self.feed(i, m.Heard(number, turn, sender, self.casts[number, turn][sender]))
            case ("watch", i, number):
                self.feed(i, m.StoreSays(self.records[number]))
            case ("no store", i):
                self.feed(i, m.StoreLost())
            case ("suspect", i, names):
                self.feed(i, m.Suspects(names))
            case ("broken" | "hiccup", i):
                self.feed(i, m.Broken(self.states[i].record.number))
            case ("tick" | "hasty tick", i):
                self.hasty -= action[0] == "hasty tick"
                self.feed(i, m.Tick())
            case ("enter", i):
                self.comers -= 1
                self.feed(i, m.Enter())
            case ("notice", i):
                self.leaves -= 1
                self.feed(i, m.Notice(("leave", self.states[i].me)))
            case ("late", i):
                self.late -= 1
                self.feed(i, m.Notice(("leave", self.states[i].me), urgent=True, save=True))
            case ("hint", i, member):
                self.hints -= 1
                self.feed(i, m.Hint(("leave", member)))
            case ("park",):
                self.park()
            case ("resume", i):
                self.hung -= {i}
            case ("heal",):
                self.cut, self.store_cut = frozenset(), False
            case ("crash", i):
                self.alive[i] = False
                self.hung -= {i}
            case ("hang", i):
                self.hung |= {i}
            case ("cut", i, with_store):
                self.cut, self.store_cut = frozenset([i]), with_store
            case ("lose store",):
                self.store_up = False
            case ("damage", ("send", number, layer, _, target) as entry):
                self.mail -= {entry}
                self.feed(target, m.Damaged(number, layer))
            case ("damage", i, layer):
                self.damage(i, layer)
            case _:
                raise AssertionError(action)

    def _deliver(self, entry: Action) -> None:
        match entry:
            case ("cas", _, effect):
                self.mail -= {entry}
                self.compare_and_set(effect)
            case ("read", i):
                self.mail -= {entry}
                self.feed(i, m.StoreSays(self.record))
            case ("send", number, layer, _, target):
                self.mail -= {entry}
                self.feed(target, m.Received(number, layer))
            case ("ask", source, target):
                self.mail -= {entry}
                self.feed(target, m.Asked(self.states[source].me))
            case ("bye", number, _, target):
                self.mail -= {entry}
                self.feed(target, m.Farewell(number))
            case ("prepare", i, number, changes):
                self.mail -= {entry}
                self.feed(i, m.Prepared(number, changes, self._comes_ahead(i, changes)))

    def _comes_ahead(self, i: int, changes: frozenset[m.Change]) -> frozenset[int]:
        """The layers that a member has got ahead of a change, once it says that it is prepared."""
        state = self.states[i]
        assert state.layout is not None
        seats = {other.me: Seat(other.me, other.host, other.capacity) for other in self.states}
        return find_ahead(
            state.me, state.record, state.layout, changes, seats, self.job.place, self.job.layer_bytes
        ).mine

    def tidy(self) -> None:
        """Forgets what can have no effect any more, so that worlds with one future are one."""
        live = [state for i, state in enumerate(self.states) if self.alive[i] and state.phase is not Phase.STOPPED]
        answered = {state.record.number for state in live if state.phase in _ANSWERING}
        self.records = self._known(live)
        self.casts = {key: values for key, values in self.casts.items() if self._is_awaited(*key, live)}
        for i in range(len(self.states)):
            if not self.alive[i]:
                self.memory[i] = frozenset()
        self.mail = frozenset(entry for entry in self.mail if self._matters(entry))
        self.behind = {
            number: count for number, count in self.behind.items() if number in answered and self._may_vote(number)
        }
        self.asks = frozenset(ask for ask in self.asks if self.alive[ask[0]])
        self.damaged = frozenset(one for one in self.damaged if (one.layer, one.stamp) in self.memory[one.holder])
        at = {state.at for state in live}
        self.saves = {stamp: done for stamp, done in self.saves.items() if stamp in at and stamp.generation in answered}
        self.rounds = {number: step for number, step in self.rounds.items() if number in answered}
        newest = max(self.bases)
        self.bases = {number: base for number, base in self.bases.items() if number in answered or number == newest}
        stamps = {stamp for memory in self.memory for _, stamp in memory} | set(self.bases.values()) | self.disk
        reached = {stamp for top in stamps for stamp in self._past(top) if stamp.step > self.settled.step}
        self.parents = {stamp: parent for stamp, parent in self.parents.items() if stamp in reached}

    def _is_awaited(self, number: int, turn: int, live: Sequence[State]) -> bool:
        """Whether somebody can still act on a round of a generation."""
        there = [state for state in live if state.record.number == number and state.phase in _ANSWERING]
        if turn == 0:
            gathers = any(state.phase is not Phase.RUN for state in there)
            return gathers or any(self._may_enter(state, number) for state in live)
        return any(state.round <= turn for state in there)

    def _may_enter(self, state: State, number: int) -> bool:
        """Whether a member that has not adopted a generation can still do so."""
        if number not in self.records or state.me not in self.records[number].participants:
            return False
        seen = number == self.record.number or self.scenario.stale
        return state.record.number < number and (seen or (state.unseen is not None and state.unseen.number == number))

    def _known(self, live: Sequence[State]) -> dict[int, Generation]:
        """The records that are the store's, or a member's, or still to be seen by one."""
        named = {state.record.number for state in live} | {state.unseen.number for state in live if state.unseen}
        oldest = min(named, default=self.record.number) if self.scenario.stale else self.record.number
        return {
            number: record
            for number, record in self.records.items()
            if number >= oldest or number in named or not self.compare
        }

    def _matters(self, entry: Action) -> bool:
        match entry:
            case ("cas", _, effect):
                return bool(effect.expected >= self.record.number) or not self.compare
            case ("send", number, layer, _, target):
                state = self.states[target]
                known = state.record.number
                wanted = state.phase is Phase.GATHER or (state.phase is Phase.INSTALL and layer in state.missing)
                return self.alive[target] and (number > known or (number == known and wanted))
            case ("offer", number, step, _):
                return any(self._may_copy(i, number, step) for i in range(len(self.states)))
            case ("bye", number, _, target):
                return self.alive[target] and self.states[target].record.number <= number
            case ("ask", source, target):
                member, state = self.states[source].me, self.states[target]
                wanted = self.states[source].wants_in and member not in self.record.members
                news = ("join", member) not in state.changes and state.phase not in (Phase.STOPPED, Phase.OUTSIDE)
                return wanted and news and self.alive[source] and self.alive[target]
            case ("read", i):
                return self.alive[i] and self.states[i].phase is Phase.OUTSIDE
            case ("prepare", i, number, changes):
                state = self.states[i]
                here = self.alive[i] and state.phase is Phase.RUN and state.record.number == number
                return here and state.prepared != changes
        return True

    def _may_vote(self, number: int) -> bool:
        """Whether all voters of a generation can still take part in another vote."""
        voters = [self.index[member] for member in self.records[number].members]
        return all(self.alive[i] and self.left[i] < number for i in voters)

    def _may_copy(self, i: int, number: int, step: int) -> bool:
        """Whether a member can still wait for what it follows in a step of a generation."""
        state = self.states[i]
        if not self.alive[i] or number not in self.records or state.me not in self.records[number].members:
            return False
        if state.record.number != number:
            return self._may_enter(state, number)
        if state.phase in (Phase.GATHER, Phase.INSTALL):
            return True
        due = state.round < step or (state.round == step and not state.cast and state.copied != step)
        return state.phase is Phase.RUN and due

    def key(self) -> tuple[Any, ...]:
        """Equal for worlds that cannot be told apart."""
        states = [living(state, self.record) if self.alive[i] else None for i, state in enumerate(self.states)]
        memory = [
            valid(entries, adopts(state, self.record)) for entries, state in zip(self.memory, self.states, strict=True)
        ]
        casts = tuple(
            (key, tuple((member, brought(value, self.records[key[0]])) for member, value in sorted(values.items())))
            for key, values in sorted(self.casts.items())
        )
        return (
            *states,
            *memory,
            tuple(self.left[i] if self.alive[i] else -1 for i in range(len(states))),
            tuple(sorted(self.records.items(), key=lambda item: item[0])),
            casts,
            self.mail,
            (self.hung, self.cut, self.store_cut, self.store_up, self.leaves, self.hasty, self.comers),
            (self.faults, self.kinds if self.faults else ()),
            (self.hints, self.late, self.wished, self.hinted, self.asks),
            self._told_next(),
            (self.disk, tuple(sorted((stamp, tuple(sorted(done))) for stamp, done in self.saves.items()))),
            (
                tuple(sorted(self.parents.items())),
                tuple(sorted(self.bases.items())),
                tuple(sorted(self.rounds.items())),
            ),
            (tuple(sorted(self.behind.items())), self.settled, self.protected),
        )

    def _told_next(self) -> tuple[Any, ...]:
        """What members will say of their copies, and what is damaged, without what is void."""
        if not self.proves:
            return ()
        records = [adopts(state, self.record) for state in self.states]
        return (
            tuple(
                frozenset(proof for proof in self.proofs(i) if records[i].continues(proof.stamp))
                for i in range(len(records))
                if self.alive[i]
            ),
            frozenset(one for one in self.damaged if records[one.holder].continues(one.stamp)),
        )

    def done(self) -> bool:
        """Whether a group has trained to the end, or the run has ended as it may."""
        if not self.store_up:
            return True  # at the next change all stop with their state on disk
        if not any(self.alive[i] for i in range(len(self.states)) if self.states[i].phase is not Phase.OUTSIDE):
            return not any(self.alive[i] and state.wants_in for i, state in enumerate(self.states))
        voters = [self.states[self.index[member]] for member in self.record.members]
        return bool(voters) and all(
            self.alive[self.index[state.me]]
            and state.phase is Phase.RUN
            and state.record.number == self.record.number
            and state.at.step >= self.scenario.steps
            for state in voters
        )
