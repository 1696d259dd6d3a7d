"""Replays a recorded trace of spot machines: samples trained, time lost, and the layouts used."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners import JOINT
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.registry import REGISTRY, planner_named
from varuna_capslog.planning.solve import solve
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import DEFAULT_RUN, RunShape

__all__ = ["Deployment", "Pauses", "Prices", "Replanner", "Replay", "TraceEvent", "most_nodes", "read_trace", "replay"]


# -- The replay of a trace: arithmetic over events. No process is started; every pause is a parameter, not measured.


_HOUR = 3600.0


@dataclass(frozen=True)
class TraceEvent:
    """Event of a trace: at `seconds` since its begin, `node` joins (kind "add") or leaves ("remove")."""

    seconds: float
    kind: str
    node: str


@dataclass(frozen=True)
class Deployment:
    """Layout for a number of devices, such as "2 pipelines of 4 + 3 stages". Devices without a stage are idle.

    samples_per_second: of the simulated step. search_seconds: of planning, measured.
    """

    samples_per_second: float
    devices_used: int
    search_seconds: float
    description: str = ""


_NOTHING_FITS = Deployment(0.0, 0, 0.0, "nothing fits")

DeploymentOf = Callable[[int], Deployment | None]
"""Number of devices -> their layout; None where nothing fits."""


@dataclass(frozen=True)
class Pauses:
    """Pauses of the training when the membership changes: assumptions of a replay, in seconds.

    planned: for a join, or a leave with a notice at least `planned` seconds before: state moves during training.
    crash: for a leave without notice: detection, and repetition of the broken step.
    restart: from no layout (too few devices) back to training. The default is what a restart under torchrun took (torch
        2.13, default timeouts, two nodes: 42 to 45 s).
    notice: time between the notice and the leave, which traces do not contain. The default is AWS's two minutes; 0
        makes every leave a crash.
    """

    planned: float = 1.0
    crash: float = 10.0
    restart: float = 45.0
    notice: float = 120.0

    def __post_init__(self) -> None:
        _check_numbers(self, "pause", "a number of seconds")


@dataclass(frozen=True)
class Prices:
    """Dollars for one device and hour.

    Replace the defaults, which are assumptions: 3.06 is AWS's list price of p3.2xlarge (one V100, as in the p3 trace)
    on demand in us-east-1; 0.918 is 70 % less, a usual discount of spot machines.
    """

    spot: float = 0.918
    on_demand: float = 3.06

    def __post_init__(self) -> None:
        _check_numbers(self, "price", "dollars per device and hour")


def _check_numbers(record: Pauses | Prices, noun: str, unit: str) -> None:
    for name, number in vars(record).items():
        if not 0.0 <= number < float("inf"):
            raise CapslogError(f"{noun} {name} is {number}; give {unit}, 0 or more")


@dataclass(frozen=True)
class Change:
    """Change by all events of one moment of the trace. The values hold from then on.

    kind: "start", "join", "leave", "crash", "stop" (nothing fits any more) or "restart"; "none" for a join that does
        not change the layout, and where nothing fits, as before.
    search_seconds: measured. pause_seconds: assumed; includes the search after a crash and before a restart.
    """

    seconds: float
    kind: str
    joined: int
    left: int
    devices: int
    devices_used: int
    samples_per_second: float
    search_seconds: float
    pause_seconds: float
    description: str


@dataclass(frozen=True)
class Replay:
    """Result of a whole trace.

    samples: trained. ideal_samples: with the same layouts and no pause.
    device_hours: rented, also while pausing or stopped.
    on_demand_samples_per_second: of `devices` machines that always stay; None where nothing fits them.
    """

    duration_seconds: float
    devices: int
    changes: list[Change]
    samples: float
    ideal_samples: float
    paused_seconds: float
    stopped_seconds: float
    device_hours: float
    idle_device_hours: float
    on_demand_samples_per_second: float | None
    pauses: Pauses
    prices: Prices

    @property
    def goodput(self) -> float:
        """Samples per second over the whole duration."""
        return self.samples / self.duration_seconds

    @property
    def share_of_ideal(self) -> float:
        """Samples as a part of `ideal_samples`, 0 .. 1; 1 where `ideal_samples` is 0."""
        return self.samples / self.ideal_samples if self.ideal_samples > 0 else 1.0

    @property
    def spot_dollars(self) -> float:
        """Dollars for the rented devices."""
        return self.device_hours * self.prices.spot

    @property
    def spot_dollars_per_million(self) -> float | None:
        """Dollars per million samples; None where none was trained."""
        return 1e6 * self.spot_dollars / self.samples if self.samples > 0 else None

    @property
    def on_demand_dollars_per_million(self) -> float | None:
        """Dollars per million samples of `devices` machines on demand."""
        if not self.on_demand_samples_per_second:
            return None
        return 1e6 * self.devices * self.prices.on_demand / _HOUR / self.on_demand_samples_per_second

    @property
    def slowest_search_seconds(self) -> float:
        """Longest search of all changes."""
        return max((change.search_seconds for change in self.changes), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the replay for programs."""
        record = dataclasses.asdict(self)
        for name in (
            "goodput",
            "share_of_ideal",
            "spot_dollars",
            "spot_dollars_per_million",
            "on_demand_dollars_per_million",
            "slowest_search_seconds",
        ):
            record[name] = getattr(self, name)
        return record


