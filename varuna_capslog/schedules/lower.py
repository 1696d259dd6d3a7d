"""Turns a compute schedule into the program of each rank, messages included; a pure function.

Each ordered pair of ranks has one order of messages, the sender's, and the receiver takes them in that order, so that a
transport without tags (NCCL) pairs them correctly.
"""

from __future__ import annotations

__all__ = ["Lowered", "Message", "Recv", "SendInstruction", "find_deadlock", "in_turn", "lower"]

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.actions import Action, placement_of
from varuna_capslog.schedules.stage_graph import Edge, StageGraph


@dataclass(frozen=True, slots=True)
class Message:
    """All tensors sent from one stage to another for one call of each. kind: "activation" (from `upstream` to
    `downstream`) or "gradient" (the other way). upstream, downstream: (stage, its call) of the two stages.
    """

    kind: str
    upstream: tuple[int, int]
    downstream: tuple[int, int]

    @property
    def edge(self) -> Edge:
        """The two stages."""
        return self.upstream[0], self.downstream[0]

    @property
    def way(self) -> Edge:
        """The sending and the receiving stage."""
        return self.end(sends=True)[0], self.end(sends=False)[0]

    def end(self, sends: bool) -> tuple[int, int]:
        """Return (stage, call) of the sender, or of the receiver."""
        return self.upstream if sends == (self.kind == "activation") else self.downstream

    def __str__(self) -> str:
        (source, _), (target, _) = self.end(sends=True), self.end(sends=False)
        return f"the {self.kind} of microbatch {self.downstream[1]} from stage {source} to stage {target}"


@dataclass(frozen=True, slots=True)
class SendInstruction:
    """Instruction to send `message`, which the action before completes, to rank `peer`. Prints as `0SEND_F2`."""

    message: Message
    peer: int

    def __str__(self) -> str:
        kind = "F" if self.message.kind == "activation" else "B"
        stage, call = self.message.end(sends=True)
        return f"{stage}SEND_{kind}{call}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Instruction to wait for `message` from rank `peer`; the receive may be posted earlier. Prints as `1RECV_F2`."""

    message: Message
    peer: int

    def __str__(self) -> str:
        kind = "F" if self.message.kind == "activation" else "B"
        stage, call = self.message.end(sends=False)
        return f"{stage}RECV_{kind}{call}"


_Ends: TypeAlias = tuple[str, tuple[int, int], tuple[int, int]]
"""The fields of a message."""
Instruction: TypeAlias = Action | SendInstruction | Recv


@dataclass(frozen=True)
class Lowered:
    """Programs of all ranks in one step of `graph`. programs: per rank, its actions with the sends and receives between
    them, in order. channels: (source rank, destination rank) -> messages, in the order of the sends and the receives;
    a pair of ranks without messages is absent.
    """

    programs: list[list[Instruction]]
    channels: dict[tuple[int, int], list[Message]]
    graph: StageGraph


def lower(
    schedule: Sequence[Sequence[Action]], gradients: Collection[Edge] | None = None, graph: StageGraph | None = None
) -> Lowered:
    """Add the messages to a (validated) schedule.

    A send follows the action that made its content: F for an activation, B (or I, where the backward is split) for a
    gradient. A receive comes directly before the action that needs the message, or already before an earlier action
    that needs a later message of the same sender. That adds no waiting: the earlier message has left when the later one
    leaves. Stages on one rank exchange no messages.

    Args:
        gradients: the edges over which gradients travel. Default: all.
        graph: the stages of the step; default: one pipeline of all stages of the schedule in order.

    Raises `CapslogError` when an action needs a message that no rank sends.
    """
    if graph is None:
        placement = placement_of(schedule)
        calls = [action.microbatch for actions in schedule for action in actions if action.microbatch is not None]
        graph = StageGraph.of(tuple(placement), (tuple(range(len(placement))),) * (1 + max(calls, default=-1)))
    travelling = None if gradients is None else frozenset(gradients)
    try:
        computing = (tuple(action for action in actions if action.kind in "FBI") for actions in schedule)
        channels, exchanges = _exchanges(tuple(computing), travelling, graph)
    except CapslogError:  # again with the whole lists, so that the error names positions in these
        _exchanges.__wrapped__(schedule, travelling, graph)
        raise
    programs: list[list[Instruction]] = []
    for actions, row in zip(schedule, exchanges, strict=True):
        program, parts = list[Instruction](), iter(row)
        for action in actions:
            if action.kind in "FBI":
                receives, sends = next(parts)
                program += receives
                program.append(action)
                program += sends
            else:
                program.append(action)
        programs.append(program)
    return Lowered(programs, channels, graph)


