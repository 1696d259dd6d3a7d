"""Simulates time and memory of one step, from the seconds of each stage.

It executes the lowered programs and is not a measurement: an action takes the same time for every microbatch, and a
transfer runs beside the computation except for the sender's handover. `OrderedStep` gives every rank its own
core. `play_contended` shares fewer cores (processor sharing): at any moment all ranks that compute have the same speed,
which depends only on their number. Transfers do not share the cores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.actions import KINDS, Action, graph_keeping_forwards, placement_of
from varuna_capslog.schedules.lower import (
    Instruction,
    Lowered,
    Message,
    Recv,
    SendInstruction,
    find_deadlock,
    in_turn,
    lower,
)
from varuna_capslog.schedules.stage_graph import Edge, StageGraph

__all__ = [
    "SimulatedStep",
    "StageSeconds",
    "TimedAction",
    "TimedMessage",
    "Timeline",
    "Times",
    "ordered",
    "play_contended",
    "simulate",
    "simulated",
    "speed_of",
]

# -- A step as a row of numbers in an executable order, for callers that simulate it again and again.
#
# The order of the instructions does not depend on seconds, so a simulation is one pass over the row that adds seconds.


_RECEIVE, _SEND, _WORK, _WORK_BEHIND_LOAD, _OFFLOAD, _LOAD = range(6)
_CODES = {"O": _OFFLOAD, "L": _LOAD, **dict.fromkeys("RBI", _WORK_BEHIND_LOAD)}


class ActionCostKey(NamedTuple):
    """Key of actions that take equally long. keeps: True where the forward of their microbatch keeps its graph."""

    kind: str
    stage: int
    keeps: bool


class Times(NamedTuple):
    """Times of a simulated step. begins, ends: of each instruction of the row, receives left out. copies: (number of
    the instruction, begin, end) of copies beside the computation. step_seconds: the end of the last action.
    """

    begins: list[float]
    ends: list[float]
    copies: list[tuple[int, float, float]]
    step_seconds: float


@dataclass(frozen=True)
class OrderedStep:
    """A step that does not deadlock. instructions: each with its rank, every receive behind its send. works, ways: the
    keys of action costs and of message costs, in the order of the arguments of `play`.
    """

    lowered: Lowered
    instructions: list[tuple[int, Instruction]]
    works: list[ActionCostKey]
    ways: list[Edge]
    _row: list[tuple[int, int, int, int, int]]
    _messages: int

    def play(
        self, work: Sequence[float], transfer: Sequence[float], handover: Sequence[float], copies_beside: bool
    ) -> Times:
        """Return the times of the step, in one pass, since every rank has its own core. work: seconds of each of
        `works`. transfer, handover: of a message of each of `ways`. copies_beside: as in `simulate`.
        """
        ranks = len(self.lowered.programs)
        clock, last, link = [0.0] * ranks, [0.0] * ranks, dict.fromkeys(self.lowered.channels, 0.0)
        links, arrival = list(link.values()), [0.0] * self._messages
        begins, ends = [0.0] * len(self._row), [0.0] * len(self._row)
        copies: list[tuple[int, float, float]] = []
        free, leaving, back = [0.0] * ranks, [0.0] * ranks, dict[tuple[int, int], float]()
        for place, (code, rank, message_or_work, link_or_stage, way_or_call) in enumerate(self._row):
            now = clock[rank]
            if code == _RECEIVE:
                if arrival[message_or_work] > now:
                    clock[rank] = arrival[message_or_work]
                continue
            if code == _SEND:
                begin = max(now, links[link_or_stage])
                clock[rank] = now = now + handover[way_or_call]
                end = max(begin + transfer[way_or_call], now)
                links[link_or_stage] = arrival[message_or_work] = end
            elif not copies_beside:
                begin, end = now, now + work[message_or_work]
                clock[rank] = last[rank] = end
            elif code in (_OFFLOAD, _LOAD):
                begin = max(now, free[rank])
                free[rank] = end = begin + work[message_or_work]
                copies.append((place, begin, end))
                if code == _LOAD:
                    back[link_or_stage, way_or_call] = end
                else:
                    leaving[rank] = end
                begin = end = last[rank] = now
            else:
                begin = max(now, back.get((link_or_stage, way_or_call), 0.0)) if code == _WORK_BEHIND_LOAD else now
                last[rank] = end = begin + work[message_or_work]
                # an offload that runs beside this action must end before the rank continues
                clock[rank] = max(end, leaving[rank])
                leaving[rank] = 0.0
            begins[place], ends[place] = begin, end
        return Times(begins, ends, copies, max(last, default=0.0))


def ordered(
    schedule: Sequence[Sequence[Action]], gradients: Collection[Edge] | None = None, graph: StageGraph | None = None
) -> OrderedStep:
    """Return the step of a (validated) schedule, cached; arguments: see `lower`. Raises CapslogError for a deadlock."""
    return _ordered(tuple(map(tuple, schedule)), None if gradients is None else frozenset(gradients), graph)


@lru_cache(maxsize=64)
def _ordered(
    schedule: tuple[tuple[Action, ...], ...], gradients: frozenset[Edge] | None, graph: StageGraph | None
) -> OrderedStep:
    lowered = lower(schedule, gradients, graph)
    instructions = list(in_turn(lowered))
    if len(instructions) < sum(map(len, lowered.programs)):
        raise CapslogError(f"the schedule deadlocks: {find_deadlock(lowered)}; reorder the lists of these ranks")
    keeping = graph_keeping_forwards(schedule)
    works: dict[ActionCostKey, int] = {}
    ways: dict[Edge, int] = {}
    channels = {pair: number for number, pair in enumerate(lowered.channels)}
    # a receive and its send have the same message object
    messages = {id(message): number for number, message in enumerate(itertools.chain(*lowered.channels.values()))}
    row = []
    for rank, instruction in instructions:
        if isinstance(instruction, Recv):
            row.append((_RECEIVE, rank, messages[id(instruction.message)], 0, 0))
        elif isinstance(instruction, SendInstruction):
            way = ways.setdefault(instruction.message.way, len(ways))
            row.append((_SEND, rank, messages[id(instruction.message)], channels[rank, instruction.peer], way))
        else:
            work = ActionCostKey(
                instruction.kind, instruction.stage, (instruction.stage, instruction.microbatch) in keeping
            )
            code, call = (
                _CODES.get(instruction.kind, _WORK),
                -1 if instruction.microbatch is None else instruction.microbatch,
            )
            row.append((code, rank, works.setdefault(work, len(works)), instruction.stage, call))
    return OrderedStep(lowered, instructions, list(works), list(ways), row, len(messages))


# -- Seconds of each stage of a step, with which a schedule is simulated.


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of each stage's actions and messages.

    forward, backward: per stage, of one microbatch. recompute: per stage; default: as the forward.
    bare_forward: per stage, of forwards that keep no graph, since a recomputation follows; default: `forward`.
    backward_at_once: per stage, of backwards without an R; default: `backward`.
    backward_again: per stage, of backwards behind an R of the microbatch, since other parts of the stage run again
        inside them (where the backward is split, inside I); default: `backward`.
    transfer: of one message, by (sending stage, receiving stage), or per stage for all edges to this stage, in either
        direction. A missing direction takes as long as the other; default 0. Messages of one ordered pair of ranks go
        one after the other; see `simulated` for links that more messages share.
    handover: likewise, seconds of the sender's rank for a message (gloo copies into host memory and socket); the
        transfer begins with the handover and ends no earlier. Counts as idle time; default 0.
    other: per stage, for the kinds I, W, O, L and U (once per step); a kind without seconds is refused.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    recompute: Sequence[float] | None = None
    bare_forward: Sequence[float] | None = None
    backward_again: Sequence[float] | None = None
    backward_at_once: Sequence[float] | None = None
    transfer: Sequence[float] | Mapping[Edge, float] | None = None
    handover: Sequence[float] | Mapping[Edge, float] | None = None
    other: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def check(self, num_stages: int) -> None:
        """Raise `CapslogError` for lists that do not have `num_stages` values, and values that are no seconds."""
        named = {"seconds of kind F": self.forward, "seconds of kind B": self.backward}
        named |= {f"seconds of kind {kind}": row for kind, row in self.other.items()}
        optional = {
            "seconds of kind R": self.recompute,
            "bare_forward_seconds": self.bare_forward,
            "backward_again_seconds": self.backward_again,
            "backward_at_once_seconds": self.backward_at_once,
        }
        for name, values in (named | {name: row for name, row in optional.items() if row is not None}).items():
            _check_times(name, values, num_stages)

    def at_speeds(self, speeds: Sequence[float]) -> StageSeconds:
        """Return the seconds on devices of these speeds, one per stage; messages and copies (O, L) do not change."""

        def divided(row: Sequence[float] | None) -> Sequence[float] | None:
            return None if row is None else [seconds / speed for seconds, speed in zip(row, speeds, strict=True)]

        return replace(
            self,
            forward=divided(self.forward) or (),
            backward=divided(self.backward) or (),
            recompute=divided(self.recompute),
            bare_forward=divided(self.bare_forward),
            backward_again=divided(self.backward_again),
            backward_at_once=divided(self.backward_at_once),
            other={kind: row if kind in "OL" else divided(row) or () for kind, row in self.other.items()},
        )

    def of(self, work: ActionCostKey) -> float:
        """Return the seconds of one action."""
        kind, stage = work.kind, work.stage
        if kind == "F":
            return (self.forward if work.keeps else self.bare_forward or self.forward)[stage]
        if kind == "R":
            return (self.recompute or self.forward)[stage]
        seconds = self.backward[stage] if kind == "B" else self.other[kind][stage]
        if kind in "BI":
            inside = self.backward_at_once if work.keeps else self.backward_again
            seconds += (inside or self.backward)[stage] - self.backward[stage]
        return seconds

    def of_messages(self, graph: StageGraph) -> tuple[dict[Edge, float], dict[Edge, float]]:
        """Return transfer and handover seconds of a message by (sender, receiver), in both directions of every edge."""
        named = (("transfer_seconds", self.transfer), ("handover_seconds", self.handover))
        transfer, handover = (_of_messages(name, values, graph) for name, values in named)
        return transfer, handover


def _check_times(name: str, values: Sequence[float], length: int) -> None:
    if len(values) != length:
        raise CapslogError(f"{name}: {len(values)} values where the schedule needs {length}; give one per stage")
    for index, value in enumerate(values):
        if not 0.0 <= value < float("inf"):
            raise CapslogError(f"{name}[{index}] is {value}; give a finite number of seconds, 0 or more")


def _of_messages(
    name: str, values: Sequence[float] | Mapping[Edge, float] | None, graph: StageGraph
) -> dict[Edge, float]:
    if isinstance(values, Mapping):
        ways = [way for edge in graph.edges for way in (edge, edge[::-1])]
        of_way = {way: values.get(way, values.get(way[::-1], 0.0)) for way in ways}
        _check_times(name, list(of_way.values()), len(of_way))
        return of_way
    row = [0.0] * len(graph.ranks) if values is None else values
    _check_times(name, row, len(graph.ranks))
    return {way: row[edge[1]] for edge in graph.edges for way in (edge, edge[::-1])}


# -- Time and memory of one step


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action on `rank` with its beginning and end in seconds since the beginning of the step."""

    rank: int
    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class TimedMessage:
    """A transfer from rank `source` to rank `destination`; at `end_seconds` it has arrived."""

    source: int
    destination: int
    message: Message
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Timeline:
    """Course of one step.

    actions: per rank, its actions in order, timed. messages: every transfer, ordered by its begin.
    step_seconds: end of the last action.
    in_flight, live_graphs: per stage, the course of the number of microbatches between begin of F and end of B (or W),
        and of graphs alive, as (seconds, number from then on), in the order in which the stage acts.
    copies: O and L that run beside the computation, from begin to end; in `actions` they take no time.
    """

    actions: list[list[TimedAction]]
    messages: list[TimedMessage]
    step_seconds: float
    in_flight: list[list[tuple[float, int]]]
    live_graphs: list[list[tuple[float, int]]]
    copies: list[TimedAction] = field(default_factory=list)

    @property
    def busy_seconds(self) -> list[float]:
        """Time spent in actions, of each rank."""
        return [
            sum(timed_action.end_seconds - timed_action.start_seconds for timed_action in row) for row in self.actions
        ]

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' step time that is spent idle, 0 .. 1."""
        total = self.step_seconds * len(self.actions)
        return 1.0 - sum(self.busy_seconds) / total if total > 0 else 0.0

    @property
    def max_in_flight(self) -> list[int]:
        """Maximum of microbatches in flight at a time, of each stage."""
        return [max((count for _, count in course), default=0) for course in self.in_flight]

    @property
    def max_live_graphs(self) -> list[int]:
        """Maximum of graphs alive at a time, of each stage."""
        return [max((count for _, count in course), default=0) for course in self.live_graphs]


