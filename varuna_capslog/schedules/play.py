"""Plays lowered programs against the seconds of their actions, for `simulate`: when everything begins and ends.

`play_alone` gives every rank a core of its own. `play_contended` has fewer cores than ranks, and ranks that compute at
the same time slow each other down. It is processor sharing: at any moment all ranks that compute have one speed, which
depends only on their number. Messages have a speed of their own. The order of actions is not decided here.
"""

from __future__ import annotations

__all__ = ["TimedAction", "TimedMessage", "play_alone", "play_contended", "speed_of"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from varuna_capslog.schedules.actions import Action
from varuna_capslog.schedules.lower import Lowered, Message, Recv, SendInstruction, in_turn


@dataclass(frozen=True, slots=True)
class TimedAction:
    """One action on `rank` with its begin and end in seconds since the step's begin."""

    rank: int
    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class TimedMessage:
    """One transfer from rank `source` to rank `destination`; `end_seconds` is when it has arrived."""

    source: int
    destination: int
    message: Message
    start_seconds: float
    end_seconds: float


Played: TypeAlias = tuple[list[list[TimedAction]], list[TimedMessage]]
"""Per rank its actions, and every message."""


def play_alone(
    lowered: Lowered, cost: Mapping[Action, float], transfers: Sequence[float], handovers: Sequence[float]
) -> Played:
    """Every rank has a core of its own, so that one pass over the programs tells when everything happens."""
    clock = [0.0] * len(lowered.programs)
    link_free: dict[tuple[int, int], float] = {}
    arrival: dict[Message, float] = {}
    timed: list[list[TimedAction]] = [[] for _ in lowered.programs]
    messages: list[TimedMessage] = []
    for rank, instruction in in_turn(lowered):
        if isinstance(instruction, Recv):
            clock[rank] = max(clock[rank], arrival[instruction.message])
        elif isinstance(instruction, SendInstruction):
            link, cut = (rank, instruction.peer), instruction.message.boundary - 1
            begin = max(clock[rank], link_free.get(link, 0.0))
            clock[rank] += handovers[cut]
            end = max(begin + transfers[cut], clock[rank])
            link_free[link] = arrival[instruction.message] = end
            messages.append(TimedMessage(rank, instruction.peer, instruction.message, begin, end))
        else:
            end = clock[rank] + cost[instruction]
            timed[rank].append(TimedAction(rank, instruction, clock[rank], end))
            clock[rank] = end
    return timed, messages


def speed_of(active: int, speeds: Sequence[float]) -> float:
    """The speed of each of `active` ranks that compute at the same time; beyond the list all cores are shared out."""
    known = len(speeds)
    return speeds[active - 1] if active <= known else speeds[-1] * known / active


@dataclass
class _CoreUser:
    """Where a rank stands: the instruction it works on, the work left in it (seconds of a lone rank), and its begin."""

    at: int = 0
    left: float | None = None
    begun: float = 0.0


def play_contended(
    lowered: Lowered,
    cost: Mapping[Action, float],
    transfer_seconds: Sequence[float],
    handover_seconds: Sequence[float],
    speeds: Sequence[float],
) -> Played:
    """Plays the programs from event to event; the next event is the first end of a piece of work or of a wait.

    The state is per rank the instruction at hand and the work left in it. Between two events every working rank does
    `speed_of(working ranks)` of work per second. With n instructions in all there are O(n) events, each O(ranks).

    Args:
        lowered: programs that do not deadlock (`find_deadlock`).
        cost: action -> seconds of a lone rank.
        transfer_seconds, handover_seconds: as in `simulate`.
        speeds: `speeds[k - 1]` is the speed of each of k working ranks.
    """
    programs = lowered.programs
    ranks = [_CoreUser() for _ in programs]
    timed: list[list[TimedAction]] = [[] for _ in programs]
    messages: list[TimedMessage] = []
    link_free: dict[tuple[int, int], float] = {}
    arrival: dict[Message, float] = {}
    now = 0.0
    while True:
        moved = True
        while moved:  # what takes no time, until every rank works, waits or has ended
            moved = False
            for number, rank in enumerate(ranks):
                program = programs[number]
                while rank.at < len(program):
                    instruction = program[rank.at]
                    if rank.left is None:
                        if isinstance(instruction, Recv):
                            if arrival.get(instruction.message, float("inf")) > now:
                                break
                        elif isinstance(instruction, SendInstruction):
                            rank.left, rank.begun = handover_seconds[instruction.message.boundary - 1], now
                        else:
                            rank.left, rank.begun = cost[instruction], now
                    if rank.left is not None and rank.left > 0.0:
                        break
                    if isinstance(instruction, SendInstruction):
                        link = (number, instruction.peer)
                        begin = max(rank.begun, link_free.get(link, 0.0))
                        end = max(begin + transfer_seconds[instruction.message.boundary - 1], now)
                        link_free[link] = arrival[instruction.message] = end
                        messages.append(TimedMessage(number, instruction.peer, instruction.message, begin, end))
                    elif isinstance(instruction, Action):
                        timed[number].append(TimedAction(number, instruction, rank.begun, now))
                    rank.left = None
                    rank.at += 1
                    moved = True
        working = [rank for rank in ranks if rank.left is not None]
        waited = [
            arrival[instruction.message]
            for rank, program in zip(ranks, programs, strict=True)
            if rank.left is None
            and rank.at < len(program)
            and isinstance(instruction := program[rank.at], Recv)
            and instruction.message in arrival
        ]
        if not working and not waited:
            return timed, messages
        speed = speed_of(len(working), speeds) if working else 1.0
        nearest = min((rank.left or 0.0 for rank in working), default=float("inf"))
        step = min([nearest / speed, *(moment - now for moment in waited)])
        now = min([now + step, *waited])
        for rank in working:
            assert rank.left is not None
            # the nearest one ends exactly here: rounding must leave nothing behind
            ends = rank.left == nearest and step == nearest / speed
            rank.left = 0.0 if ends else max(0.0, rank.left - step * speed)
