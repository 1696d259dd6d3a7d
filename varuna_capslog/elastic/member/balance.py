"""Which devices are slower than the plan says, learnt while the run trains, and whether another plan is worth a change.

The vote of a step tells every member how long each rank worked. Beside what the plan says of a rank this gives the
speed of its device, whatever the reason: a slower device, a machine that others use as well, a profile that is wrong
about some layers. The first voter searches a plan for these speeds in a thread beside the training, and wishes for it
where its step is shorter by enough. A change that did not bring what it promised makes the next one wait longer.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from varuna_capslog.base.threads import OwnedThread, logged
from varuna_capslog.membership.generation import Member, MemberLayout
from varuna_capslog.membership.placing import Placer
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.planning.playing import Played, play
from varuna_capslog.plans.parts import PlanRank
from varuna_capslog.plans.plan import Plan

__all__ = ["Balance", "Finding"]

WINDOW = 7
"""Steps whose median counts, so that a rank has to be slow in most of them."""
LEAST_GAIN = 1.1
"""A plan is worth a change where the step of the present one is so many times as long."""
_ALIKE = 0.9
"""Devices with so much of the fastest one's speed count as equally fast; speeds that differ by less, as the same."""
_RETRIED = 20
"""So many times the steps between two changes after which a member without layers, of which nothing can be measured, is
taken to be as fast as most are.
"""
_SKIPPED = 1
"""Steps of a generation that are not looked at: in the first one much is done for the first time."""


@dataclass(frozen=True)
class Finding:
    """A plan that is worth a change.

    Attributes:
        member: the one that is slowest beside what the plan says; slower: so many times as slow as most of them.
        speeds: by member, beside the fastest.
        gain: how many times as long the present plan's step is.
    """

    member: Member
    slower: float
    speeds: dict[Member, float]
    gain: float

    @property
    def why(self) -> str:
        """In words."""
        if self.slower <= 1 / _ALIKE:
            return "new cuts, since no device is slow any more"
        return f"new cuts, since {self.member} takes {self.slower:.2f} times as long as planned"


class Balance:
    """What one member knows of the speeds of all. Called by its one thread.

    Args:
        placer: of the run; its profile has the seconds of the layers.
    """

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._members: tuple[Member, ...] = ()
        self._plan: Plan | None = None
        self._planned: dict[int, float] = {}
        self._busy: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._made = 0  # steps of this generation
        self._patience = WINDOW
        self._slowness: dict[Member, float] = {}
        # the plan that was found wanting, its step, and the gain that another one promised
        self._promised: tuple[Plan, float, float] | None = None
        self._speeds: dict[Member, float] = {}  # that plans are searched with
        self._tried: dict[Member, float] = {}  # those of the last search in this generation
        self._search: _PlanSearch | None = None

    def begin(self, members: Sequence[Member], plan: Plan) -> None:
        """These members train by this plan from now on."""
        self._members, self._plan, self._planned = tuple(members), plan, {}
        self._busy.clear()
        self._steps.clear()
        self._made, self._search, self._tried = 0, None, {}

    def measured(self, busy_seconds: Sequence[float], step_seconds: float) -> None:
        """A step was made; busy_seconds: by rank."""
        self._made += 1
        if self._made <= _SKIPPED or not busy_seconds:
            return
        self._busy.append(busy_seconds)
        self._steps.append(step_seconds)
        if len(self._busy) < WINDOW or self._plan is None:
            return
        if not self._planned:  # on devices of the profile's own speed
            self._planned = _played(self._placer, self._plan, [1.0] * self._plan.num_ranks).busy_seconds
        for rank, member in enumerate(self._members):
            if seconds := self._planned.get(rank, 0.0):
                self._slowness[member] = statistics.median(row[rank] for row in self._busy) / seconds
            elif self._made > _RETRIED * self._patience:
                self._slowness.pop(member, None)
        if self._promised is not None and self._promised[0] is not self._plan:  # the change has been made
            _, before, gain = self._promised
            self._promised = None
            kept = before / statistics.median(self._steps) >= (1 + gain) / 2
            self._patience = WINDOW if kept else 2 * self._patience

    def seated(self, seats: Sequence[Seat]) -> list[Seat]:
        """The seats with the speeds of their devices, as far as they are known."""
        speeds = self._speeds_of([seat.member for seat in seats])
        return [seat._replace(speed=speeds[seat.member]) for seat in seats]

    def wanted(self, seats: Sequence[Seat]) -> Finding | None:
        """What is worth a change now, once; asked after every step by the first voter."""
        if self._plan is None or (self._search is not None and self._search.is_alive()):
            return None
        if self._search is not None:
            found, self._search = self._search.found, None
            if found is not None:
                self._promised = self._plan, statistics.median(self._steps), found.gain
            return found
        if len(self._busy) < WINDOW or self._made < self._patience:
            return None
        speeds = self._speeds_of(self._members)
        known = self._tried or {one: self._plan.speed_of(rank) for rank, one in enumerate(self._members)}
        if _are_same(speeds, known):
            return None
        self._tried = speeds
        self._search = _PlanSearch(self._placer, self._plan, self.seated(seats), dict(self._slowness))
        self._search.start()
        return None

    def _speeds_of(self, members: Sequence[Member]) -> dict[Member, float]:
        """Beside the fastest of them; who has not been measured is taken to be as slow as most are."""
        known = [one for one in self._slowness.values() if one > 0]
        usual = statistics.median(known) if known else 1.0
        slowness = {one: self._slowness.get(one, usual) or usual for one in members}
        measured = _beside_the_fastest({one: 1 / slow for one, slow in slowness.items()})
        before = _beside_the_fastest({one: self._speeds.get(one, 1.0) for one in members})
        if _are_same(measured, before):
            return before  # plans that were prepared for these speeds still hold
        self._speeds |= measured
        return measured


