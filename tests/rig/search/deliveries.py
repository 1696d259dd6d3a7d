"""A world with mail: everything that was sent and can still arrive, and the effect of each action on the world."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.rig.search.places import make_job, with_drawn_plan, with_small_motion
from tests.rig.search.world import Transition, World
from varuna_capslog.membership import messages as m
from varuna_capslog.membership.changes import Job, Phase, State, find_ahead
from varuna_capslog.membership.recovery import Seat

__all__ = ["Action", "PostWorld", "Scenario"]


Action = tuple[Any, ...]


@dataclass(frozen=True)
class Scenario:
    """Parameters of an exploration.

    Attributes:
        members: processes in generation 1 from the beginning; the rest of `processes` join later.
        faults: number of faults of these `kinds`, at any moment each.
        kinds: "crash", "hang", "cut", "store", "hiccup" (communication fails, no member is lost), "damage" (of a copy
            made ahead, or of a layer on its way) and "starve" (a member finds no memory when it applies a step), which
            are not among the default kinds.
        once: each kind of fault happens at most once.
        leaves: number of members that get a notice, at any moment.
        hints: number of hints to a member that a member, itself or another, may be told to leave; at any moment.
        late: number of members that get a notice without time for the move, so that a checkpoint must come first.
        steps: step at which training ends.
        singly: members receive rounds value by value.
        stale: a watch may deliver records that were replaced since; False: the newest only.
        hasty: number of `Tick`s that come too early; besides, one comes if nothing else can happen.
        plans: every founder draws a plan of any rectangles, which the record carries.
        motions: with `plans`, every founder after a loss hands the lost stages out and keeps the copies that there are.
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
    plans: bool = False
    motions: bool = False
    job: Job = field(default_factory=lambda: make_job(3))
    redundancy: int = 1


class PostWorld(World):
    """Members, memories, disk and store, and the mail between them: everything that was sent and not yet acted on."""

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
            self.add(State(f"m{number}", f"h{number}"))

    def emit(self, i: int, effect: m.Effect) -> None:
        match effect:
            case m.CompareAndSet():
                if self.scenario.motions:
                    effect = with_small_motion(effect, self.states[i], random.Random(f"{i} {effect.record.members}"))
                if self.scenario.plans and effect.record.copies is None:
                    # another one for each founder, and the same whenever it founds the same
                    dice = random.Random(f"{i} {effect.record.members}")
                    effect = with_drawn_plan(effect, len(self.job.layer_bytes), dice)
                self.mail |= {("cas", i, effect)}
            case m.Send():
                self.mail |= {("send", effect.generation, effect.layer, i, self.index[effect.target])}
            case m.Load():
                self.mail |= {("send", effect.generation, effect.layer, -1, i)}
            case m.Compute() if not self.job.sync:
                self.mail |= {("offer", effect.generation, effect.step, i)}
            case m.Ask():
                self.mail |= {("ask", i, self.index[member]) for member in effect.members}
            case m.LetLeave():
                self.mail |= {("bye", effect.generation, i, self.index[member]) for member in effect.members}
            case m.Prepare(hinted=False) if self.job.shadows:
                self.mail = frozenset(entry for entry in self.mail if entry[:2] != ("prepare", i))
                self.mail |= {("prepare", i, effect.generation, effect.changes)}
            case m.Release():  # the process ends
                self.alive[i] = False
            case m.ReadStore() if self.states[i].phase is Phase.OUTSIDE:
                self.mail |= {("read", i)}
            case _:
                pass

    def reach(self, i: int, j: int) -> bool:
        """Return True if mail passes between two members (or the disk, -1)."""
        return i < 0 or j < 0 or (i in self.cut) == (j in self.cut)

    def reach_store(self, i: int) -> bool:
        """Return True if a member reaches the store."""
        return self.store_up and (i in self.cut) == self.store_cut if self.cut else self.store_up

    def lost_to(self, i: int) -> frozenset[int]:
        """Return the members that a perfect failure detector at i considers lost."""
        ended = [not self.alive[j] or state.phase is Phase.STOPPED for j, state in enumerate(self.states)]
        return frozenset(
            j for j in range(len(ended)) if j != i and (ended[j] or j in self.hung or not self.reach(i, j))
        )

    def do(self, action: Action) -> None:
        """Carry out an action in this world."""
        kind = "store" if action[0] == "lose store" else action[0]
        if kind in self.scenario.kinds:
            self.faults -= 1
            if self.scenario.once:
                self.kinds = tuple(remaining for remaining in self.kinds if remaining != kind)
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
                self.feed(i, m.Wished(("leave", self.states[i].me)))
            case ("late", i):
                self.late -= 1
                self.feed(i, m.Wished(("leave", self.states[i].me), urgent=True, save=True))
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
            case ("starve", i):
                self.feed(i, m.Tightened(self.states[i].record.number, 1, voted=True))
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
                self.feed(target, m.Wished(("join", self.states[source].me)))
            case ("bye", number, _, target):
                self.mail -= {entry}
                self.feed(target, m.Farewell(number))
            case ("prepare", i, number, changes):
                self.mail -= {entry}
                self.feed(i, m.Prepared(number, changes, self._comes_ahead(i, changes)))

    def _comes_ahead(self, i: int, changes: frozenset[m.Change]) -> frozenset[int]:
        """Return the layers that a member has received ahead of a change, once it says that it is prepared."""
        mine = self.states[i]
        assert mine.roles.layout is not None
        seats = {state.me: Seat(state.me, state.host, state.capacity) for state in self.states}
        return find_ahead(
            mine.me, mine.record, mine.roles.layout, changes, seats, self.job.place, self.job.layer_bytes
        ).mine
