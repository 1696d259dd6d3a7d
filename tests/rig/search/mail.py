"""Worlds as values: an action makes another world, and worlds with the same future are merged.

`explore` visits them. `post` carries out actions, `possible` lists them; this module removes from a world all that
cannot affect its future, so that `key` is equal for worlds with the same future.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.rig.search.deliveries import Action, Scenario
from tests.rig.search.forgetting import adopts, brought, living, valid
from tests.rig.search.places import with_pipeline
from tests.rig.search.possible import ANSWERING, OpenWorld
from varuna_capslog.membership import messages as m
from varuna_capslog.membership.changes import Phase, State
from varuna_capslog.membership.generation import Generation, Stamp

__all__ = ["Action", "MailWorld", "Scenario"]


class MailWorld(OpenWorld):
    """A world that `explore` can keep unchanged, and recognise."""

    def begin(self) -> None:
        """Founds generation 1 and trains nothing yet: all own layers are initialised."""
        names = [f"m{number}" for number in range(self.scenario.members)]
        self.record = self.record.successor(names)
        if self.scenario.motions:
            self.record = with_pipeline(self.record, len(self.job.layer_bytes))
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

    def copy(self) -> MailWorld:
        """This world once more, to change."""
        world = type(self).__new__(type(self))
        world.__dict__.update(self.__dict__)
        for name in ("states", "alive", "memory", "left"):
            setattr(world, name, list(getattr(self, name)))
        for name in ("records", "saves"):
            setattr(world, name, dict(getattr(self, name)))
        world.truth = self.truth.copy()
        world.casts = {key: dict(values) for key, values in self.casts.items()}
        return world

    def after(self, action: Action) -> MailWorld:
        """Return the world after an action; this one does not change."""
        world = self.copy()
        world.do(action)
        world.tidy()
        return world

    def tidy(self) -> None:
        """Forget all that can have no effect any more, so that worlds with the same future are equal."""
        live = [state for i, state in enumerate(self.states) if self.alive[i] and state.phase is not Phase.STOPPED]
        answered = {state.record.number for state in live if state.phase in ANSWERING}
        self.records = self._known(live)
        self.casts = {key: values for key, values in self.casts.items() if self._is_awaited(*key, live)}
        for i in range(len(self.states)):
            if not self.alive[i]:
                self.memory[i] = frozenset()
        self.mail = frozenset(entry for entry in self.mail if self._matters(entry))
        truth = self.truth
        truth.behind = {
            number: count for number, count in truth.behind.items() if number in answered and self._may_vote(number)
        }
        truth.asks = frozenset(ask for ask in truth.asks if self.alive[ask[0]])
        truth.damaged = frozenset(
            damage for damage in truth.damaged if (damage.layer, damage.stamp) in self.memory[damage.holder]
        )
        at = {state.at for state in live}
        self.saves = {stamp: done for stamp, done in self.saves.items() if stamp in at and stamp.generation in answered}
        truth.rounds = {number: step for number, step in truth.rounds.items() if number in answered}
        newest = max(truth.bases)
        truth.bases = {number: base for number, base in truth.bases.items() if number in answered or number == newest}
        stamps = {stamp for memory in self.memory for _, stamp in memory} | set(truth.bases.values()) | self.disk
        # a member that holds no layer may still begin with layers that a member lost by now had announced
        told = [value for values in self.casts.values() for value in values.values()]
        stamps |= {stamp for value in told if isinstance(value, m.Contribution) for _, stamp in value.held}
        if not self.job.sync:  # layers on their way to members that keep copies; their owner may be lost by now
            stamps |= {Stamp(entry[2] - 1, entry[1]) for entry in self.mail if entry[0] == "offer"}
        reached = {stamp for top in stamps for stamp in truth.past(top) if stamp.step > truth.settled.step}
        truth.parents = {stamp: parent for stamp, parent in truth.parents.items() if stamp in reached}

    def _is_awaited(self, number: int, turn: int, live: Sequence[State]) -> bool:
        """Return True if a member can still act on a round of a generation."""
        there = [state for state in live if state.record.number == number and state.phase in ANSWERING]
        if turn == 0:
            gathers = any(state.phase is not Phase.RUN for state in there)
            return gathers or any(self._may_enter(state, number) for state in live)
        return any(state.round <= turn for state in there)

    def _may_enter(self, state: State, number: int) -> bool:
        """Return True if a member that has not adopted a generation can still do so."""
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
                adopted = state.record.number
                wanted = state.phase is Phase.GATHER or (state.phase is Phase.INSTALL and layer in state.roles.missing)
                return self.alive[target] and (number > adopted or (number == adopted and wanted))
            case ("offer", number, step, _):
                return any(self._may_copy(i, number, step) for i in range(len(self.states)))
            case ("bye", number, _, target):
                return self.alive[target] and self.states[target].record.number <= number
            case ("ask", source, target):
                member, state = self.states[source].me, self.states[target]
                wanted = self.states[source].wants_in and member not in self.record.members
                news = ("join", member) not in state.wishes.changes and state.phase not in (
                    Phase.STOPPED,
                    Phase.OUTSIDE,
                )
                return wanted and news and self.alive[source] and self.alive[target]
            case ("read", i):
                return self.alive[i] and self.states[i].phase is Phase.OUTSIDE
            case ("prepare", i, number, changes):
                state = self.states[i]
                is_preparing = self.alive[i] and state.phase is Phase.RUN and state.record.number == number
                return is_preparing and state.wishes.prepared != changes
        return True

    def _may_vote(self, number: int) -> bool:
        """Return True if all voters of a generation can still take part in another vote."""
        voters = [self.index[member] for member in self.records[number].members]
        return all(self.alive[i] and self.left[i] < number for i in voters)

    def _may_copy(self, i: int, number: int, step: int) -> bool:
        """Return True if a member can still wait for the layers that it follows in a step of a generation."""
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
            (self.hints, self.late, self.truth.wished, self.truth.hinted, self.truth.asks),
            self._told_next(),
            (self.disk, tuple(sorted((stamp, tuple(sorted(done))) for stamp, done in self.saves.items()))),
            (
                tuple(sorted(self.truth.parents.items())),
                tuple(sorted(self.truth.bases.items())),
                tuple(sorted(self.truth.rounds.items())),
            ),
            (tuple(sorted(self.truth.behind.items())), self.truth.settled, self.truth.protected),
            self.truth.missed,
        )

    def _told_next(self) -> tuple[Any, ...]:
        """Return the proofs that members will send of their copies, and the damaged copies, without void ones."""
        if not self.proves:
            return ()
        records = [adopts(state, self.record) for state in self.states]
        return (
            tuple(
                frozenset(proof for proof in self.proofs(i) if records[i].continues(proof.stamp))
                for i in range(len(records))
                if self.alive[i]
            ),
            frozenset(damage for damage in self.truth.damaged if records[damage.holder].continues(damage.stamp)),
        )

    def done(self) -> bool:
        """Return True if a group has trained to the end, or the run has ended in another permitted way."""
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
