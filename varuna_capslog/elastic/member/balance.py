"""Measures which devices are slower than planned while the run trains, and decides whether another plan is worth it.

With the vote of a step every member gets the busy seconds of each rank. Divided by the planned seconds they are the
slowness of the rank's device, for any reason: a slower device, other users of its machine, a profile that is wrong
about some layers. The first voter searches a plan for these speeds in a thread beside training, and requests a change
if the gain is at least `LEAST_GAIN`. After a change without the promised gain the next one waits longer.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base.processes import OwnedThread, logged
from varuna_capslog.membership.generation import Member, MemberLayout
from varuna_capslog.membership.placing import Placer
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.planning.playing import Played, play
from varuna_capslog.planning.simulation import treatments
from varuna_capslog.plans.parts import PlanRank
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules import RunShape

__all__ = ["Balance", "Finding", "Pace"]


WINDOW = 7
"""Number of steps of which the median counts: a rank must be slow in most of them."""
LEAST_GAIN = 1.1
"""Smallest ratio of the present step time to that of a plan that is worth a change."""
_ALIKE = 0.9
"""Devices with at least this fraction of the fastest one's speed count as equally fast; likewise two measurements."""
_RETRIED = 20
"""A member without layers cannot be measured: after this many times the least steps between two changes, its earlier
measurement is dropped, and it counts as the median.
"""
_SKIPPED = 1
"""First steps of a generation that are not measured: they include work that is done only once."""


@dataclass(frozen=True)
class Finding:
    """A plan that is worth a change.

    member: the slowest relative to the plan. slower: its slowness divided by the median of all members.
    speeds: by member, relative to the fastest. gain: step time of the present plan divided by that of the new plan.
    """

    member: Member
    slower: float
    speeds: dict[Member, float]
    gain: float

    @property
    def why(self) -> str:
        """Reason in words."""
        if self.slower <= 1 / _ALIKE:
            return "new cuts, since no device is slow any more"
        return f"new cuts, since {self.member} takes {self.slower:.2f} times as long as planned"


class Balance:
    """Speeds of all members, as one member knows them. Called by its one thread. The placer's profile needs seconds."""

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
        # the plan to be replaced, its measured step seconds, and the promised gain
        self._promised: tuple[Plan, float, float] | None = None
        self._speeds: dict[Member, float] = {}  # with which plans are searched
        self._tried: dict[Member, float] = {}  # speeds of the last search in this generation
        self._search: _PlanSearch | None = None

    def begin(self, members: Sequence[Member], plan: Plan) -> None:
        """Begin to measure: these members train by this plan from now on."""
        self._members, self._plan, self._planned = tuple(members), plan, {}
        self._busy.clear()
        self._steps.clear()
        self._made, self._search, self._tried = 0, None, {}

    def measured(self, busy_seconds: Sequence[float], step_seconds: float) -> None:
        """Record the times of a step. busy_seconds: by rank."""
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
            promise_kept = before / statistics.median(self._steps) >= (1 + gain) / 2
            self._patience = WINDOW if promise_kept else 2 * self._patience

    def seated(self, seats: Sequence[Seat]) -> list[Seat]:
        """Return the seats with the known speeds of their devices."""
        speeds = self._speeds_of([seat.member for seat in seats])
        return [seat._replace(speed=speeds[seat.member]) for seat in seats]

    def wanted(self, seats: Sequence[Seat]) -> Finding | None:
        """Return a plan that is worth a change, once; called after every step by the first voter."""
        if self._plan is None or (self._search is not None and self._search.is_alive()):
            return None
        if self._search is not None:
            finding, self._search = self._search.found, None
            if finding is not None:
                self._promised = self._plan, statistics.median(self._steps), finding.gain
            return finding
        if len(self._busy) < WINDOW or self._made < self._patience:
            return None
        speeds = self._speeds_of(self._members)
        before = self._tried or {member: self._plan.speed_of(rank) for rank, member in enumerate(self._members)}
        if _are_same(speeds, before):
            return None
        self._tried = speeds
        self._search = _PlanSearch(self._placer, self._plan, self.seated(seats), dict(self._slowness))
        self._search.start()
        return None

    def _speeds_of(self, members: Sequence[Member]) -> dict[Member, float]:
        """Speeds relative to the fastest; a member without a measurement counts as the median."""
        known_slowness = [slow for slow in self._slowness.values() if slow > 0]
        usual = statistics.median(known_slowness) if known_slowness else 1.0
        slowness = {member: self._slowness.get(member, usual) or usual for member in members}
        measured = _beside_the_fastest({member: 1 / slow for member, slow in slowness.items()})
        before = _beside_the_fastest({member: self._speeds.get(member, 1.0) for member in members})
        if _are_same(measured, before):
            return before  # so that plans prepared for these speeds are still found
        self._speeds |= measured
        return measured


