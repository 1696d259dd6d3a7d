"""Waiting for a chaos run: for time to pass, for a condition, and for the step that shows its recovery from a fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tests.rig.judge import Stepped
from tests.rig.machines.machines import Machines
from tests.rig.tally import Hit
from varuna_capslog.membership.generation import Member

__all__ = ["Hung", "Recovery"]


class Hung(Exception):
    """The run does not go on.

    Attributes:
        hit: the fault from which it has not recovered, where there is one.
    """

    def __init__(self, text: str, hit: Hit | None = None) -> None:
        super().__init__(text)
        self.hit = hit


class Recovery:
    """Waits while the machines run.

    Args:
        hang_seconds: a run that has not finished a step for so long after a fault hangs.

    Attributes:
        sizes: the numbers of members that have made steps so far.
    """

    def __init__(self, machines: Machines, hang_seconds: float) -> None:
        self.hang_seconds = hang_seconds
        self.sizes: set[int] = set()
        self._machines = machines

    def turn(self) -> list[Stepped]:
        """See `Machines.turn`."""
        stepped = self._machines.turn()
        self.sizes.update(len(self._machines.members.of(one.generation)) for one in stepped)
        return stepped

    def wait(self, seconds: float) -> None:
        """Lets so much time pass."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.turn()

    def until(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        """Waits for a condition, `what` in words. Raises Hung after so long."""
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() > until:
                raise Hung(f"the run did not come to {what} within {seconds:g} s")
            self.turn()

    def recover(
        self, hit: Hit, gone: Sequence[Member], until: float = 0.0, excused: frozenset[Member] = frozenset()
    ) -> Hit:
        """Waits for the next step of a generation without those that are gone; notes in `hit` how long it took.

        Args:
            until: a fault that changes no membership is over by then (seconds since the epoch).
            excused: a step of a generation without all of these ends the waiting also before the end of the fault.

        Raises:
            Hung: there is no such step in time.
        """
        members, records = self._machines.members, self._machines.records
        hit.victims = hit.victims or tuple(gone)
        lost = set(gone)
        begun = len(records.step_times)
        deadline = time.monotonic() + self.hang_seconds + max(0.0, until - time.time())
        while hit.recovered is None:
            if time.monotonic() > deadline:
                raise Hung(f"no step within {self.hang_seconds:g} s of {hit.kind} ({', '.join(hit.victims)})", hit)
            for one in sorted(self.turn(), key=lambda one: one.time):
                voters = set(members.of(one.generation))
                if one.time <= hit.time or not voters or voters & (lost | members.roster.dead):
                    continue
                if lost and one.generation < hit.generation:  # the last of an older one, without those lost later
                    continue
                without = bool(excused) and not voters & excused
                if one.time > until or without:
                    hit.recovered = one.time - hit.time
                    break
        times = [at for at in records.step_times[max(0, begun - 50) :] if at <= hit.time + hit.recovered]
        first = max((index for index, at in enumerate(times) if at <= hit.time), default=0)
        hit.gap = max((b - a for a, b in zip(times[first:], times[first + 1 :], strict=False)), default=None)
        return hit
