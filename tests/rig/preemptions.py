"""Replays a recorded trace of preemptions on a run: workers come and go as the trace's nodes did, only faster.

Every node is a worker of one host. The result is the share of the ideal number of steps: the ideal run always makes
steps as fast as this one did with the same number of members, and changes between them take no time.
"""

from __future__ import annotations

import itertools
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.rig.chaos import Chaos
from tests.rig.judge import Segment
from tests.rig.outcome import ChaosOptions
from tests.rig.recovery import Hung
from tests.rig.tally import Hit
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Config
from varuna_capslog.membership.generation import Member
from varuna_capslog.planning.trace_replay import TraceEvent

__all__ = ["Goodput", "Preemptions", "Rent", "goodput", "rents"]

_SETTLE_SECONDS = 60.0


@dataclass(frozen=True)
class Rent:
    """The changes at one moment, in seconds of the run: nodes rented from then on, and nodes that they replace."""

    seconds: float
    joined: tuple[str, ...]
    left: tuple[str, ...]
    count: int


def rents(events: Sequence[TraceEvent], devices: int, scale: float, duration_seconds: float | None) -> list[Rent]:
    """Changes of a run with at most `devices` devices under the trace; further nodes wait, as in `trace_replay`.

    Args:
        scale: factor by which the replay is faster.
        duration_seconds: length of the replayed part, in the trace's own time; default: the whole trace.
    """
    if not scale > 0:
        raise CapslogError(f"scale {scale} is not positive; 60 makes a minute of an hour")
    begin = events[0].seconds
    end = begin + duration_seconds if duration_seconds is not None else events[-1].seconds
    present: list[str] = []
    rented: list[str] = []
    changes: list[Rent] = []
    for moment, group in itertools.groupby(events, key=lambda event: event.seconds):
        if moment > end:
            break
        for event in group:
            (present.append if event.kind == "add" else present.remove)(event.node)
        stay = [node for node in rented if node in present]
        joining = [node for node in present if node not in stay][: devices - len(stay)]
        leaving = tuple(node for node in rented if node not in stay)
        rented = stay + joining
        if leaving or joining:
            changes.append(Rent((moment - begin) / scale, tuple(joining), leaving, len(rented)))
    return changes


@dataclass(frozen=True)
class Goodput:
    """Steps of a run, compared with the steps of an ideal run.

    Attributes:
        steps: finished in `seconds`.
        ideal_steps: steps at the usual speed of each number of members, all the time that the trace had that many.
        rates: steps per second by number of members.
        lost_seconds: the difference between ideal and actual steps, as time at these speeds.
    """

    seconds: float
    steps: int
    ideal_steps: float
    rates: Mapping[int, float]
    lost_seconds: float

    @property
    def share(self) -> float:
        return self.steps / self.ideal_steps if self.ideal_steps else 1.0


def goodput(segment: Segment, counts: Sequence[tuple[float, int]], end: float) -> Goodput:
    """Compares the steps between two moments with the ideal.

    Args:
        counts: (seconds since the epoch, number of devices from then on), rising; the first is the start.
        end: seconds since the epoch.
    """
    begin = counts[0][0]
    members = {opening.generation: len(opening.members) for opening in segment.opened}
    finished: dict[tuple[int, int], float] = {}
    for step_event in segment.stepped:
        key = (step_event.generation, step_event.step)
        finished[key] = min(step_event.time, finished.get(key, step_event.time))
    lengths: dict[int, list[float]] = defaultdict(list)
    for (generation, step), at in finished.items():
        before = finished.get((generation, step - 1))
        if before is not None:
            lengths[members[generation]].append(at - before)
    usual = {count: 1.0 / statistics.median(durations) for count, durations in lengths.items() if len(durations) >= 3}
    if not usual:
        raise CapslogError("no number of members made four steps in a row; let the trace run slower")
    rates = {0: 0.0}  # more devices are never slower than fewer: a layout may leave some idle
    for count in range(1, max([*usual, *(count for _, count in counts)]) + 1):
        # a number of members that never trained cannot be faster than the next larger number
        next_rate = next((usual[more] for more in sorted(usual) if more >= count), 0.0)
        rates[count] = max(next_rate, rates[count - 1])
    steps = len({step for (_, step), at in finished.items() if begin < at <= end})
    ideal = 0.0
    for (moment, count), (until, _) in itertools.pairwise([*counts, (end, 0)]):
        ideal += max(0.0, min(until, end) - moment) * rates.get(count, 0.0)
    lost = (end - begin) * max(0.0, 1.0 - steps / ideal) if ideal else 0.0
    return Goodput(end - begin, steps, ideal, usual, lost)