class _PlanSearch(OwnedThread):
    """Looks for a plan that is worth a change, beside the training.

    Args:
        plan: the present one.
        seats: of its members, with the speeds of their devices.
        slowness: by member, how many times as long as planned its work takes.

    Attributes:
        found: once it has ended; None: nothing is.
    """

    def __init__(self, placer: Placer, plan: Plan, seats: Sequence[Seat], slowness: dict[Member, float]) -> None:
        super().__init__("balance", self._look, logged)
        self._placer, self._plan, self._seats, self._slowness = placer, plan, seats, slowness
        self.found: Finding | None = None

    def _look(self) -> None:
        layout = self._placer(self._seats, self._placer.propose(self._seats))
        proposed = layout.plan if isinstance(layout, MemberLayout) else None
        if proposed is None:
            return
        speeds = {seat.member: seat.speed for seat in self._seats}
        own = list(speeds.values())
        now, then = (_played(self._placer, one, own).step_seconds for one in (self._plan, proposed))
        if now >= LEAST_GAIN * then:
            slowness = {one: self._slowness[one] for one in speeds if self._slowness.get(one)}
            member = max(slowness, key=slowness.__getitem__)
            slower = slowness[member] / statistics.median_low(slowness.values())
            self.found = Finding(member, slower, speeds, now / then)


def _played(placer: Placer, plan: Plan, speeds: Sequence[float]) -> Played:
    """A step of a plan on devices of these speeds, by rank."""
    candidates = placer.candidates
    assert candidates.profile is not None, "elastic.rebalance is refused without seconds"
    ranks = tuple(PlanRank(speed=speed) for speed in speeds[: plan.num_ranks])
    bare = dataclasses.replace(plan, ranks=ranks, fits=None, shortfall=None, profile_digest=None)
    run = candidates.run
    return play(candidates.profile, bare, None, None, run.recompute, run, candidates.link)


def _beside_the_fastest(speeds: dict[Member, float]) -> dict[Member, float]:
    most = max(speeds.values(), default=1.0)
    found = {one: max(0.01, round(speed / most, 2)) for one, speed in speeds.items()}
    return {one: 1.0 if speed >= _ALIKE else speed for one, speed in found.items()}


def _are_same(speeds: dict[Member, float], others: dict[Member, float]) -> bool:
    return all(_ALIKE <= speed / others[one] <= 1 / _ALIKE for one, speed in speeds.items())
