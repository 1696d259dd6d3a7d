"""From a compute schedule to what each rank does, messages included; a pure function.

The engine executes the result as it stands. Each ordered pair of ranks has one order of messages, the sender's, and the
receiver takes them in that order, so that a transport without tags (NCCL) pairs them correctly. Nothing here knows
tensors: a message stands for all that crosses one cut for one microbatch in one direction.
"""

from __future__ import annotations

__all__ = ["Lowered", "Message", "Recv", "SendInstruction", "find_deadlock", "in_turn", "lower"]

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.actions import Action, placement_of


@dataclass(frozen=True, slots=True)
class Message:
    """What crosses the cut before stage `boundary` (1 .. S-1) for one microbatch.

    `kind` is "activation" (from stage boundary - 1 to stage boundary) or "gradient" (the other way).
    """

    kind: str
    boundary: int
    microbatch: int

    def stage(self, sends: bool) -> int:
        """The stage that sends it, or the one that receives it."""
        return self.boundary - (sends == (self.kind == "activation"))

    def __str__(self) -> str:
        return f"the {self.kind} of microbatch {self.microbatch} across the cut before stage {self.boundary}"


@dataclass(frozen=True, slots=True)
class SendInstruction:
    """The rank hands `message`, complete with the action before, to rank `peer`. Prints as `0SEND_F2`."""

    message: Message
    peer: int

    def __str__(self) -> str:
        kind = "F" if self.message.kind == "activation" else "B"
        return f"{self.message.stage(sends=True)}SEND_{kind}{self.message.microbatch}"


@dataclass(frozen=True, slots=True)
class Recv:
    """The rank needs `message` from rank `peer` to go on (it may be posted earlier). Prints as `1RECV_F2`."""

    message: Message
    peer: int

    def __str__(self) -> str:
        kind = "F" if self.message.kind == "activation" else "B"
        return f"{self.message.stage(sends=False)}RECV_{kind}{self.message.microbatch}"


Instruction: TypeAlias = Action | SendInstruction | Recv


@dataclass(frozen=True)
class Lowered:
    """What every rank of one pipeline does in one step.

    programs: per rank, its actions with the sends and receives between them, in order.
    channels: per (source rank, destination rank), every message in the one order both sides keep; pairs without
        messages are absent. A rank's receives from one peer, read from its program, come in this order.
    placement: `placement[stage]` -> rank.
    """

    programs: list[list[Instruction]]
    channels: dict[tuple[int, int], list[Message]]
    placement: list[int]