@dataclass(frozen=True)
class SimulatedStep:
    """Simulated step: `step_seconds`, the end of its last action, and the timeline, which is made on demand."""

    step_seconds: float
    _make: Callable[[], Timeline]

    @cached_property
    def timeline(self) -> Timeline:
        """The course of the step."""
        return self._make()


def simulate(
    schedule: Sequence[Sequence[Action]],
    seconds: StageSeconds,
    speeds: Sequence[float] | None = None,
    gradients: Collection[Edge] | None = None,
    graph: StageGraph | None = None,
    shared_links: bool = False,
    copies_beside: bool = False,
) -> Timeline:
    """Return the timeline of `simulated`."""
    return simulated(schedule, seconds, speeds, gradients, graph, shared_links, copies_beside).timeline


def simulated(
    schedule: Sequence[Sequence[Action]],
    seconds: StageSeconds,
    speeds: Sequence[float] | None = None,
    gradients: Collection[Edge] | None = None,
    graph: StageGraph | None = None,
    shared_links: bool = False,
    copies_beside: bool = False,
) -> SimulatedStep:
    """Simulate one step of a (validated) schedule.

    Args:
        speeds: `speeds[k - 1]` is the speed of each of k ranks that compute at the same time; 1 is the speed of
            `seconds`; beyond the list all cores are shared evenly. So [1.0, 1.0] are two full cores. Default: a core
            for every rank.
        gradients, graph: as in `lower`.
        shared_links: both directions between two ranks share one link, on which messages go one after the other;
            default: each direction has its own.
        copies_beside: O and L run beside the computation of their rank, one after the other. The R, B or I that needs
            the tensors of an L waits for it; and as in the engine, the first computation behind an O ends when that
            copy has ended. Default: they take the time of their rank, as any action.

    Raises `CapslogError` for lists of a wrong length, times that are negative or not finite, and a deadlock.
    """
    num_stages = len(placement_of(schedule)) if graph is None else len(graph.ranks)
    seconds.check(num_stages)
    if speeds is not None and (not speeds or not all(0.0 < speed <= 1.0 for speed in speeds)):
        raise CapslogError(f"speeds is {list(speeds)}; give one or more numbers above 0 and at most 1")
    for action in (action for row in schedule for action in row):
        if action.kind not in "FBR" and action.kind not in seconds.other:
            raise CapslogError(
                f"no seconds are known for {action} ({KINDS[action.kind]}); "
                f"give other_seconds[{action.kind!r}], one per stage"
            )
    step = ordered(schedule, gradients, graph)
    lowered = step.lowered
    work = {piece: seconds.of(piece) for piece in step.works}
    transfers, handovers = seconds.of_messages(lowered.graph)
    free = speeds is None or (len(speeds) >= len(lowered.programs) and all(speed == 1.0 for speed in speeds))
    if free and not shared_links:
        sent, handed = ([row[way] for way in step.ways] for row in (transfers, handovers))
        played = step.play(list(work.values()), sent, handed, copies_beside)
        return SimulatedStep(played.step_seconds, lambda: _timeline(step, played, num_stages))
    cores = [1.0] * len(lowered.programs) if free or speeds is None else speeds
    copies = [_Copies(rank, copies_beside) for rank in range(len(lowered.programs))]
    rows = graph_keeping_forwards(schedule)
    cost = {
        action: work[ActionCostKey(action.kind, action.stage, (action.stage, action.microbatch) in rows)]
        for row in schedule
        for action in row
    }
    timed, messages = play_contended(lowered, cost, transfers, handovers, cores, shared_links, copies)
    end = max((row[-1].end_seconds for row in timed if row), default=0.0)
    copy_actions = [timed_action for row in copies for timed_action in row.timed]
    return SimulatedStep(end, lambda: _whole_timeline(timed, messages, copy_actions, num_stages, rows))


