"""The truth behind the protocol: each member's memory, the store's contents, the votes, and the rules.

A `World` holds the members' protocol states and plays memory, disk and store for them. It carries out every effect and
raises `Violation` at the first one that breaks a rule, whatever the members believe. Its two drivers deliver messages:
`explore` tries every order, `histories` draws one.

The rules, each checked where it could break:

1. No member answers a generation that it has left, nor casts two values in one round; none acts on an unfinished round.
2. Once a generation is founded, an older one completes at most the vote that was under way: never two groups train.
3. Equal stamps are equal states: each has one predecessor, and no member computes with a mixture.
4. A settled step (all voters hold it) is never lost, unless a generation's record says that it may go back; and that
   is needed only where more members are gone than the redundancy covers. Members lost before a generation that keeps
   the existing copies count as long as it and others like it train.
5. A step is applied at most once in the past of any state, and without gaps.
6. A member sends, drops and claims only what it holds; all members of a generation decide alike, by the plan that its
   record carries, if it carries one.
7. Members come and go because of a loss or a wish. A hint changes no membership, and copies are made ahead only of
   what was hinted or wished.
8. Where a vote asks for a checkpoint, all who act on it write one at that boundary and no others do; the change
   that it was asked for begins after it. A member that knows of such a wish asks with each vote until there is one.
9. A copy made ahead that differs from its owner's state is never used where that owner takes part and could tell: it
   is not sent, and no member begins with it.
10. A layer that arrives damaged is not taken, and the member that lacks it answers that generation never again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.rig.search.ground_truth import Damage, GroundTruth
from varuna_capslog.membership import messages as m
from varuna_capslog.membership import protocol
from varuna_capslog.membership.changes import Job, Phase, State, Step
from varuna_capslog.membership.generation import EMPTY, INITIAL, Generation, Held, Member, Stamp

__all__ = ["Transition", "Violation", "World"]

Transition = Callable[[Job, State, m.ProtocolEvent], Step]


class Violation(AssertionError):
    """A rule of the protocol is broken; the message names the rule, the member and the event."""


class World:
    """Members, memories, disk and store.

    Args:
        redundancy: number of losses that the placement must cover, by rule 4.
        transition: the protocol, or a broken one.
        compare: the store compares before it sets; False is a broken store.
        proves: members compare copies made ahead with their owners, as a live run does; without damage the outcome is
            the same, and there are fewer states to tell apart.
    """

    def __init__(
        self,
        job: Job,
        redundancy: int,
        transition: Transition = protocol.step,
        compare: bool = True,
        proves: bool = False,
    ) -> None:
        self.job, self.redundancy, self.transition, self.compare = job, redundancy, transition, compare
        self.proves = proves
        self.states: list[State] = []
        self.alive: list[bool] = []
        self.memory: list[frozenset[tuple[int, Stamp]]] = []
        self.left: list[int] = []  # newest generation that a member has left for ever
        self.index: dict[Member, int] = {}
        self.records: dict[int, Generation] = {0: EMPTY}
        self.record = EMPTY
        self.disk: frozenset[Stamp] = frozenset([INITIAL])
        self.saves: dict[
            Stamp, frozenset[int]
        ] = {}  # members that have written their share of a checkpoint that a vote asked for
        self.casts: dict[tuple[int, int], dict[Member, m.Value]] = {}
        self.truth = GroundTruth()

    def add(self, state: State, memory: frozenset[tuple[int, Stamp]] | None = None) -> int:
        """Lets a process into the world; `memory` is what it really holds (by default what it claims)."""
        self.index[state.me] = len(self.states)
        self.states.append(state)
        self.alive.append(True)
        self.memory.append(state.held if memory is None else memory)
        self.left.append(-1)
        return len(self.states) - 1

    # -- events --------------------------------------------------------------------------------------------------------

    def feed(self, i: int, event: m.ProtocolEvent) -> None:
        """Pass an event to a member, and carry out and check all of its effects.

        Raises:
            Violation: a rule is broken.
        """
        before = self.states[i]
        state, effects = self.transition(self.job, before, event)
        self._told(i, event, state)
        if (
            isinstance(event, m.Received)
            and event.layer in before.roles.missing
            and event.layer not in state.roles.missing
        ):
            self._store(i, (event.layer, before.at))
        elif isinstance(event, m.Copied | m.Prepared):
            for entry in state.held - before.held:
                self._store(i, entry)
        self.states[i] = state
        answers = state.phase in (Phase.GATHER, Phase.INSTALL, Phase.RUN) and state.votes
        if isinstance(event, m.Damaged) and answers and state.record.number == event.generation:
            self._fail(10, i, event, "goes on in a generation in which a layer arrived damaged")
        self._saves_as_asked(i, event, before, effects)
        if self.truth.asks and state.wishes.changes is not before.wishes.changes:
            # a member that gave up a wish need not ask for its change; it asks for no other
            self.truth.asks -= {(i, change) for change in before.wishes.changes - state.wishes.changes}
        for effect in effects:
            self._perform(i, effect, before)
        if state.held is not before.held and (dropped := before.held - state.held):
            if not dropped <= self.memory[i]:
                self._fail(6, i, event, "drops what it does not hold")
            self.memory[i] -= dropped
            self.truth.damaged = frozenset(
                damage for damage in self.truth.damaged if not self._is_of(damage, i, dropped)
            )
        if state.held is not before.held and not state.held <= self.memory[i]:
            self._fail(6, i, event, f"claims {sorted(state.held - self.memory[i])}, which is not in its memory")
        if state.phase is Phase.RUN and state.record.number not in self.truth.bases:
            self._fail(6, i, event, "trains in a generation whose base nobody decided")

    def _told(self, i: int, event: m.ProtocolEvent, state: State) -> None:
        """Update the ground truth: wished and hinted changes, and members that know that a checkpoint comes first."""
        match event:
            case m.Wished(change):
                if change not in self.truth.wished:
                    self.truth.wished |= {change}
                if event.save and change in state.wishes.changes:
                    self.truth.asks |= {(i, change)}
            case m.Hint(change):
                self.truth.hinted |= {change}
            case m.Computed() if i in self.saves.get(state.at, ()) and state.at.generation == state.record.number:
                self.truth.asks -= {(i, change) for change in state.wishes.changes}

    def _saves_as_asked(self, i: int, event: m.ProtocolEvent, before: State, effects: Sequence[m.Effect]) -> None:
        state, number = self.states[i], before.record.number
        applied = [effect for effect in effects if isinstance(effect, m.Apply)]
        saves = any(isinstance(effect, m.SaveAll) for effect in effects)
        if not applied:
            if saves:
                self._fail(8, i, event, "writes a checkpoint without a vote")
            return
        asking, changes = self.asked_of(number, before.round)
        is_asked = asking is not None
        if is_asked and state.wishes.planned:
            self._fail(8, i, event, "begins a change before the checkpoint that was asked for")
        if state.wishes.planned and not changes:
            self._fail(7, i, event, "begins a change that nobody wishes")
        goes_on = state.phase is Phase.RUN and state.record.number == number
        if saves != (is_asked and goes_on):
            self._fail(
                8, i, event, f"{'writes a' if saves else 'does not write the'} checkpoint; asked for: {is_asked}"
            )
        if asking is not None and goes_on:
            self.truth.asks |= {(i, change) for change in asking & state.wishes.changes}

    def asked_of(self, number: int, turn: int) -> tuple[frozenset[m.Change] | None, bool]:
        """The changes before which a vote asks for a checkpoint, None if for none; and whether it wishes any change."""
        votes = [vote for vote in self.casts[number, turn].values() if isinstance(vote, m.Vote)]
        asking = [vote.changes for vote in votes if vote.save]
        return frozenset[m.Change]().union(*asking) if asking else None, any(vote.changes for vote in votes)

    def _store(self, i: int, entry: tuple[int, Stamp]) -> None:
        self.memory[i] |= {entry}

    def _fail(self, rule: int, i: int, cause: Any, text: str) -> None:
        raise Violation(f"rule {rule}: {self.states[i].me} {text} (at {cause})")

    def _perform(self, i: int, effect: m.Effect, before: State) -> None:
        match effect:
            case m.Cast():
                self._cast(i, effect)
            case m.Apply():
                self._apply(i, effect)
            case m.Send():
                if (effect.layer, effect.stamp) not in self.states[i].held:
                    self._fail(6, i, effect, "sends what it does not hold")
                self._decided(i, effect.generation, effect.stamp, effect)
                self._uses(i, effect.generation, effect.layer, effect.stamp, effect)
            case m.Load():
                if effect.stamp not in self.disk:
                    self._fail(6, i, effect, "loads a checkpoint that does not exist")
                self._decided(i, effect.generation, effect.stamp, effect)
            case m.Install():
                self._install(i, effect)
            case m.Abort():
                self.left[i] = max(self.left[i], effect.generation)
            case m.CompareAndSet():
                if effect.expected > self.left[i] and self.states[i].me in self.records[effect.expected].members:
                    self._fail(1, i, effect, "founds a successor of a generation that it still answers")
                self._is_wished(i, effect)
            case m.Prepare(hinted=True):
                if not effect.changes <= self.truth.hinted:
                    self._fail(7, i, effect, "copies ahead what nobody has hinted")
            case m.Prepare():
                if not effect.changes <= self.truth.wished:
                    self._fail(7, i, effect, "prepares what nobody wishes")
            case m.SaveAll():
                self._save(i, effect)
            case _:
                pass
        self.emit(i, effect)

    def _is_wished(self, i: int, effect: m.CompareAndSet) -> None:
        """Check that a member that leaves by this record is lost, as far as its founder knows, or was wished to leave,
        and that a member that joins was wished to join.
        """
        before, after = self.records[effect.expected], effect.record
        for member in set(before.members) - set(after.members) - self.states[i].suspects:
            if ("leave", member) not in self.truth.wished:
                self._fail(7, i, effect, f"founds a generation without {member}, neither lost nor told to leave")
        for member in set(after.members) - set(before.members) - {self.states[i].me}:
            if ("join", member) not in self.truth.wished:
                self._fail(7, i, effect, f"lets {member} in, which nobody asked for")

    def _save(self, i: int, effect: m.SaveAll) -> None:
        """A member's share is written; the checkpoint is complete with the last one."""
        stamp = self.states[i].at
        if stamp.generation != effect.generation:
            self._fail(8, i, effect, f"writes a checkpoint of {stamp}")
        self.saves[stamp] = self.saves.get(stamp, frozenset()) | {i}
        if len(self.saves[stamp]) == len(self.records[effect.generation].members):
            self.disk |= {stamp}

    def is_saving(self, i: int) -> bool:
        """Return True while a member writes a checkpoint with others and cannot compute before it is complete."""
        at, number = self.states[i].at, self.states[i].record.number
        return at.generation == number and i in self.saves.get(at, ()) and at not in self.disk

    def compute(self, i: int, step: int) -> None:
        """End a member's computation; its writes before that step are complete."""
        number, at = self.states[i].record.number, self.states[i].at
        if at.generation == number and i in self.saves.get(at, ()) and self.states[i].checkpoint != at:
            self.feed(i, m.Checkpointed(at))
        self.feed(i, m.Computed(number, step))

    def emit(self, i: int, effect: m.Effect) -> None:
        """Take an effect that leaves the member; implemented by the class that drives the world."""

    # -- damage --------------------------------------------------------------------------------------------------------

    def copies_ahead(self, i: int) -> frozenset[int]:
        """Return the layers of which a member holds a copy made ahead that is sound and may be found damaged."""
        state, struck = self.states[i], {damage.layer for damage in self.truth.damaged if damage.holder == i}
        if state.phase not in (Phase.RUN, Phase.CHANGE):  # later its digest is already told
            return frozenset()
        return frozenset(layer for layer in state.roles.shadows - struck if (layer, state.at) in state.held)

    def damage(self, i: int, layer: int) -> None:
        """Make a copy made ahead, and all states that follow from it, differ from its owner's state."""
        holder_state = self.states[i]
        owners = frozenset(
            j for j, state in enumerate(self.states) if state.record == holder_state.record and layer in state.roles.own
        )
        # the boundary in memory is the oldest that the member can give
        self.truth.damaged |= {
            Damage(i, layer, stamp, owners) for held_layer, stamp in holder_state.held if held_layer == layer
        }

    def proofs(self, i: int) -> frozenset[m.Proof]:
        """Proofs that a member sends in a first round, of the copies made ahead and of the layers that it trains."""
        if not self.proves:
            return frozenset()
        state = self.states[i]
        struck = {(damage.layer, damage.stamp) for damage in self.truth.damaged if damage.holder == i}
        oldest: dict[int, Stamp] = {}
        for layer, stamp in state.held:
            if layer in state.roles.shadows:
                oldest[layer] = min(stamp, oldest.get(layer, stamp))
        proved = [(layer, stamp, True) for layer, stamp in state.held if layer in state.roles.own]
        return frozenset(
            m.Proof(layer, stamp, owner, f"damaged at {i}" if (layer, stamp) in struck else "sound")
            for layer, stamp, owner in [*proved, *((layer, stamp, False) for layer, stamp in oldest.items())]
        )

    def _is_of(self, damage: Damage, i: int, held: Held) -> bool:
        return damage.holder == i and (damage.layer, damage.stamp) in held

    def _can_judge(self, damage: Damage, number: int) -> bool:
        """Return True if a participant of a generation owned the layer when its copy was damaged, and still owns it."""
        told = {self.index[member]: value for member, value in self.casts[number, 0].items()}
        return any(
            proof.owner and proof.layer == damage.layer
            for j in damage.owners & told.keys()
            for proof in getattr(told[j], "proofs", ())
        )

    def _uses(self, i: int, number: int, layer: int, stamp: Stamp, effect: m.Effect) -> None:
        """Check a state with which a generation begins, at this member or another one."""
        for damage in self.truth.damaged:
            if self._is_of(damage, i, frozenset([(layer, stamp)])) and self._can_judge(damage, number):
                self._fail(9, i, effect, f"uses a damaged copy of layer {layer}, though its owner could tell")

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _cast(self, i: int, effect: m.Cast) -> None:
        me, number = self.states[i].me, effect.generation
        if number <= self.left[i]:
            self._fail(1, i, effect, f"answers generation {number}, which it has left")
        record = self.records[number]
        voters = record.members if effect.round else record.participants
        if me not in voters:
            self._fail(1, i, effect, "has no vote there")
        self.left[i] = max(self.left[i], number - 1)
        if isinstance(effect.value, m.Vote):
            self._wishes(i, effect, effect.value)
        value = effect.value
        if isinstance(value, m.Contribution):
            value = replace(value, proofs=self.proofs(i))
        values = self.casts.setdefault((number, effect.round), {})
        if me in values and values[me] != value:
            self._fail(1, i, effect, "casts a second value in the same round")
        if me in values:
            return
        values[me] = value
        if effect.round and len(values) == len(voters) and self.is_unanimous(number, effect.round):
            self._voted(i, effect, record)

    def _wishes(self, i: int, effect: m.Cast, vote: m.Vote) -> None:
        if not vote.changes <= self.truth.wished or not vote.hints <= self.truth.hinted:
            self._fail(7, i, effect, "votes for a change that nobody wishes, or hints at")
        forgotten = {change for change in vote.changes if (i, change) in self.truth.asks}
        if forgotten and not vote.save:
            self._fail(8, i, effect, f"does not ask for the checkpoint that is to come before {sorted(forgotten)}")

    def is_complete(self, number: int, turn: int) -> bool:
        """Return True if all members have cast in a round."""
        record = self.records[number]
        voters = record.members if turn else record.participants
        return len(self.casts.get((number, turn), ())) == len(voters)

    def is_unanimous(self, number: int, turn: int) -> bool:
        """Return True if a vote is complete and no member is against the step."""
        votes = self.casts.get((number, turn), {}).values()
        return self.is_complete(number, turn) and all(isinstance(vote, m.Vote) and vote.finite for vote in votes)

    def _voted(self, i: int, effect: m.Cast, record: Generation) -> None:
        """Check a step whose last vote was cast; it is open which members will learn of it."""
        number = record.number
        if number < self.record.number:
            self.truth.behind[number] = self.truth.behind.get(number, 0) + 1
            if self.truth.behind[number] > 1:
                self._fail(2, i, effect, f"trains on although generation {self.record.number} was founded")
        if effect.round != self.truth.rounds.get(number, self.truth.bases[number].step) + 1:
            self._fail(5, i, effect, f"completes step {effect.round} after {self.truth.rounds.get(number)}")
        at = self.states[i].at
        for member in record.members:
            voter_state = self.states[self.index[member]]
            if voter_state.record.number == number and voter_state.at != at:
                self._fail(3, i, effect, f"votes from {at}, {member} from {voter_state.at}")
        self.truth.rounds[number] = effect.round
        if number == max(self.truth.bases):
            self.truth.settled = at  # all of them voted from this boundary
            if record.copies is None:
                self.truth.protected, self.truth.missed = record.members, frozenset()
            else:  # no new copies were made, and losses now add up with those before
                self.truth.missed |= set(self.truth.protected) - set(record.members)

    def _apply(self, i: int, effect: m.Apply) -> None:
        state, after = self.states[i], Stamp(effect.step, effect.generation)
        if not self.is_unanimous(effect.generation, effect.step):
            self._fail(1, i, effect, "applies a step that not all have voted for")
        if effect.step != effect.before.step + 1:
            self._fail(5, i, effect, f"applies step {effect.step} to the boundary after step {effect.before.step}")
        if self.truth.parents.setdefault(after, effect.before) != effect.before:
            self._fail(
                3, i, effect, f"makes {after} from {effect.before}; others made it from {self.truth.parents[after]}"
            )
        follows = state.roles.own | state.roles.shadows | (state.roles.copies if self.job.sync else frozenset())
        for layer in follows:
            if (layer, effect.before) not in self.memory[i]:
                self._fail(3, i, effect, f"applies the step to layer {layer}, which it does not hold at the boundary")
        self.memory[i] |= {(layer, after) for layer in follows}
        self.truth.damaged |= {
            damage._replace(stamp=after)
            for damage in self.truth.damaged
            if (damage.holder, damage.stamp) == (i, effect.before) and damage.layer in follows
        }

    # -- generations ---------------------------------------------------------------------------------------------------

    def compare_and_set(self, effect: m.CompareAndSet) -> None:
        """The store's one operation."""
        if effect.expected != self.record.number and self.compare:
            return
        if effect.record.number in self.records and effect.record != self.records[effect.record.number]:
            # Only a broken store can come here; the members' beliefs then differ from the truth.
            raise Violation(f"rule 2: two records claim to be generation {effect.record.number}")
        self.record = effect.record
        self.records[effect.record.number] = effect.record

    def park(self) -> None:
        """Close a generation whose voters have all ended, as the observer of deaths does."""
        assert not any(self.alive[self.index[member]] for member in self.record.members)
        self.compare_and_set(m.CompareAndSet(self.record.number, self.record.parked()))

    def _install(self, i: int, effect: m.Install) -> None:
        state = self.states[i]
        self._decided(i, effect.generation, effect.base, effect)
        carried = self.records[effect.generation].plan
        if carried is not None and effect.layout.plan != carried:
            self._fail(6, i, effect, "begins with another plan than the record carries")
        for layer in state.roles.own:
            if (layer, effect.base) not in state.held:
                self._fail(6, i, effect, f"begins without layer {layer}")
            self._uses(i, effect.generation, layer, effect.base, effect)

    def _decided(self, i: int, number: int, base: Stamp, effect: m.Effect) -> None:
        """Check a member that acts on the decision of its generation's first round."""
        if not self.is_complete(number, 0):
            self._fail(1, i, effect, "acts on an unfinished round")
        if number in self.truth.bases:
            if self.truth.bases[number] != base:
                self._fail(6, i, effect, f"goes on from {base}, others from {self.truth.bases[number]}")
            return
        truth = self.truth
        newest = number > max(truth.bases, default=-1)
        truth.bases[number] = base
        participants = {self.index[member] for member in self.records[number].participants}
        # A copy that no participant can judge counts as the state of its stamp.
        truth.damaged = frozenset(
            damage for damage in truth.damaged if damage.holder not in participants or self._can_judge(damage, number)
        )
        if not newest or truth.settled in truth.past(base):
            return
        record = self.records[number]
        if not record.regress:
            self._fail(4, i, effect, f"goes on from {base} and loses {truth.settled}, which was settled")
        gone = set(truth.protected) - set(record.participants) | truth.missed
        if len(gone) <= min(self.redundancy, len(truth.protected) - 1):
            self._fail(4, i, effect, f"goes back from {truth.settled} to {base} though only {sorted(gone)} are gone")
        truth.settled = base