def read_trace(path: str | os.PathLike[str]) -> list[TraceEvent]:
    """Read a trace: one event per line, `milliseconds since the begin, add | remove, node`, in time order, as in
    Bamboo's traces (uclasystem/bamboo). Raises CapslogError naming file, line and rule.
    """
    events: list[TraceEvent] = []
    present: set[str] = set()
    for number, row in enumerate(csv.reader(files.read_text(path).splitlines()), start=1):
        if not row:
            continue
        where = f"{path}, line {number}"
        if len(row) != 3 or not row[0].strip().isdecimal():
            raise CapslogError(f"{where}: {','.join(row)!r} is no event; write milliseconds,add|remove,node")
        seconds, kind, node = int(row[0]) / 1e3, row[1].strip(), row[2].strip()
        if kind not in ("add", "remove"):
            raise CapslogError(f"{where}: unknown event {kind!r}; use add or remove")
        if (node in present) == (kind == "add"):
            state = "is there already" if kind == "add" else "is not there"
            raise CapslogError(f"{where}: {kind} {node}, which {state}; mend the trace")
        if events and seconds < events[-1].seconds:
            raise CapslogError(f"{where}: {row[0]} ms come after {events[-1].seconds * 1e3:.0f} ms; sort the trace")
        (present.add if kind == "add" else present.discard)(node)
        events.append(TraceEvent(seconds, kind, node))
    if not events:
        raise CapslogError(f"{path} holds no event; give a trace")
    return events


def replay(
    events: Sequence[TraceEvent],
    layout_of: DeploymentOf,
    *,
    devices: int | None = None,
    pauses: Pauses | None = None,
    prices: Prices | None = None,
    duration_seconds: float | None = None,
) -> Replay:
    """Replay a trace. All events of one moment are one change, for which one new layout is planned.

    Time begins with the trace's first event, training with the first layout, without a pause. During a pause nothing is
    trained; if a change comes during another's pause, training continues after the later end. A join that does not
    change the layout has no pause.

    layout_of: called at every change, and once for `devices`.
    devices: the most that are rented at a time; further nodes wait, unpaid. Default: most nodes of the trace at a time.
    duration_seconds: default: until the trace's last event.
    """
    pauses, prices = pauses or Pauses(), prices or Prices()
    most = devices if devices is not None else most_nodes(events)
    if most < 1:
        raise CapslogError(f"{most} devices; a replay needs at least one")
    begin = events[0].seconds
    end = events[-1].seconds - begin if duration_seconds is None else duration_seconds
    if end <= 0.0:
        raise CapslogError("the trace ends when it begins; say with a duration for how long the devices train")

    changes: list[Change] = []
    present: list[str] = []
    rented: list[str] = []
    layout: Deployment | None = None
    trained = False
    now = paused_until = 0.0
    samples = ideal = paused = stopped = device_seconds = idle_seconds = 0.0

    def train(until: float) -> None:
        nonlocal samples, ideal, paused, stopped, device_seconds, idle_seconds
        length = max(0.0, until - now)
        device_seconds += length * len(rented)
        if layout is None:
            stopped += length if trained else 0.0
            idle_seconds += length * len(rented)
            return
        lost = min(length, max(0.0, paused_until - now))
        paused += lost
        ideal += length * layout.samples_per_second
        samples += (length - lost) * layout.samples_per_second
        idle_seconds += length * (len(rented) - layout.devices_used)

    for moment, group in _moments(events, begin + end):
        train(moment - begin)
        now = moment - begin
        for event in group:
            (present.append if event.kind == "add" else present.remove)(event.node)
        # a rented node stays until it leaves; free places go to the node that has waited longest
        stay = [node for node in rented if node in present]
        waiting = [node for node in present if node not in stay]
        departed, new = len(rented) - len(stay), waiting[: most - len(stay)]
        rented = stay + new
        if not departed and not new:
            continue
        before, layout = layout, layout_of(len(rented)) if rented else None
        running = layout or _NOTHING_FITS
        kind, pause = _pause(before, layout, departed, trained, pauses)
        trained = trained or layout is not None
        paused_until = max(paused_until, now + pause)
        changes.append(
            Change(
                seconds=now,
                kind=kind,
                joined=len(new),
                left=departed,
                devices=len(rented),
                devices_used=running.devices_used,
                samples_per_second=running.samples_per_second,
                search_seconds=running.search_seconds,
                pause_seconds=pause,
                description=running.description,
            )
        )
    train(end)
    on_demand = layout_of(most)
    return Replay(
        duration_seconds=end,
        devices=most,
        changes=changes,
        samples=samples,
        ideal_samples=ideal,
        paused_seconds=paused,
        stopped_seconds=stopped,
        device_hours=device_seconds / _HOUR,
        idle_device_hours=idle_seconds / _HOUR,
        on_demand_samples_per_second=None if on_demand is None else on_demand.samples_per_second,
        pauses=pauses,
        prices=prices,
    )


