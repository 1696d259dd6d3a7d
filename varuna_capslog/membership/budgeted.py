"""Plans of planner `budget` for the members of a run: equal pipelines with memory intervals that keep to their devices.

Asked by the member that proposes a generation, and ahead of time for what may follow. Snapshots, and the copies that a
rank keeps for others, lie beside training and count against its device. Pure; no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from varuna_capslog.membership.candidates import Candidates
from varuna_capslog.membership.recovery import Seat, speeds_of
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.planners import BUDGET
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.layerwise import least_seconds
from varuna_capslog.planning.placed.whole_runs import GRAPH_SCHEDULES
from varuna_capslog.planning.playing import even_share_seconds, with_step_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.ranks import judged, with_stage_bytes
from varuna_capslog.planning.solve import solve
from varuna_capslog.planning.verdict import HostMemory
from varuna_capslog.plans.parts import PlanRank
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile, with_beside
from varuna_capslog.schedules import RunShape

__all__ = ["Budgeted", "neighbours"]

_NO_LIMIT = 1 << 62
"""Bytes of a device of unknown capacity beside others that are known."""


class Budgeted:
    """Plans by the capacities and speeds of the devices and the copies that they keep, remembered.

    Args:
        profile: with seconds.
        run: the whole step; its schedule may be left open.
        beside: bytes on the device beside training, per layer that a rank owns.
        tier, link: see `Problem`.
        limit_seconds: when to end a search; None: when all is searched.
    """

    def __init__(
        self,
        profile: Profile,
        run: RunShape,
        beside: Sequence[int],
        tier: HostMemory | None = None,
        link: Link | None = None,
        limit_seconds: float | None = None,
    ) -> None:
        self._profile, self._run, self._tier, self._link = profile, run, tier or HostMemory(), link or Link()
        self._held, self._limit_seconds = with_beside(profile, beside), limit_seconds
        self._known: dict[tuple[int, tuple[int, ...], tuple[int, ...], tuple[float, ...]], Plan] = {}
        self._new: list[Any] = []
        self._least: dict[tuple[int, int], float] = {}

    @classmethod
    def of(
        cls, candidates: Candidates, run: RunShape, tier: HostMemory, link: Link, limit_seconds: float | None = None
    ) -> Budgeted | None:
        """Return None where the run's planner is another one, or the profile lacks seconds or bytes of the run."""
        profile, beside = candidates.profile, candidates.beside
        ours = candidates.planner == BUDGET and candidates.described and candidates.timed
        if not ours or profile is None:
            return None
        return cls(profile, run, beside or [0] * profile.num_layers, tier, link, limit_seconds)

    def plan(self, seats: Sequence[Seat], copies: Sequence[int] = (), replicas: int = 1) -> Plan:
        """The plan of so many equal pipelines for the devices of these seats, by rank; where none fits, the one that
        lacks least.

        Its bytes are those of training alone; what lies beside is in its verdict.

        Args:
            copies: bytes that each rank keeps for others; default none.
            replicas: divides the run's blocks.
        """
        capacities, held = tuple(seat.capacity for seat in seats), tuple(copies) if any(copies) else ()
        key = replicas, capacities, held, speeds_of(seats) or ()
        if key not in self._known:
            self._known[key] = plan = self._search(*key)
            self._new.append([*key, plan.to_json()])
        return self._known[key]

    def replicas(self, devices: int) -> list[int]:
        """Numbers of equal pipelines that so many devices could be, those with the shortest step at best first."""
        counts = [
            count for count in range(1, min(devices, self._run.num_blocks) + 1) if self._run.num_blocks % count == 0
        ]
        if len(counts) == 1:  # the usual run has one block, and its members need not wait for bounds when they start
            return counts
        return sorted(counts, key=lambda count: (self.least_seconds(devices, count), -count))

    def least_seconds(self, devices: int, replicas: int) -> float:
        """Lower bound in seconds of the step of so many equal pipelines on these devices, whatever their memory."""
        key = min(devices // replicas, self._profile.num_layers), replicas
        if replicas == 1 and self._run.schedule in GRAPH_SCHEDULES:
            return even_share_seconds(self._profile, self._run.microbatches, key[0])
        if key not in self._least:
            share = self._run if replicas == 1 else self._run.share(replicas)
            self._least[key] = least_seconds(Problem.of(self._profile, key[0], None, share, self._link))
        return self._least[key]

    def prepare(self, devices: int) -> None:
        """Finds the least seconds of all that up to `devices` devices could be, while no member waits for them."""
        for count in range(1, devices + 1):
            self.replicas(count)

    def lack(self, plan: Plan, capacities: Sequence[int]) -> str | None:
        """Say what a plan of any pipelines lacks on these devices by the fold of its ranks, snapshots counted; None: it
        fits.
        """
        limits = tuple(PlanRank(capacity_bytes=size or None) for size in capacities[: plan.num_ranks])
        bare = dataclasses.replace(plan, ranks=limits, fits=None, shortfall=None, notes=())
        verdict = judged(self._held, bare, self._run.settled(), tier=self._tier)
        return None if verdict.fits else "; ".join(verdict.notes)

    def step_seconds(self, plan: Plan) -> float | None:
        """The step of any plan as it is played; None where it cannot be."""
        return with_step_seconds(self._profile, plan, self._run.settled(), self._link).step_seconds

    def taken(self) -> list[Any]:
        """Return the plans searched since the last call, for `learn` of other members; JSON values."""
        searched, self._new = self._new, []
        return searched

    def learn(self, entries: Sequence[Any]) -> None:
        """Take over what another member's `taken` returned. Raises CapslogError for an invalid plan."""
        for replicas, capacities, copies, speeds, plan in entries:
            key = replicas, tuple(capacities), tuple(copies), tuple(speeds)
            self._known.setdefault(key, Plan.from_json(plan, "a plan that was prepared for a change"))

    def _search(
        self, replicas: int, capacities: tuple[int, ...], copies: tuple[int, ...], speeds: tuple[float, ...]
    ) -> Plan:
        profile, headroom = self._profile, Headroom.of(self._profile)
        used = capacities[: replicas * min(len(capacities) // replicas, profile.num_layers)]
        limits: list[int | None] = [None] * len(used)
        if any(used):
            kept = copies or (0,) * len(used)
            room = [max(0, headroom.usable(size or _NO_LIMIT) - more) for size, more in zip(used, kept, strict=False)]
            limits = [max(1, headroom.device(size)) for size in room]
        of_rank = zip_longest(limits, speeds[: len(used)])
        devices = [PlanRank(capacity_bytes=size, speed=speed) for size, speed in of_rank]
        problem = Problem(
            self._held,
            tuple(devices),
            self._run,
            pipelines=replicas,
            link=self._link,
            tier=self._tier,
            members_change=True,
            search_seconds=self._limit_seconds,
        )
        verdict = solve(problem, BUDGET)
        run = dataclasses.replace(self._run, schedule=verdict.schedule or self._run.schedule)
        bare = dataclasses.replace(
            verdict,
            ranks=tuple(
                dataclasses.replace(rank, capacity_bytes=size or None)
                for rank, size in zip(verdict.ranks, used, strict=True)
            ),
            profile_digest=profile.digest,
            fits=None,
            shortfall=None,
            notes=(),
        )
        plan = judged(profile, bare, run, tier=self._tier)
        if not verdict.fits:
            plan = dataclasses.replace(plan, fits=verdict.fits, shortfall=verdict.shortfall, notes=verdict.notes)
        return with_stage_bytes(plan)


def neighbours(seats: Sequence[Seat], least: int = 1) -> Iterator[list[Seat]]:
    """Yield seats that there may be after the next changes, the likelier ones first: one less, one more, ever fewer.

    Seats whose devices and hosts are alike, by rank, are yielded once.

    Args:
        least: fewest devices that the run trains with.
    """
    hosts = {seat.host for seat in seats}
    more = Seat("?", min(hosts) if len(hosts) == 1 else "?", min(seat.capacity for seat in seats))
    groups = [[*seats[:out], *seats[out + 1 :]] for out in range(len(seats))]
    groups += [[*seats, more], *(list(seats[:count]) for count in range(len(seats) - 2, 0, -1))]
    seen = set()
    for group in groups:
        order: dict[str, int] = {}
        alike = tuple((seat.capacity, seat.speed, order.setdefault(seat.host, len(order))) for seat in group)
        if len(group) >= least and alike not in seen:
            seen.add(alike)
            yield group