def _timeline(step: OrderedStep, times: Times, num_stages: int) -> Timeline:
    timed: list[list[TimedAction]] = [[] for _ in step.lowered.programs]
    messages: list[TimedMessage] = []
    for (rank, instruction), begin, end in zip(step.instructions, times.begins, times.ends, strict=True):
        if isinstance(instruction, SendInstruction):
            messages.append(TimedMessage(rank, instruction.peer, instruction.message, begin, end))
        elif isinstance(instruction, Action):
            timed[rank].append(TimedAction(rank, instruction, begin, end))
    copies = []
    for place, begin, end in times.copies:
        rank, action = step.instructions[place]
        assert isinstance(action, Action), "messages are no copies"
        copies.append(TimedAction(rank, action, begin, end))
    keeping = graph_keeping_forwards([[timed_action.action for timed_action in row] for row in timed])
    return _whole_timeline(timed, messages, copies, num_stages, keeping)


def _whole_timeline(
    timed: list[list[TimedAction]],
    messages: list[TimedMessage],
    copies: list[TimedAction],
    num_stages: int,
    keeping: set[tuple[int, int]],
) -> Timeline:
    in_flight, live_graphs = _courses(timed, num_stages, keeping)
    return Timeline(
        actions=timed,
        messages=sorted(messages, key=lambda message: message.start_seconds),
        step_seconds=max((row[-1].end_seconds for row in timed if row), default=0.0),
        in_flight=in_flight,
        live_graphs=live_graphs,
        copies=sorted(copies, key=lambda copy: (copy.start_seconds, copy.rank)),
    )


