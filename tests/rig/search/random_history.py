"""Simulates a random history: deliveries drawn from a pool, injected faults, healing and passing time.

`histories` draws the parameters of a history and plays it to its end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.rig.search.places import make_job, with_drawn_plan, with_small_motion
from tests.rig.search.world import Transition, World
from varuna_capslog.membership import messages as m
from varuna_capslog.membership.changes import Phase, State
from varuna_capslog.membership.generation import Member, MemberLayout, Stamp

__all__ = ["DAMAGE", "FAULTS", "LADDER", "REBALANCE", "History", "HistoryOutcome", "RandomHistory"]


Delivery = tuple[Any, ...]

_ANSWERING = (Phase.GATHER, Phase.INSTALL, Phase.RUN)

FAULTS = (
    *("crash", "bulk", "hang", "cut", "hiccup", "false alarm"),
    *("leave", "urgent leave", "join", "checkpoint", "store"),
)
LADDER = ("hint", "late leave")
"""More of them in histories with the whole ladder of notices: a hint; a leave that may be cut off on its way."""

REBALANCE = ("rebalance", "rebalance", "starve", "starve")
"""More of them in histories where founders draw plans: another plan is wished for the same members, or needed by one
that finds no memory when it applies a step."""

DAMAGE = ("damaged copy", "damaged layer", "damaged copy", "damaged layer")
"""More of them in histories with damage: of a copy made ahead of a change, of a layer on its way."""


@dataclass(frozen=True)
class History:
    """Parameters of a history; all of them follow from the seed (see `draw`).

    Attributes:
        members: number of members at the beginning, each on its own host.
        faults: number of faults, evenly spread over the expected number of events.
        steps: step at which training ends.
        loss, double, early: probability that a delivery is lost or doubled, and that a `Tick` comes too early.
        store_may_die: the store's loss is among the faults (then all may stop).
        ladder: hints, and leaves that want a checkpoint first, are among the faults.
        damage: damaged copies and layers are among the faults.
        plans: most founders draw a plan of any rectangles, which the record carries.
        motions: with `plans`, most founders after a loss hand the lost stages out and keep the copies that there are.
    """

    seed: int
    members: int
    num_layers: int
    redundancy: int
    sync: bool
    shadows: bool
    fewest: int
    replicas: int
    faults: int
    steps: int
    loss: float = 0.0
    double: float = 0.0
    early: float = 0.0
    store_may_die: bool = False
    ladder: bool = False
    damage: bool = False
    plans: bool = False
    motions: bool = False


@dataclass
class HistoryOutcome:
    """Outcome of a history."""

    events: int = 0
    generations: int = 0
    step: int = 0
    went_back: int = 0
    motions: int = 0
    ended: str = ""
    faults: Counter[str] = field(default_factory=Counter)


class RandomHistory(World):
    """A world whose mail is a pool that is drawn from."""

    def __init__(self, history: History, transition: Transition, compare: bool) -> None:
        job = make_job(
            history.num_layers, history.redundancy, history.sync, history.shadows, history.fewest, history.replicas
        )
        super().__init__(job, history.redundancy, transition, compare, history.damage)
        self.history = history
        self.dice = random.Random(f"course {history.seed}")
        self.pool: list[Delivery] = []
        self.waiting: dict[int, list[Delivery]] = {}  # deliveries that a member cannot take yet
        self.hung: set[int] = set()
        self.cut: set[int] = set()
        self.store_cut = False
        self.store_up = True
        self.outcome = HistoryOutcome()
        self.sent: dict[tuple[int, int], set[int]] = {}
        self.offers: dict[tuple[int, int], dict[int, int]] = {}
        self.followers: tuple[MemberLayout | None, dict[Member, list[int]], dict[int, int]] = (None, {}, {})
        self.aborted: set[int] = set()
        self.views: dict[Any, frozenset[Member]] = {}
        self.spoils: list[str] = []  # damage that waits for something to strike
        self.starving: set[int] = set()

    # -- mail ----------------------------------------------------------------------------------------------------------

    def emit(self, i: int, effect: m.Effect) -> None:
        post = self.pool.append
        match effect:
            case m.Cast(number, turn, _):
                if self.is_complete(number, turn):
                    record = self.records[number]
                    for member in record.members if turn else record.participants:
                        post(("tally", self.index[member], number, turn))
                    self.casts.pop((number, turn - 3), None)
            case m.Compute(number, step):
                if step <= self.history.steps:
                    post(("compute", i, number, step))
                if not self.job.sync:
                    self._offer(i, number, step)
            case m.CompareAndSet():
                if self.history.motions and self.dice.random() < 0.8:
                    effect = with_small_motion(effect, self.states[i], self.dice)
                    self.outcome.motions += effect.record.copies is not None
                post(("cas", i, effect))
            case m.ReadStore():
                post(("watch", i))
            case m.Send(number, layer, _, target):
                post(("received", self.index[target], i, number, layer))
            case m.Load(number, layer, _):
                post(("received", i, -1, number, layer))
            case m.Ask(members):
                self.pool += [("asked", self.index[member], i) for member in members]
            case m.LetLeave(number, members):
                self.pool += [("bye", self.index[member], i, number) for member in members]
            case m.Prepare(number, changes, hinted=False):
                post(("prepared", i, number, changes))
            case m.Release():  # the process ends
                self.alive[i] = False
                self._tell()
            case m.SaveAll() if not self.is_saving(i):  # the last share: all can compute
                for j in self.saves[self.states[i].at]:
                    self.pool += self.waiting.pop(j, ()) if j not in self.hung else ()
            case m.Abort(number):
                if number not in self.aborted:
                    self.aborted.add(number)
                    self.pool += [("broken", self.index[name], number) for name in self.records[number].participants]
            case _:
                pass

    def _offer(self, i: int, number: int, step: int) -> None:
        """Note that an owner has sent its layers to their followers; a follower that has all its layers may vote."""
        layout = self.states[i].roles.layout
        if layout is None:
            return
        if self.job.shadows:
            self.sent.setdefault((number, step), set()).add(i)
            self.sent.pop((number, step - 3), None)
            self._offer_shadows(number, step)
            return
        if self.followers[0] is not layout:
            owner_of: dict[int, list[Member]] = {}
            for member, layers in layout.owned.items():
                for layer in layers:
                    owner_of.setdefault(layer, []).append(member)
            following: dict[Member, list[int]] = {}
            needs: dict[int, int] = {}
            for member, layers in layout.copied.items():
                owners = {owner_of[layer][0] for layer in layers}
                needs[self.index[member]] = len(owners)
                for owner in owners:
                    following.setdefault(owner, []).append(self.index[member])
            self.followers = (layout, following, needs)
        _, following, needs = self.followers
        counts = self.offers.setdefault((number, step), {})
        self.offers.pop((number, step - 3), None)
        for j in following.get(self.states[i].me, ()):
            counts[j] = counts.get(j, 0) + 1
            if counts[j] == needs[j]:
                self.pool.append(("copied", j, i, number, step))

    def _offer_shadows(self, number: int, step: int) -> None:
        """Like `_offer`, where the layers that members follow change from step to step: check every member."""
        sent = self.sent.get((number, step), set())
        for j, state in enumerate(self.states):
            need = set(state.roles.copies | state.roles.shadows)
            if state.record.number != number or state.roles.layout is None or not need or state.copied >= step:
                continue
            for i in sent:
                need.difference_update(state.roles.layout.owned.get(self.states[i].me, ()))
            if not need:
                self.pool.append(("copied", j, min(sent), number, step))

    def reach(self, i: int, j: int) -> bool:
        return i < 0 or (i in self.cut) == (j in self.cut)

    def reach_store(self, i: int) -> bool:
        return self.store_up and (not self.cut or (i in self.cut) == self.store_cut)

    def view(self, i: int) -> frozenset[Member]:
        """Return the members that a perfect failure detector at i suspects."""
        key = i in self.cut
        if key not in self.views:
            gone = [
                state.me
                for j, state in enumerate(self.states)
                if not self.alive[j] or state.phase is Phase.STOPPED or j in self.hung or (j in self.cut) != key
            ]
            self.views[key] = frozenset(gone)
        return self.views[key]

    def deliver(self, mail: Delivery) -> None:
        """Make a delivery, if possible; mail that a hung or cut off member misses counts as lost."""
        kind, i = mail[0], mail[1]
        if kind == "cas":
            if self.reach_store(i):
                before = self.record.number
                draws = self.history.plans and mail[2].record.copies is None and self.dice.random() < 0.8
                self.compare_and_set(with_drawn_plan(mail[2], self.history.num_layers, self.dice) if draws else mail[2])
                if self.record.number != before:
                    self.pool += [("watch", j) for j in range(len(self.states)) if self.alive[j]]
            self.pool.append(("watch", i))  # the answer
            return
        if not self.alive[i] or self.states[i].phase is Phase.STOPPED:
            return
        if i in self.hung:
            self.waiting.setdefault(i, []).append(mail)  # it stays in the socket
            return
        state = self.states[i]
        self._hand_over(i, mail)
        now = self.states[i]
        if (now.phase, now.record.number, now.round) != (state.phase, state.record.number, state.round):
            self.pool += self.waiting.pop(i, ())
            if self.job.shadows:
                self._offer_shadows(now.record.number, now.round)

    def _hand_over(self, i: int, mail: Delivery) -> None:
        state = self.states[i]
        match mail:
            case ("watch", _):
                if self.reach_store(i):
                    self.feed(i, m.StoreSays(self.record))
                elif not self.store_up:
                    self.feed(i, m.StoreLost())
            case ("tally", _, number, turn):
                voters = self.records[number].members if turn else self.records[number].participants
                if all(self.reach(self.index[member], i) for member in voters) if self.cut else True:
                    if i in self.starving and state.round == turn > 0 and state.cast:
                        self.starving.remove(i)
                        self.feed(i, m.Tightened(number, 1, voted=True))
                    elif (values := self.casts.get((number, turn))) is not None:
                        self.feed(i, m.Tally(number, turn, values))
                else:
                    self.feed(i, m.Broken(number))
            case ("compute", _, number, step) if state.record.number == number and self.is_saving(i):
                self.waiting.setdefault(i, []).append(mail)
            case ("compute", _, number, step):
                if self.job.sync and state.record.number == number and state.phase is Phase.RUN:
                    self._offer(i, number, step)
                if state.record.number == number and state.phase is Phase.RUN and state.round == step:
                    self.compute(i, step)
            case ("copied", _, source, number, step):
                if not self.reach(source, i):
                    self.feed(i, m.Broken(number))
                elif (state.record.number, state.round) < (number, step):
                    self.waiting.setdefault(i, []).append(mail)
                else:
                    self.feed(i, m.Copied(number, step))
            case ("received", _, source, number, layer):
                if not self.reach(source, i):
                    self.feed(i, m.Broken(number))
                elif state.record.number < number or (state.record.number == number and state.phase is Phase.GATHER):
                    self.waiting.setdefault(i, []).append(mail)
                else:
                    self.feed(i, m.Received(number, layer))
            case ("damaged", _, _, number, layer):
                if state.record.number < number or (state.record.number == number and state.phase is Phase.GATHER):
                    self.waiting.setdefault(i, []).append(mail)
                else:
                    self.feed(i, m.Damaged(number, layer))
            case ("asked", _, source) if self.reach(source, i):
                self.feed(i, m.Wished(("join", self.states[source].me)))
            case ("bye", _, source, number) if self.reach(source, i):
                self.feed(i, m.Farewell(number))
            case ("broken", _, number):
                self.feed(i, m.Broken(number))
            case ("suspect", _):
                self.feed(i, m.Suspects(self.view(i)))
            case ("prepared", _, number, changes):
                layers = frozenset(layer for layer in range(self.history.num_layers) if self.dice.random() < 0.3)
                self.feed(i, m.Prepared(number, changes, layers))
                self._offer_shadows(number, state.round)
            case ("told", _, event) if self.reach_store(i):
                self.feed(i, event)
            case _:
                pass

    # -- faults --------------------------------------------------------------------------------------------------------

    def strike(self) -> None:
        """Inject a fault or a wished change, drawn at random."""
        kinds = (*FAULTS, *LADDER, *LADDER) if self.history.ladder else FAULTS
        kinds = (*kinds, *REBALANCE) if self.history.plans else kinds
        kind = self.dice.choice((*kinds, *DAMAGE) if self.history.damage else kinds)
        inside = [i for i, state in enumerate(self.states) if self.alive[i] and state.phase is not Phase.STOPPED]
        if not inside or (kind == "store" and not self.history.store_may_die):
            return
        if kind in DAMAGE:
            self.spoils.append(kind)
            return
        self.outcome.faults[kind] += 1
        i = self.dice.choice(inside)
        match kind:
            case "crash":
                self.alive[i] = False
            case "bulk":
                for j in self.dice.sample(inside, self.dice.randint(1, max(1, len(inside) // 2))):
                    self.alive[j] = False
            case "hang":
                self.hung.add(i)
            case "cut":
                self.cut = set(self.dice.sample(inside, self.dice.randint(1, max(1, len(inside) // 2))))
                self.store_cut = self.dice.random() < 0.5
            case "hiccup":
                self.feed(i, m.Broken(self.states[i].record.number))
            case "false alarm":
                self.feed(i, m.Suspects(frozenset([self.states[self.dice.choice(inside)].me])))
            case "leave" | "urgent leave":
                self.feed(i, m.Wished(("leave", self.states[i].me), kind == "urgent leave"))
            case "starve":
                self.starving.add(i)
            case "rebalance":
                self.feed(i, m.Wished(("rebalance", self.states[i].me)))
            case "hint" | "late leave":  # all read it in the log, each at its own time
                change = ("leave", self.states[i].me)
                event = m.Hint(change) if kind == "hint" else m.Wished(change, urgent=True, save=True)
                self.pool += [("told", j, event) for j in range(len(self.states)) if self.alive[j]]
            case "join":
                self._enter()
            case "checkpoint":
                self._checkpoint()
            case "store":
                self.store_up = False
        self._tell()

    def spoil(self) -> None:
        """Damage a copy made ahead, or a layer on its way, as soon as there is one."""
        for kind in tuple(self.spoils):
            copies = [
                (i, layer)
                for i, is_alive in enumerate(self.alive)
                if is_alive
                for layer in sorted(self.copies_ahead(i))
            ]
            sent = [number for number, mail in enumerate(self.pool) if mail[0] == "received" and mail[2] >= 0]
            if kind == "damaged copy" and copies:
                self.damage(*self.dice.choice(copies))
            elif kind == "damaged layer" and sent:
                number = self.dice.choice(sent)
                self.pool[number] = ("damaged", *self.pool[number][1:])
            else:
                continue
            self.spoils.remove(kind)
            self.outcome.faults[kind] += 1

    def _enter(self) -> None:
        number = len(self.states)
        newest = max(self.disk)  # by step: the checkpoint that a joining member finds; it need not lie on the lineage
        i = self.add(State(f"m{number:04d}", f"h{number:04d}", checkpoint=newest))
        self.feed(i, m.Enter())

    def _checkpoint(self) -> None:
        """Complete where all voters of a generation stand at one boundary."""
        voters = [self.index[member] for member in self.record.members]
        ats = {self.states[i].at for i in voters}
        running = all(self.alive[i] and self.states[i].phase is Phase.RUN for i in voters)
        if voters and running and len(ats) == 1 and self.states[voters[0]].at.generation == self.record.number:
            stamp: Stamp = ats.pop()
            self.disk |= {stamp}
            for i in voters:
                self.feed(i, m.Checkpointed(stamp))

    def _tell(self) -> None:
        """Have the failure detectors report all changes."""
        self.views.clear()
        self.pool += [("suspect", i) for i in range(len(self.states)) if self.alive[i]]

    def heal(self) -> None:
        """Ends all faults that can end."""
        self.hung.clear()
        self.cut.clear()
        self.pool += [mail for i in sorted(self.waiting) for mail in self.waiting[i]]
        self.waiting.clear()
        self._tell()

    # -- time ----------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Nothing is under way: time passes, and the time limits of members that wait are over."""
        self.views.clear()
        voters = [self.index[member] for member in self.record.members]
        if voters and self.store_up and not any(self.alive[i] for i in voters):
            self.park()
            self.pool += [("watch", j) for j in range(len(self.states)) if self.alive[j]]
        for i in self._shuffled(i for i, alive in enumerate(self.alive) if alive and i not in self.hung):
            state = self.states[i]
            lost = self.view(i).intersection(state.record.participants)
            if state.phase in _ANSWERING and (state.phase is not Phase.RUN or not self._at_end(i)):
                if lost != state.suspects:
                    self.feed(i, m.Suspects(lost))
                else:  # nothing more will come: the time limit of its communication is reached
                    self.feed(i, m.Broken(state.record.number))
            elif lost != state.suspects and state.phase is Phase.CHANGE:
                self.feed(i, m.Suspects(lost))
            self.feed(i, m.Tick())

    def _at_end(self, i: int) -> bool:
        state = self.states[i]
        return state.at.step >= self.history.steps and state.record.number == self.record.number

    def _shuffled(self, members: Iterable[int]) -> list[int]:
        order = list(members)
        self.dice.shuffle(order)
        return order

    def done(self) -> str:
        """Return how the run has ended; empty while it goes on."""
        voters = [self.index[member] for member in self.record.members]
        if voters and all(self.alive[i] and self.states[i].phase is Phase.RUN and self._at_end(i) for i in voters):
            return "trained"
        living = [state for i, state in enumerate(self.states) if self.alive[i]]
        if not any(state.phase is not Phase.OUTSIDE or state.wants_in for state in living):
            return "left"  # no member is there that wants to train
        if not self.store_up:
            ended = (Phase.STOPPED, Phase.OUTSIDE, Phase.WAIT)  # these have written what they hold, or hold nothing
            return "stopped" if all(state.phase in ended for state in living) else ""
        voters_left = [self.states[i] for i in voters if self.alive[i]]
        waiting = voters_left and all(state.phase is Phase.WAIT and not state.regress for state in voters_left)
        return "waits" if waiting and not any(state.wants_in for state in living) else ""