def _pause(
    before: Deployment | None, after: Deployment | None, departed: int, trained: bool, pauses: Pauses
) -> tuple[str, float]:
    """Return the kind of a change and its pause in seconds."""
    if after is None:
        return ("none" if before is None else "stop"), 0.0
    if before is None:
        return ("restart", pauses.restart + after.search_seconds) if trained else ("start", 0.0)
    if departed and pauses.notice < max(pauses.planned, 1e-9):
        return "crash", pauses.crash + after.search_seconds
    if departed:
        return "leave", pauses.planned
    same = (before.devices_used, before.samples_per_second) == (after.devices_used, after.samples_per_second)
    return ("none", 0.0) if same else ("join", pauses.planned)


def _moments(events: Sequence[TraceEvent], end: float) -> Iterator[tuple[float, list[TraceEvent]]]:
    for moment, group in itertools.groupby(events, key=lambda event: event.seconds):
        if moment < end:
            yield moment, list(group)


def most_nodes(events: Sequence[TraceEvent]) -> int:
    """Return the largest number of nodes that a trace has between two moments."""
    count = most = 0
    for _, group in _moments(events, float("inf")):
        count += sum(1 if event.kind == "add" else -1 for event in group)
        most = max(most, count)
    return most


# -- Deployments on any number of equal devices: planned and timed at the first request. Step times are simulated.


@dataclass(frozen=True)
class Replanner:
    """Number of devices -> `Deployment`; None where nothing fits.

    planner: for elastic runs; all but `joint` plan one pipeline, on no more devices than layers.
    minibatch_size: samples of a step for any number of devices; a multiple of the profile's microbatch size.
    capacity: bytes of every device; None: no limit.
    run: only its schedule, recompute and stage_inputs are read. blocks: accumulation blocks; None: the planner chooses.
    """

    profile: Profile
    minibatch_size: int
    planner: str = JOINT
    capacity: int | None = None
    run: RunShape = DEFAULT_RUN
    blocks: int | None = None
    link: Link | None = None
    _known: dict[int, Deployment | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not planner_named(self.planner).elastic:
            names = ", ".join(name for name, planner in REGISTRY.items() if planner.elastic)
            raise CapslogError(f"planner {self.planner} is not asked anew after a membership change; choose {names}")
        size = self.microbatch_size
        if self.minibatch_size < size or self.minibatch_size % size:
            raise CapslogError(
                f"a minibatch of {self.minibatch_size} samples is not a whole number of the profile's microbatches of "
                f"{size}; choose a multiple"
            )

    @property
    def microbatch_size(self) -> int:
        """Samples that the profile's seconds are for; default 1."""
        size: int = self.profile.conditions.get("microbatch_size", 1)
        return size

    def __call__(self, devices: int) -> Deployment | None:
        """Plan, or look up the plan of an earlier request; `search_seconds` is the time of either."""
        begun = time.perf_counter()
        if devices in self._known:
            cached = self._known[devices]
            return None if cached is None else replace(cached, search_seconds=time.perf_counter() - begun)
        width = devices if self.planner == JOINT else min(devices, self.profile.num_layers)
        run = replace(
            self.run, num_microbatches=self.minibatch_size // self.microbatch_size, num_blocks=self.blocks or 1
        )
        problem = Problem.of(self.profile, width, self.capacity, run, self.link)
        problem = replace(problem, blocks_open=self.blocks is None)
        self._known[devices] = deployment = self._deployment(solve(problem, self.planner))
        return deployment

    def _deployment(self, plan: Plan) -> Deployment | None:
        """Deployment of a plan; None where it does not fit."""
        if plan.fits is False:
            return None
        if plan.step_seconds is None:
            raise CapslogError("the profile has not the seconds of its layers; profile again")
        if plan.step_seconds == 0:
            raise CapslogError("a step takes no time: all seconds of the profile are 0; profile again")
        rate, ranks = self.minibatch_size / plan.step_seconds, {stage.rank for stage in plan.stages}
        return Deployment(rate, len(ranks), plan.search_seconds or 0.0, _describe([len(path) for path in plan.paths()]))


def _describe(stages: Sequence[int]) -> str:
    """Return a text such as `1 pipeline of 4 stages` or `3 pipelines of 8 + 8 + 7 stages`."""
    count = len(stages)
    lengths = " + ".join(map(str, sorted(stages, reverse=True)))
    return f"{count} pipeline{'' if count == 1 else 's'} of {lengths} stage{'' if lengths == '1' else 's'}"