def _courses(
    timed: list[list[TimedAction]], num_stages: int, graph_keeping: set[tuple[int, int]]
) -> tuple[list[list[tuple[float, int]]], list[list[tuple[float, int]]]]:
    """Return, for each stage, the numbers of microbatches in flight and of graphs alive from each time on. An offloaded
    graph does not count from O's end to L's begin.
    """
    in_flight: list[list[tuple[float, int]]] = [[] for _ in range(num_stages)]
    live_graphs: list[list[tuple[float, int]]] = [[] for _ in range(num_stages)]
    alive: set[tuple[int, int]] = set()
    offloaded: set[tuple[int, int]] = set()

    def change(course: list[tuple[float, int]], at_seconds: float, by: int) -> None:
        course.append((at_seconds, (course[-1][1] if course else 0) + by))

    for row in timed:
        for timed_action in row:
            stage, kind = timed_action.action.stage, timed_action.action.kind
            if timed_action.action.microbatch is None:
                continue
            key = (stage, timed_action.action.microbatch)
            if kind == "F":
                change(in_flight[stage], timed_action.start_seconds, 1)
            if kind == "R" or (kind == "F" and key in graph_keeping) or (kind == "L" and key in offloaded):
                alive.add(key)
                change(live_graphs[stage], timed_action.start_seconds, 1)
            if kind in "BW":
                change(in_flight[stage], timed_action.end_seconds, -1)
            if kind in "BWO" and key in alive:
                alive.discard(key)
                change(live_graphs[stage], timed_action.end_seconds, -1)
                if kind == "O":
                    offloaded.add(key)
    return in_flight, live_graphs