class Preemptions(Chaos):
    """A run that a trace happens to.

    Args:
        notice_seconds: of the trace's time, between a notice and its node's end; 0: nodes end without.
    """

    def __init__(
        self,
        config: Config,
        options: ChaosOptions,
        trace: Sequence[Rent],
        scale: float,
        notice_seconds: float,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(config, options, say)
        self.trace, self.scale, self.notice = trace, scale, notice_seconds / scale
        self.goodput: Goodput | None = None
        self.losses = 0

    def _disturb(self, began: float) -> None:
        machines, members, recovery = self.machines, self.machines.members, self.recovery
        machines.begin()
        recovery.until(lambda: bool(machines.records.step_times), "its first step", _SETTLE_SECONDS)
        first = self.trace[0]
        machines.target = first.count
        machines.request(first.count)
        recovery.until(lambda: len(members.voters()) == first.count, f"{first.count} members", _SETTLE_SECONDS)
        recovery.wait(1.0)
        nodes: dict[str, Member | None] = dict(zip(first.joined, sorted(members.voters()), strict=True))
        counts = [(time.time(), first.count)]
        began = time.monotonic()
        for rent in self.trace[1:]:
            for node in rent.left if self.notice else ():
                self._pass(nodes, began + rent.seconds - self.notice)
                member = nodes.get(node)
                if member is not None:
                    machines.notice(member, "trace", deadline=self.notice)
            self._pass(nodes, began + rent.seconds)
            machines.target = rent.count
            for node in rent.left:
                self._end_of(nodes.pop(node))
            nodes.update(dict.fromkeys(rent.joined))
            counts.append((time.time(), rent.count))
            if rent.joined:
                machines.request(rent.count)
            self.say(f"{rent.seconds:7.1f} s  step {machines.records.step:6d}  {rent.count:2d} devices")
        self._pass(nodes, time.monotonic() + 2.0)
        end = time.time()
        self._stop()
        self.goodput = goodput(machines.records.segment, counts, end)

    def _pass(self, nodes: dict[str, Member | None], until: float) -> None:
        """Lets time pass; new members are given to the nodes that wait for one, in order."""
        while True:
            roster = self.machines.members.roster
            taken = set(nodes.values())
            free = [member for member in roster.members if member not in taken and member not in roster.noticed]
            for node, member in nodes.items():
                if free and (member is None or member in roster.dead):
                    nodes[node] = free.pop(0)
            if time.monotonic() >= until:
                return
            self.recovery.turn()
            self._check_progress()

    def _check_progress(self) -> None:
        times = self.machines.records.step_times
        if times and time.time() - times[-1] > self.options.hang_seconds:
            raise Hung(f"no step within {self.options.hang_seconds:g} s")

    def _end_of(self, member: Member | None) -> None:
        self.losses += 1
        if member is None:
            return
        self.hits.append(Hit(len(self.hits), "leave" if self.notice else "crash", time.time(), (member,)))
        if member in self.machines.members.roster.members:  # it has not left in time, or had no notice
            self.machines.members.signal(member, signal.SIGKILL)

    def summary(self) -> dict[str, Any]:
        """Return the numbers for a results file."""
        goodput = self.goodput
        if goodput is None:
            return {}
        return {
            "scale": self.scale,
            "notice_seconds": self.notice * self.scale,
            "seconds": round(goodput.seconds, 1),
            "changes": len(self.trace),
            "lost_nodes": self.losses,
            "steps": goodput.steps,
            "ideal_steps": round(goodput.ideal_steps, 1),
            "share_of_ideal": round(goodput.share, 4),
            "lost_seconds": round(goodput.lost_seconds, 2),
            "share_at_own_pace": round(1.0 - (1.0 - goodput.share) / self.scale, 5) if self.scale > 1 else None,
            "steps_per_second": {str(count): round(rate, 2) for count, rate in sorted(goodput.rates.items())},
        }
