"""Which actions could come next in a world with mail: deliveries, computations, time limits that end, faults."""

from __future__ import annotations

from collections.abc import Iterator

from tests.rig.search.deliveries import Action, PostWorld
from varuna_capslog.membership.changes import Phase

__all__ = ["ANSWERING", "OpenWorld"]

ANSWERING = (Phase.GATHER, Phase.INSTALL, Phase.RUN)
"""The phases in which a member takes part in its generation."""


class OpenWorld(PostWorld):
    """A world that lists the actions that could come next in it."""

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
            newest = max(number, state.unseen.number if state.unseen else 0)
            for newer in range(
                newest + 1 if self.scenario.stale else max(newest + 1, self.record.number), self.record.number + 1
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
        if state.phase in ANSWERING and state.votes and self._broken(i):
            yield ("broken", i)
        notice = ("leave", state.me)
        if (
            self.leaves
            and state.phase in (Phase.RUN, Phase.WAIT)
            and state.votes
            and notice not in state.wishes.changes
        ):
            yield ("notice", i)
        if self.late and state.votes and notice not in state.wishes.changes:
            yield ("late", i)
        for member in state.record.members if self.hints else ():
            if ("leave", member) not in state.wishes.hints:
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

    def _may_apply(self, i: int) -> bool:
        """Return True if a member may learn next that all have voted for its step."""
        state = self.states[i]
        voters = [self.index[member] for member in state.record.members]
        voted = state.phase is Phase.RUN and state.cast and self.is_unanimous(state.record.number, state.round)
        return voted and all(self.reach(i, j) for j in voters)

    def _offered(self, i: int) -> bool:
        """Return True if the owners of all layers that i follows have sent the data that the vote waits for."""
        state = self.states[i]
        if state.roles.layout is None or not (state.roles.copies or state.roles.shadows):
            return False
        need = set(state.roles.copies | state.roles.shadows)
        for kind, *details in self.mail:
            if kind == "offer" and details[:2] == [state.record.number, state.round] and self.reach(i, details[2]):
                need.difference_update(state.roles.layout.owned.get(self.states[details[2]].me, ()))
        return not need

    def _broken(self, i: int) -> bool:
        """Return True if a member that i waits for is gone, or has left the generation."""
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
            is_asking = any(entry[0] in ("ask", "cas", "read") and entry[1] == i for entry in self.mail)
            return not is_asking and self.record.number == state.record.number
        return False

    def _deliverable(self, entry: Action) -> bool:
        match entry:
            case ("cas", i, _):
                return self.reach_store(i)
            case ("read", i):
                alike = self.states[i].record.number == self.record.number  # else the watch tells
                return alike and self.alive[i] and i not in self.hung and self.reach_store(i)
            case ("send", number, layer, source, target):  # a layer that arrives before the decision waits for it
                state = self.states[target]
                wanted = state.record.number == number and layer in state.roles.missing
                return wanted and self.alive[target] and target not in self.hung and self.reach(source, target)
            case ("prepare", i, number, changes):
                state = self.states[i]
                soon = state.phase is Phase.RUN and not state.cast and state.copied != state.round
                return (
                    soon and state.record.number == number and i not in self.hung and state.wishes.prepared != changes
                )
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
            if "hiccup" in kinds and i not in self.hung and self.states[i].phase in ANSWERING:
                yield ("hiccup", i), True
            if "starve" in kinds and i not in self.hung and self._may_apply(i):
                yield ("starve", i), True
        if "store" in kinds and self.store_up:
            yield ("lose store",), True
        if "damage" in kinds:
            for i in inside:
                for layer in self.copies_ahead(i):
                    yield ("damage", i, layer), True
            for entry in self.mail:
                if entry[0] == "send" and entry[3] >= 0 and self._deliverable(entry):
                    yield ("damage", entry), True