# -- Simulation on fewer cores than ranks


class _Copies:
    """Copies of one rank to and from the host tier (`timed`) that run beside its computation, one after the other;
    without `beside`, O and L are ordinary actions, and no action waits for these copies.
    """

    def __init__(self, rank: int, beside: bool) -> None:
        self.timed: list[TimedAction] = []
        self._rank, self._beside, self._free = rank, beside, 0.0
        self._back: dict[tuple[int, int | None], float] = {}
        self._leaving = 0.0

    def begin(self, action: Action, now: float, seconds: float) -> bool:
        """Begin the copy of an O or L; return False for an action that does not run beside the computation."""
        if not self._beside or action.kind not in "OL":
            return False
        begin = max(now, self._free)
        self._free = begin + seconds
        self.timed.append(TimedAction(self._rank, action, begin, self._free))
        if action.kind == "L":
            self._back[action.stage, action.microbatch] = self._free
        else:
            self._leaving = self._free
        return True

    def back(self, action: Action) -> float:
        """Return the time at which an action's tensors are back on the device, before which it may not begin."""
        return self._back.get((action.stage, action.microbatch), 0.0) if action.kind in "RBI" else 0.0

    def away(self) -> float:
        """Return the end of the O beside the last computation, before which the rank may not continue."""
        leaving, self._leaving = self._leaving, 0.0
        return leaving


def speed_of(active: int, speeds: Sequence[float]) -> float:
    """Return the speed of each of `active` ranks that compute at once; beyond the list all cores are shared evenly."""
    cores = len(speeds)
    return speeds[active - 1] if active <= cores else speeds[-1] * cores / active


