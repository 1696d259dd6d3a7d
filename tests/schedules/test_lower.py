"""Each tensor that crosses a cut is sent once, in one order per pair of ranks; deadlocks are found before the run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedules.cases import compute_edges, has_cycle, names, parse_csv, scrambled, shapes
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules import (
    Action,
    Lowered,
    Message,
    Recv,
    Schedule,
    SendInstruction,
    StageGraph,
    find_deadlock,
    lower,
    make_schedule,
)


def test_hand_written_programs() -> None:
    lowered = lower(make_schedule("1f1b", 2, 2))
    assert [[str(instruction) for instruction in program] for program in lowered.programs] == [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
    ]
    assert lowered.channels == {
        (0, 1): [Message("activation", (0, 0), (1, 0)), Message("activation", (0, 1), (1, 1))],
        (1, 0): [Message("gradient", (0, 0), (1, 0)), Message("gradient", (0, 1), (1, 1))],
    }
    assert lowered.graph == StageGraph.line(2, 2)


def test_the_input_half_of_a_split_backward_sends_the_gradient() -> None:
    lowered = lower(parse_csv("0F0,0I0,0W0\n1F0,1I0,1W0"))
    assert [str(instruction) for instruction in lowered.programs[1]] == ["1RECV_F0", "1F0", "1I0", "1SEND_B0", "1W0"]
    assert [str(instruction) for instruction in lowered.programs[0]] == ["0F0", "0SEND_F0", "0RECV_B0", "0I0", "0W0"]


def test_a_receive_is_drawn_forward_to_the_senders_order() -> None:
    """Rank 0 sends to rank 1 for stages 1 and 3; rank 1 wants them the other way round than rank 0 made them."""
    text = "0F0,2F0,0F1,2F1,2B0,0B0,2B1,0B1\n1F0,1F1,3F0,3B0,1B0,3F1,3B1,1B1"
    lowered = lower(parse_csv(text))
    assert lowered.channels[0, 1] == [
        Message("activation", (0, 0), (1, 0)),
        Message("activation", (2, 0), (3, 0)),
        Message("activation", (0, 1), (1, 1)),
        Message("activation", (2, 1), (3, 1)),
        Message("gradient", (1, 0), (2, 0)),
        Message("gradient", (1, 1), (2, 1)),
    ]
    assert [str(instruction) for instruction in lowered.programs[1]][:7] == [
        "1RECV_F0", "1F0", "1SEND_F0", "3RECV_F0", "1RECV_F1", "1F1", "1SEND_F1",
    ]  # fmt: skip


def _endpoints(message: Message, placement: list[int]) -> tuple[int, int]:
    below, above = placement[message.upstream[0]], placement[message.downstream[0]]
    return (below, above) if message.kind == "activation" else (above, below)


@settings(max_examples=80, deadline=None)
@given(names, shapes(), st.data())
def test_what_is_sent_is_what_must_cross(name: str, shape: tuple[int, int, list[int]], data: st.DataObject) -> None:
    num_stages, num_microbatches, placement = shape
    schedule = make_schedule(name, num_stages, num_microbatches, placement)
    gradient = data.draw(st.lists(st.booleans(), min_size=num_stages, max_size=num_stages))
    lowered = lower(schedule, [(stage - 1, stage) for stage in range(1, num_stages) if gradient[stage]])
    expected = {
        Message(kind, (boundary - 1, microbatch), (boundary, microbatch))
        for boundary in range(1, num_stages)
        if placement[boundary - 1] != placement[boundary]
        for microbatch in range(num_microbatches)
        for kind in ("activation", "gradient")
        if kind == "activation" or gradient[boundary]
    }
    messages = [message for channel in lowered.channels.values() for message in channel]
    assert len(messages) == len(expected)
    assert set(messages) == expected
    for (source, destination), channel in lowered.channels.items():
        assert all(_endpoints(message, placement) == (source, destination) for message in channel)
        assert [instruction.message for instruction in _of(lowered, source, SendInstruction, destination)] == channel
        assert [instruction.message for instruction in _of(lowered, destination, Recv, source)] == channel
    for rank, program in enumerate(lowered.programs):
        assert [instruction for instruction in program if isinstance(instruction, Action)] == schedule[rank]
        for index, instruction in enumerate(program):
            if isinstance(instruction, SendInstruction):  # directly after the action that made it
                m = instruction.message
                kind = "F" if m.kind == "activation" else "I" if name == "zb-h1" else "B"
                stage, call = m.end(sends=True)
                assert program[index - 1] == Action(stage, kind, call)
            if isinstance(instruction, Recv):  # before the action that needs it
                m = instruction.message
                kind = "F" if m.kind == "activation" else "I" if name == "zb-h1" else "B"
                stage, call = m.end(sends=False)
                assert Action(stage, kind, call) in program[index:]
    assert find_deadlock(lowered) is None


def _of(
    lowered: Lowered, rank: int, kind: type[SendInstruction] | type[Recv], peer: int
) -> list[SendInstruction | Recv]:
    messages = [
        instruction for instruction in lowered.programs[rank] if isinstance(instruction, SendInstruction | Recv)
    ]
    return [instruction for instruction in messages if isinstance(instruction, kind) and instruction.peer == peer]


@settings(max_examples=150, deadline=None)
@given(shapes(max_stages=5, max_microbatches=4), st.integers(0, 10**6))
def test_deadlocks_are_the_circles_of_the_dependency_graph(shape: tuple[int, int, list[int]], seed: int) -> None:
    num_stages, num_microbatches, placement = shape
    schedule = scrambled(num_stages, num_microbatches, placement, seed)
    circle = has_cycle(compute_edges(schedule, num_stages))
    assert (find_deadlock(lower(schedule)) is not None) == circle


def test_the_description_says_who_waits_for_what() -> None:
    # Rank 0 wants gradient 0 before it makes microbatch 1; rank 1 wants both microbatches before the first backward.
    deadlock = find_deadlock(lower(parse_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")))
    assert deadlock == (
        "rank 0 at 0RECV_B0 (position 2) waits for the gradient of microbatch 0 from stage 1 to stage 0; "
        "rank 1 is at 1RECV_F1 (position 2); "
        "rank 1 at 1RECV_F1 (position 2) waits for the activation of microbatch 1 from stage 0 to stage 1; "
        "rank 0 is at 0RECV_B0 (position 2)"
    )


def test_a_receiver_in_another_order_than_the_sender_is_found() -> None:
    """Without tags the wrong tensor would be taken for the right one; the finder refuses the pair."""
    first, second = Message("activation", (0, 0), (1, 0)), Message("activation", (0, 1), (1, 1))
    lowered = Lowered(
        [[SendInstruction(first, 1), SendInstruction(second, 1)], [Recv(second, 0), Recv(first, 0)]],
        {(0, 1): [first, second]},
        StageGraph.line(2, 2),
    )
    deadlock = find_deadlock(lowered)
    assert deadlock is not None
    assert "expects the activation of microbatch 1" in deadlock
    assert "next message is the activation of microbatch 0" in deadlock


def test_a_message_that_nobody_sends() -> None:
    incomplete: Schedule = [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "F", 0)]]
    with pytest.raises(
        CapslogError, match=r"rank 0, position 1: 0B0 needs the gradient of microbatch 0 from stage 1 to stage 0, "
    ):
        lower(incomplete)
    with pytest.raises(CapslogError, match=r"rank 1: nothing needs the activation of microbatch 0.*rank 0 sends"):
        lower([[Action(0, "F", 0)], [Action(1, "B", 0)]], [])
