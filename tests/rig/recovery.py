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
        hang_seconds: a run hangs if it has not finished a step within this time after a fault.

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
        self.sizes.update(len(self._machines.members.of(event.generation)) for event in stepped)
        return stepped

    def wait(self, seconds: float) -> None:
        """Lets so much time pass."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.turn()

    def until(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait for a condition, described by `what`. Raises Hung after `seconds`."""
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() > until:
                raise Hung(f"the run did not come to {what} within {seconds:g} s")
            self.turn()

    def recover(
        self, hit: Hit, gone: Sequence[Member], until: float = 0.0, excused: frozenset[Member] = frozenset()
    ) -> Hit:
        """Wait for the next step of a generation without the members in `gone`; note in `hit` how long it took.

        Args:
            until: end of a fault that changes no membership (seconds since the epoch).
            excused: a step of a generation without any of these members ends the wait even before `until`.

        Raises:
            Hung: no such step is made in time.
        """
        members, records = self._machines.members, self._machines.records
        hit.victims = hit.victims or tuple(gone)
        lost = set(gone)
        begun = len(records.step_times)
        deadline = time.monotonic() + self.hang_seconds + max(0.0, until - time.time())
        while hit.recovered is None:
            if time.monotonic() > deadline:
                raise Hung(f"no step within {self.hang_seconds:g} s of {hit.kind} ({', '.join(hit.victims)})", hit)
            for event in sorted(self.turn(), key=lambda event: event.time):
                voters = set(members.of(event.generation))
                if event.time <= hit.time or not voters or voters & (lost | members.roster.dead):
                    continue
                if lost and event.generation < hit.generation:  # older generation, without members lost later
                    continue
                without = bool(excused) and not voters & excused
                if event.time > until or without:
                    hit.recovered = event.time - hit.time
                    break
        times = [at for at in records.step_times[max(0, begun - 50) :] if at <= hit.time + hit.recovered]
        first = max((index for index, at in enumerate(times) if at <= hit.time), default=0)
        hit.gap = max((b - a for a, b in zip(times[first:], times[first + 1 :], strict=False)), default=None)
        return hit