@dataclass
class _CoreUser:
    """State of a rank. at: index of its instruction. work_left: in it, in seconds of a lone rank; None: not begun.
    begun: its beginning. ready: time from which an instruction that has not begun can begin; infinite while unknown.
    held: time before which no instruction can begin.
    """

    at: int = 0
    work_left: float | None = None
    begun: float = 0.0
    ready: float = 0.0
    held: float = 0.0


def play_contended(
    lowered: Lowered,
    cost: Mapping[Action, float],
    transfer_seconds: Mapping[Edge, float],
    handover_seconds: Mapping[Edge, float],
    speeds: Sequence[float],
    shared_links: bool = False,
    copies: Sequence[_Copies] | None = None,
) -> tuple[list[list[TimedAction]], list[TimedMessage]]:
    """Simulate the programs from event to event; the next event is the first end of a piece of work or of a wait.

    The state of each rank is its instruction and the work left in it. Between two events every working rank does
    `speed_of(working ranks)` seconds of work per second. With n instructions there are O(n) events, each O(ranks).

    Args:
        lowered: programs that do not deadlock (`find_deadlock`).
        cost: action -> seconds of a lone rank.
        transfer_seconds, handover_seconds: of a message, by (sending stage, receiving stage).
        speeds, shared_links: as in `simulated`.
        copies: of every rank; None: O and L are ordinary actions.
    """
    programs = lowered.programs
    copies = copies or [_Copies(rank, beside=False) for rank in range(len(programs))]
    ranks = [_CoreUser() for _ in programs]
    timed: list[list[TimedAction]] = [[] for _ in programs]
    messages: list[TimedMessage] = []
    link_free: dict[tuple[int, int], float] = {}
    arrival: dict[Message, float] = {}
    now = 0.0
    while True:
        moved = True
        while moved:  # steps that take no time, until every rank works, waits or has ended
            moved = False
            for number, rank in enumerate(ranks):
                program = programs[number]
                while rank.at < len(program):
                    instruction = program[rank.at]
                    if rank.work_left is None:
                        rank.ready = rank.held
                        if isinstance(instruction, Recv):
                            rank.ready = max(rank.held, arrival.get(instruction.message, float("inf")))
                        elif isinstance(instruction, Action):
                            rank.ready = max(rank.held, copies[number].back(instruction))
                        if rank.ready > now:
                            break
                        if isinstance(instruction, SendInstruction):
                            rank.work_left, rank.begun = handover_seconds[instruction.message.way], now
                        elif isinstance(instruction, Action):
                            beside = copies[number].begin(instruction, now, cost[instruction])
                            rank.work_left, rank.begun = 0.0 if beside else cost[instruction], now
                    if rank.work_left is not None and rank.work_left > 0.0:
                        break
                    if isinstance(instruction, SendInstruction):
                        pair = (number, instruction.peer)
                        if shared_links:
                            pair = min(pair), max(pair)
                        begin = max(rank.begun, link_free.get(pair, 0.0))
                        end = max(begin + transfer_seconds[instruction.message.way], now)
                        link_free[pair] = arrival[instruction.message] = end
                        messages.append(TimedMessage(number, instruction.peer, instruction.message, begin, end))
                    elif isinstance(instruction, Action):
                        timed[number].append(TimedAction(number, instruction, rank.begun, now))
                        if instruction.kind not in "OL":
                            rank.held = copies[number].away()
                    rank.work_left = None
                    rank.at += 1
                    moved = True
        working = [rank for rank in ranks if rank.work_left is not None]
        waited = [
            rank.ready
            for rank, program in zip(ranks, programs, strict=True)
            if rank.work_left is None and rank.at < len(program) and rank.ready < float("inf")
        ]
        if not working and not waited:
            return timed, messages
        speed = speed_of(len(working), speeds) if working else 1.0
        nearest = min((rank.work_left or 0.0 for rank in working), default=float("inf"))
        step = min([nearest / speed, *(moment - now for moment in waited)])
        now = min([now + step, *waited])
        for rank in working:
            assert rank.work_left is not None
            # the rank with the least work ends exactly here: rounding must leave no work
            ends = rank.work_left == nearest and step == nearest / speed
            rank.work_left = 0.0 if ends else max(0.0, rank.work_left - step * speed)