def lower(schedule: Sequence[Sequence[Action]], has_gradient: Sequence[bool] | None = None) -> Lowered:
    """Adds the messages to a (validated) schedule.

    A send follows the action that made its content: F for an activation, B (or I, where the backward is split) for a
    gradient. A receive comes directly before the action that needs it; where another message of the same sender was
    sent earlier and is needed later, its receive is drawn forward to keep the sender's order. That adds no waiting:
    the earlier message has left when the needed one leaves. Stages on one rank exchange no messages.

    Args:
        schedule: one list of actions per rank.
        has_gradient: for the cuts before stages 1, 2, ..., S-1: does a gradient cross it? Default: every cut.

    Raises `CapslogError` when `has_gradient` has another length or when an action needs a message that no rank sends.
    """
    placement = placement_of(schedule)
    num_stages = len(placement)
    gradient = [True] * (num_stages - 1) if has_gradient is None else list(has_gradient)
    if len(gradient) != num_stages - 1:
        raise CapslogError(
            f"has_gradient has {len(gradient)} entries for {num_stages} stages; give one per cut between two stages "
            f"({num_stages - 1})"
        )

    def crosses(boundary: int) -> bool:
        return 0 < boundary < num_stages and placement[boundary - 1] != placement[boundary]

    def sent_by(action: Action) -> tuple[Message, int] | None:
        assert action.microbatch is not None
        if action.kind == "F" and crosses(action.stage + 1):
            return Message("activation", action.stage + 1, action.microbatch), placement[action.stage + 1]
        if action.kind in "BI" and crosses(action.stage) and gradient[action.stage - 1]:
            return Message("gradient", action.stage, action.microbatch), placement[action.stage - 1]
        return None

    def needed_by(action: Action) -> tuple[Message, int] | None:
        assert action.microbatch is not None
        if action.kind == "F" and crosses(action.stage):
            return Message("activation", action.stage, action.microbatch), placement[action.stage - 1]
        if action.kind in "BI" and crosses(action.stage + 1) and gradient[action.stage]:
            return Message("gradient", action.stage + 1, action.microbatch), placement[action.stage + 1]
        return None

    channels: dict[tuple[int, int], list[Message]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.kind in "FBI" and (sent := sent_by(action)):
                channels.setdefault((rank, sent[1]), []).append(sent[0])
    index_of = {message: index for messages in channels.values() for index, message in enumerate(messages)}

    programs: list[list[Instruction]] = []
    for rank, actions in enumerate(schedule):
        program: list[Instruction] = []
        received: dict[int, int] = {}  # per peer, how many messages of its channel were received so far
        for position, action in enumerate(actions):
            if action.kind in "FBI" and (needed := needed_by(action)):
                message, peer = needed
                if message not in index_of:
                    raise CapslogError(
                        f"rank {rank}, position {position}: {action} needs {message}, which no action sends; "
                        f"validate the schedule first"
                    )
                first = received.get(peer, 0)
                end = max(first, index_of[message] + 1)
                program.extend(Recv(early, peer) for early in channels[peer, rank][first:end])
                received[peer] = end
            program.append(action)
            if action.kind in "FBI" and (sent := sent_by(action)):
                program.append(SendInstruction(*sent))
        for (source, destination), messages in channels.items():
            if destination == rank and received.get(source, 0) < len(messages):
                lost = messages[received.get(source, 0)]
                raise CapslogError(
                    f"rank {rank}: nothing needs {lost}, which rank {source} sends; validate the schedule first"
                )
        programs.append(program)
    return Lowered(programs, channels, placement)


def in_turn(lowered: Lowered) -> Iterator[tuple[int, Instruction]]:
    """Every instruction with its rank, in one order in which each receive comes after its send.

    The order does not depend on seconds: each rank in turn runs until it must wait for a message. The programs must
    not deadlock (`find_deadlock`).
    """
    programs = lowered.programs
    at = [0] * len(programs)
    sent: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                instruction = program[at[rank]]
                if isinstance(instruction, Recv) and instruction.message not in sent:
                    break
                if isinstance(instruction, SendInstruction):
                    sent.add(instruction.message)
                at[rank] += 1
                moved = True
                yield rank, instruction
    assert all(done == len(program) for done, program in zip(at, programs, strict=True)), "a deadlock"


def find_deadlock(lowered: Lowered, buffered_sends: bool = True) -> str | None:
    """Plays the programs with blocking receives; None when every rank comes to its end.

    Otherwise one sentence that says for each stuck rank where it stands, what it waits for and where the other side is;
    also for a receive that meets another message than the one it expects. With `buffered_sends=False` a send too waits,
    until its receiver stands at the receive (rendezvous).
    """
    programs = lowered.programs
    at = [0] * len(programs)
    in_transit: dict[tuple[int, int], list[Message]] = {}
    delivered: dict[tuple[int, int], int] = {}

    def advance(rank: int) -> bool:
        """Lets the rank run until it must wait; returns whether it advanced."""
        before = at[rank]
        while at[rank] < len(programs[rank]):
            instruction = programs[rank][at[rank]]
            if isinstance(instruction, SendInstruction):
                if not buffered_sends and not _is_at(programs, at, instruction.peer, Recv(instruction.message, rank)):
                    break
                in_transit.setdefault((rank, instruction.peer), []).append(instruction.message)
            elif isinstance(instruction, Recv):
                channel = (instruction.peer, rank)
                taken = delivered.get(channel, 0)
                waiting = in_transit.get(channel, [])
                if len(waiting) == taken or waiting[taken] != instruction.message:
                    break
                delivered[channel] = taken + 1
            at[rank] += 1
        return at[rank] > before

    moved = True
    while moved:
        moved = False
        for rank in range(len(programs)):
            moved = advance(rank) or moved

    stuck = [rank for rank in range(len(programs)) if at[rank] < len(programs[rank])]
    if not stuck:
        return None
    return "; ".join(_describe(programs, at, rank, in_transit, delivered) for rank in stuck)


def _is_at(programs: list[list[Instruction]], at: list[int], rank: int, instruction: Instruction) -> bool:
    return at[rank] < len(programs[rank]) and programs[rank][at[rank]] == instruction


def _describe(
    programs: list[list[Instruction]],
    at: list[int],
    rank: int,
    in_transit: dict[tuple[int, int], list[Message]],
    delivered: dict[tuple[int, int], int],
) -> str:
    instruction = programs[rank][at[rank]]
    assert isinstance(instruction, SendInstruction | Recv)
    message, peer = instruction.message, instruction.peer
    if isinstance(instruction, Recv):
        pending = in_transit.get((peer, rank), [])[delivered.get((peer, rank), 0) :]
        if pending:
            return (
                f"rank {rank} at {instruction} (position {at[rank]}) expects {message} from rank {peer}, "
                f"whose next message is {pending[0]}"
            )
    other = f"is at {programs[peer][at[peer]]} (position {at[peer]})" if at[peer] < len(programs[peer]) else "has ended"
    verb = "for" if isinstance(instruction, Recv) else "to hand over"
    return f"rank {rank} at {instruction} (position {at[rank]}) waits {verb} {message}; rank {peer} {other}"