@lru_cache(maxsize=64)
def _exchanges(
    schedule: Sequence[Sequence[Action]], gradients: frozenset[Edge] | None, graph: StageGraph
) -> tuple[dict[tuple[int, int], list[Message]], list[list[tuple[list[Recv], list[SendInstruction]]]]]:
    """Return the channels of `Lowered`, and per rank and action the receives before it and the sends behind it. Cached
    by the forwards and backwards alone, since no other action needs or makes a message. Arguments: see `lower`.
    """
    ranks = graph.ranks

    def ends_of(action: Action, sends: bool) -> Iterator[tuple[_Ends, int]]:
        """Yield the messages that the action makes, or those that it needs, each with the rank on the other side."""
        if action.kind not in "FBI":
            return
        assert action.microbatch is not None
        forward, call = action.kind == "F", (action.stage, action.microbatch)
        neighbours = graph.downstream if forward == sends else graph.upstream
        for neighbour in neighbours[action.stage][action.microbatch]:
            above, below = (call, neighbour) if forward == sends else (neighbour, call)
            travels = forward or gradients is None or (above[0], below[0]) in gradients
            if travels and ranks[neighbour[0]] != ranks[action.stage]:
                yield ("activation" if forward else "gradient", above, below), ranks[neighbour[0]]

    channels: dict[tuple[int, int], list[Message]] = {}
    index_of: dict[_Ends, int] = {}  # in its channel
    sent: list[list[list[SendInstruction]]] = []  # per rank and action
    for rank, actions in enumerate(schedule):
        sent.append([])
        for action in actions:
            sent[rank].append(sends_of_action := [])
            for ends, peer in ends_of(action, sends=True):
                channel = channels.setdefault((rank, peer), [])
                index_of[ends] = len(channel)
                channel.append(message := Message(*ends))
                sends_of_action.append(SendInstruction(message, peer))

    exchanges: list[list[tuple[list[Recv], list[SendInstruction]]]] = []
    for rank, actions in enumerate(schedule):
        exchanges.append([])
        received: dict[int, int] = {}  # per peer, how many messages of its channel were received so far
        for position, action in enumerate(actions):
            receives: list[Recv] = []
            for ends, peer in ends_of(action, sends=False):
                if ends not in index_of:
                    raise CapslogError(
                        f"rank {rank}, position {position}: {action} needs {Message(*ends)}, which no action sends; "
                        f"validate the schedule first"
                    )
                first = received.get(peer, 0)
                end = max(first, index_of[ends] + 1)
                receives += [Recv(early, peer) for early in channels[peer, rank][first:end]]
                received[peer] = end
            exchanges[rank].append((receives, sent[rank][position]))
        for (source, destination), messages in channels.items():
            if destination == rank and received.get(source, 0) < len(messages):
                lost = messages[received.get(source, 0)]
                raise CapslogError(
                    f"rank {rank}: nothing needs {lost}, which rank {source} sends; validate the schedule first"
                )
    return channels, exchanges


def in_turn(lowered: Lowered) -> Iterator[tuple[int, Instruction]]:
    """Yield every instruction with its rank, in an order in which each receive comes after its send. The order does not
    depend on seconds: each rank in turn runs until its next message is missing or is not the expected message. The
    iteration ends when every rank is at its end or waits: see `find_deadlock`.
    """
    programs = lowered.programs
    at = [0] * len(programs)
    in_transit: defaultdict[tuple[int, int], deque[Message]] = defaultdict(deque)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                instruction = program[at[rank]]
                if isinstance(instruction, SendInstruction):
                    in_transit[rank, instruction.peer].append(instruction.message)
                elif isinstance(instruction, Recv):
                    waiting = in_transit[instruction.peer, rank]
                    if not waiting or (waiting[0] is not instruction.message and waiting[0] != instruction.message):
                        break
                    waiting.popleft()
                at[rank] += 1
                moved = True
                yield rank, instruction


def find_deadlock(lowered: Lowered) -> str | None:
    """Run the programs with blocking receives. Return None when every rank comes to its end, else a sentence that names
    the position of each stuck rank, the message that it waits for, and the position of its peer. A rank is also stuck
    where the next message is not the expected message.
    """
    at = [0] * len(lowered.programs)
    for rank, _ in in_turn(lowered):
        at[rank] += 1
    stuck = [rank for rank, program in enumerate(lowered.programs) if at[rank] < len(program)]
    return "; ".join(_describe(lowered.programs, at, rank) for rank in stuck) or None


def _describe(programs: list[list[Instruction]], at: list[int], rank: int) -> str:
    instruction = programs[rank][at[rank]]
    assert isinstance(instruction, Recv)
    message, peer = instruction.message, instruction.peer
    sent = [
        step.message for step in programs[peer][: at[peer]] if isinstance(step, SendInstruction) and step.peer == rank
    ]
    taken = sum(isinstance(step, Recv) and step.peer == peer for step in programs[rank][: at[rank]])
    if len(sent) > taken:
        return (
            f"rank {rank} at {instruction} (position {at[rank]}) expects {message} from rank {peer}, "
            f"whose next message is {sent[taken]}"
        )
    peer_state = (
        f"is at {programs[peer][at[peer]]} (position {at[peer]})" if at[peer] < len(programs[peer]) else "has ended"
    )
    return f"rank {rank} at {instruction} (position {at[rank]}) waits for {message}; rank {peer} {peer_state}"