class _PlanSearch(OwnedThread):
    """Thread beside training that searches a plan that is worth a change.

    plan: the present one. seats: of its members, with speeds. slowness: by member, busy seconds over planned seconds.
    found: set at the end; None: no plan is worth it.
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
        seat_speeds = list(speeds.values())
        now, then = (_played(self._placer, plan, seat_speeds).step_seconds for plan in (self._plan, proposed))
        if now >= LEAST_GAIN * then:
            slowness = {member: self._slowness[member] for member in speeds if self._slowness.get(member)}
            member = max(slowness, key=slowness.__getitem__)
            slower = slowness[member] / statistics.median_low(slowness.values())
            self.found = Finding(member, slower, speeds, now / then)


def _played(placer: Placer, plan: Plan, speeds: Sequence[float]) -> Played:
    """Simulated step of a plan on devices of these speeds, by rank."""
    candidates = placer.candidates
    assert candidates.profile is not None, "elastic.rebalance is refused without seconds"
    ranks = tuple(PlanRank(speed=speed) for speed in speeds[: plan.num_ranks])
    bare = dataclasses.replace(plan, ranks=ranks, fits=None, shortfall=None, profile_digest=None)
    run = candidates.run
    return play(candidates.profile, bare, None, None, run.recompute, run, candidates.link)


def _beside_the_fastest(speeds: dict[Member, float]) -> dict[Member, float]:
    fastest_speed = max(speeds.values(), default=1.0)
    relative = {member: max(0.01, round(speed / fastest_speed, 2)) for member, speed in speeds.items()}
    return {member: 1.0 if speed >= _ALIKE else speed for member, speed in relative.items()}


def _are_same(speeds: dict[Member, float], others: dict[Member, float]) -> bool:
    return all(_ALIKE <= speed / others[member] <= 1 / _ALIKE for member, speed in speeds.items())


# -- The step time that each generation's plan predicts, beside that of the plan before.


class Pace:
    """Planned step times of the generations that one member trained in. run: shape of the whole step, for all that
    plans leave open. event_fields: on the plan for the event of the newest generation.
    """

    def __init__(self, run: RunShape, device: str) -> None:
        self._run, self._device = run, device
        self._before: float | None = None
        self.event_fields: dict[str, Any] = {}

    def begin(self, plan: Plan) -> None:
        """Begin a generation that trains by this plan."""
        self.event_fields = self._of(plan)

    def _of(self, plan: Plan) -> dict[str, Any]:
        """Fields on a plan: "planned_step_seconds"; "planned_step_ratio" to the plan before, if that is known;
        "recomputed_layers" and "offloaded_layers", their numbers. Empty where the plan does not predict its step.
        """
        seconds, before = plan.step_seconds, self._before
        self._before = seconds
        if not seconds:
            return {}
        ratio = {"planned_step_ratio": seconds / before} if before else {}
        stages = treatments(plan, self._run, self._device)
        again = sum(end - first for stage in stages for first, end in stage.recomputed)
        away = sum(end - first for stage in stages for first, end in (*stage.offloaded, *stage.inputs_offloaded))
        return {"planned_step_seconds": seconds, **ratio, "recomputed_layers": again, "offloaded_layers": away}
