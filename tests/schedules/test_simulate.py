"""Times against formulas, a hand-drawn picture and a recursion over dependencies that knows no messages."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedules.cases import compute_edges, halves, names, parse_csv, shapes
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules import (
    Action,
    Message,
    Schedule,
    StageSeconds,
    insert_offload,
    lower,
    make_schedule,
    simulate,
)
from varuna_capslog.schedules.simulate import play_contended, speed_of


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (1.0, 1.0), (3.0, 1.0), (0.5, 4.0)])
def test_uniform_stages_take_the_known_time(name: str, forward: float, backward: float) -> None:
    """(M + S - 1)(f + b), with a bubble of (S - 1) / (M + S - 1)."""
    for num_stages in range(1, 9):
        for num_microbatches in (1, 2, 5, 12):
            schedule = make_schedule(name, num_stages, num_microbatches)
            timeline = simulate(schedule, StageSeconds([forward] * num_stages, [backward] * num_stages))
            slots = num_microbatches + num_stages - 1
            assert timeline.step_seconds == pytest.approx(slots * (forward + backward))
            assert timeline.bubble_fraction == pytest.approx((num_stages - 1) / slots)
            assert timeline.busy_seconds == pytest.approx([num_microbatches * (forward + backward)] * num_stages)


def test_memory_over_time() -> None:
    timeline = simulate(make_schedule("1f1b", 4, 6), StageSeconds([1.0] * 4, [2.0] * 4))
    assert timeline.max_in_flight == timeline.max_live_graphs == [4, 3, 2, 1]
    assert simulate(make_schedule("gpipe", 4, 6), StageSeconds([1.0] * 4, [2.0] * 4)).max_in_flight == [6] * 4
    small = simulate(make_schedule("1f1b", 2, 3, recompute=True), StageSeconds([1.0] * 2, [2.0] * 2))
    # By hand: F0 0-1, F1 1-2, R0 2-3, B0 4-6, F2 6-7, R1 7-8, B1 8-10, R2 10-11, B2 11-13.
    assert small.in_flight[0] == [(0, 1), (1, 2), (6, 1), (6, 2), (10, 1), (13, 0)]
    assert small.live_graphs[0] == [(2, 1), (6, 0), (7, 1), (10, 0), (10, 1), (13, 0)]
    assert small.step_seconds == 13.0
    assert small.max_live_graphs == [1, 1]


def test_what_is_offloaded_is_no_live_graph() -> None:
    schedule = parse_csv("0F0,0O0,0F1,0B0,0B1".replace("0B0", "0L0,0B0"))
    copy_seconds = {"O": [1.0], "L": [1.0]}
    assert simulate(schedule, StageSeconds([1.0], [1.0], other=copy_seconds)).live_graphs[0] == [
        (0, 1), (2, 0), (2, 1), (3, 2), (5, 1), (6, 0),
    ]  # fmt: skip


def test_transfers_delay_and_take_turns_on_a_link() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    timeline = simulate(schedule, StageSeconds([1.0, 1.0], [2.0, 2.0], transfer=[0.0, 3.0]))
    # 0F0 0-1, its message 1-4; 0F1 1-2, its message waits for the link: 4-7; 1F1 7-8; 1B0 8-10, message 10-13;
    # 1B1 10-12, message 13-16; 0B1 16-18.
    assert [(message.message, message.start_seconds, message.end_seconds) for message in timeline.messages] == [
        (Message("activation", (0, 0), (1, 0)), 1.0, 4.0),
        (Message("activation", (0, 1), (1, 1)), 4.0, 7.0),
        (Message("gradient", (0, 0), (1, 0)), 10.0, 13.0),
        (Message("gradient", (0, 1), (1, 1)), 13.0, 16.0),
    ]
    assert timeline.step_seconds == 18.0
    seconds = StageSeconds([1.0, 1.0], [2.0, 2.0], transfer=[0.0, 3.0])
    assert simulate(schedule, seconds, gradients=[]).step_seconds == 12.0
    # Two stages on one rank: nothing is transferred.
    assert simulate(make_schedule("gpipe", 2, 2, [0, 0]), seconds).step_seconds == 12.0


def _recursive_ends(schedule: Schedule, num_stages: int, seconds: dict[str, list[float]]) -> dict[Action, float]:
    edges = compute_edges(schedule, num_stages)

    @cache
    def end(action: Action) -> float:
        begin = max((end(needed) for needed in edges[action] if isinstance(needed, Action)), default=0.0)
        return begin + seconds[action.kind][action.stage]

    return {action: end(action) for actions in schedule for action in actions}


@settings(max_examples=80, deadline=None)
@given(names, shapes(), st.data())
def test_times_are_the_longest_paths(name: str, shape: tuple[int, int, list[int]], data: st.DataObject) -> None:
    num_stages, num_microbatches, placement = shape
    schedule = make_schedule(name, num_stages, num_microbatches, placement, data.draw(st.booleans()))
    durations = st.lists(st.integers(0, 9).map(float), min_size=num_stages, max_size=num_stages)
    seconds = {kind: data.draw(durations) for kind in "FBRIW"}
    split = {kind: seconds[kind] for kind in "IW"}
    timeline = simulate(schedule, StageSeconds(seconds["F"], seconds["B"], seconds["R"], other=split))
    expected = _recursive_ends(schedule, num_stages, seconds)
    assert {span.action: span.end_seconds for row in timeline.actions for span in row} == expected
    assert timeline.step_seconds == max(expected.values())
    assert [[span.action for span in row] for row in timeline.actions] == schedule


def test_what_cannot_be_timed_is_refused() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(CapslogError, match="seconds of kind B: 1 values where the schedule needs 2"):
        simulate(schedule, StageSeconds([1.0, 1.0], [1.0]))
    with pytest.raises(CapslogError, match=r"seconds of kind F\[1\] is nan"):
        simulate(schedule, StageSeconds([1.0, float("nan")], [1.0, 1.0]))
    with pytest.raises(CapslogError, match=r"transfer_seconds\[1\] is -1"):
        simulate(schedule, StageSeconds([1.0, 1.0], [1.0, 1.0], transfer=[0.0, -1.0]))
    with pytest.raises(CapslogError, match=r"no seconds are known for 0O0 \(offload\).*other_seconds\['O'\]"):
        simulate(parse_csv("0F0,0O0,0L0,0B0"), StageSeconds([1.0], [1.0]))
    with pytest.raises(CapslogError, match="deadlocks: rank 0 at 0RECV_B0"):
        simulate(parse_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), StageSeconds([1.0] * 2, [1.0] * 2))


# -- ranks that share cores: against a step worked out by hand, and against the plain simulator where cores abound


def test_speeds_beyond_the_list_share_what_all_cores_give() -> None:
    assert [speed_of(active, [1.0, 0.8]) for active in (1, 2, 3, 4)] == pytest.approx([1.0, 0.8, 1.6 / 3, 0.4])


def test_two_ranks_on_one_core_take_turns() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    timeline = simulate(schedule, StageSeconds([1.0, 1.0], [1.0, 1.0]), speeds=[1.0])
    # 0F0 0-1 alone. 0F1 and 1F0 at half speed 1-3. 1F1 3-4 alone. 1B0 4-5, then 0B0 and 1B1 at half speed 5-7, 0B1 7-8.
    times = {str(span.action): (span.start_seconds, span.end_seconds) for row in timeline.actions for span in row}
    assert times == {
        "0F0": (0, 1), "0F1": (1, 3), "1F0": (1, 3), "1F1": (3, 4),
        "1B0": (4, 5), "0B0": (5, 7), "1B1": (5, 7), "0B1": (7, 8),
    }  # fmt: skip
    assert timeline.step_seconds == 8.0  # all the work there is, one core


def test_a_slower_pair_stretches_only_what_runs_together() -> None:
    # 0F0 0-1; 0F1 beside 1F0 at half speed each: 1-3; and so on: 1F1 alone 3-4, 1B0 4-5, 0B0 | 1B1 5-7, 0B1 7-8.
    schedule = make_schedule("gpipe", 2, 2)
    assert simulate(schedule, StageSeconds([1.0] * 2, [1.0] * 2), speeds=[1.0, 0.5]).step_seconds == 8.0
    assert simulate(schedule, StageSeconds([1.0] * 2, [1.0] * 2), speeds=[1.0, 1.0]).step_seconds == 6.0


def test_handing_over_costs_the_sender_and_delays_the_message() -> None:
    schedule = make_schedule("gpipe", 2, 1)
    for speeds in (None, [1.0, 0.999999999]):
        timeline = simulate(
            schedule, StageSeconds([1.0, 1.0], [1.0, 1.0], transfer=[0.0, 0.25], handover=[0.0, 0.5]), speeds=speeds
        )
        # 0F0 0-1, handed over 1-1.5 (the link alone would need 1.25), 1F0 1.5-2.5, 1B0 2.5-3.5, over at 4, 0B0 4-5.
        assert timeline.step_seconds == pytest.approx(5.0)
        assert [message.end_seconds for message in timeline.messages] == pytest.approx([1.5, 4.0])
    twice = simulate(make_schedule("gpipe", 2, 2), StageSeconds([1.0] * 2, [1.0] * 2, handover=[0.0, 0.5]))
    # The second forward of stage 0 begins after the first was handed over.
    assert [span.start_seconds for span in twice.actions[0][:2]] == [0.0, 1.5]


@settings(max_examples=60, deadline=None)
@given(names, shapes(), st.data())
def test_a_core_for_every_rank_is_the_plain_simulation(name: str, shape: tuple, data: st.DataObject) -> None:  # type: ignore[type-arg]
    num_stages, num_microbatches, placement = shape
    schedule = make_schedule(name, num_stages, num_microbatches, placement, data.draw(st.booleans()))
    durations = st.lists(st.integers(0, 9).map(float), min_size=num_stages, max_size=num_stages)
    forward, backward = data.draw(durations), data.draw(durations)
    cuts = st.lists(st.integers(0, 3).map(float), min_size=num_stages, max_size=num_stages)
    transfer, handover = data.draw(cuts), data.draw(cuts)
    plain = simulate(
        schedule, StageSeconds(forward, backward, transfer=transfer, handover=handover, other=halves(backward))
    )
    cost = {span.action: span.end_seconds - span.start_seconds for row in plain.actions for span in row}
    links = [(stage - 1, stage) for stage in range(1, num_stages)]
    times = [{way: row[link[1]] for link in links for way in (link, link[::-1])} for row in (transfer, handover)]
    played, messages = play_contended(lower(schedule), cost, *times, [1.0] * len(schedule))
    assert played == plain.actions
    arrivals = {message.message: message.end_seconds for message in plain.messages}
    assert {message.message: message.end_seconds for message in messages} == arrivals


@settings(max_examples=40, deadline=None)
@given(names, shapes(), st.integers(1, 4))
def test_fewer_cores_never_help_and_work_is_conserved(name: str, shape: tuple, cores: int) -> None:  # type: ignore[type-arg]
    num_stages, num_microbatches, placement = shape
    schedule = make_schedule(name, num_stages, num_microbatches, placement)
    seconds = [float(1 + stage % 3) for stage in range(num_stages)]
    stage_seconds = StageSeconds(seconds, seconds, other=halves(seconds))
    plain = simulate(schedule, stage_seconds)
    shared = simulate(schedule, stage_seconds, speeds=[1.0] * cores)
    assert shared.step_seconds >= plain.step_seconds - 1e-9
    assert shared.step_seconds >= sum(plain.busy_seconds) / cores - 1e-9
    assert [[span.action for span in row] for row in shared.actions] == schedule


def test_both_directions_may_share_one_link() -> None:
    """Activations cross at 1-4 and 4-7; the first gradient, ready at 6, waits for the second of them."""
    seconds = StageSeconds([1.0, 1.0], [1.0, 1.0], transfer=[0.0, 3.0])
    schedule = make_schedule("1f1b", 2, 2)
    apart, shared = (simulate(schedule, seconds, shared_links=both) for both in (False, True))
    assert [message.start_seconds for message in apart.messages] == [1.0, 4.0, 6.0, 9.0]
    assert [message.start_seconds for message in shared.messages] == [1.0, 4.0, 7.0, 10.0]
    assert (apart.step_seconds, shared.step_seconds) == (13.0, 14.0)


def test_messages_may_take_different_times_in_both_directions() -> None:
    """Worked out by hand: 0F 0-1, its message 1-3, 1F 3-4, 1B 4-5, its message 5-10, 0B 10-11."""
    schedule = make_schedule("1f1b", 2, 1)
    both = {(0, 1): 2.0, (1, 0): 5.0}
    timeline = simulate(
        schedule, StageSeconds([1.0] * 2, [1.0] * 2, transfer=both, handover={(1, 0): 1.0, (0, 1): 0.0})
    )
    assert [(message.start_seconds, message.end_seconds) for message in timeline.messages] == [(1.0, 3.0), (5.0, 10.0)]
    assert timeline.step_seconds == 11.0
    same_both_ways = simulate(schedule, StageSeconds([1.0] * 2, [1.0] * 2, transfer={(0, 1): 2.0}))
    assert same_both_ways.step_seconds == 8.0, "the other direction takes as long"


@pytest.mark.parametrize("shared", [False, True])
def test_copies_beside_the_computation_by_hand(shared: bool) -> None:
    """F 1 s, B 2 s, O 3 s, L 2 s. O0 leaves 1-4, and behind the forward beside it the rank waits; L0 is 4-6."""
    schedule = parse_csv("0F0,0O0,0F1,0L0,0B0,0B1")
    seconds = StageSeconds([1.0], [2.0], other={"O": [3.0], "L": [2.0]})
    blocking = simulate(schedule, seconds, shared_links=shared)
    assert (blocking.step_seconds, blocking.busy_seconds, blocking.copies) == (11.0, [11.0], [])
    beside = simulate(schedule, seconds, shared_links=shared, copies_beside=True)
    assert [(str(span.action), span.start_seconds, span.end_seconds) for span in beside.actions[0]] == [
        ("0F0", 0, 1), ("0O0", 1, 1), ("0F1", 1, 2), ("0L0", 4, 4), ("0B0", 6, 8), ("0B1", 8, 10),
    ]  # fmt: skip
    assert [(copy.start_seconds, copy.end_seconds) for copy in beside.copies] == [(1, 4), (4, 6)]
    assert beside.busy_seconds == [6.0]


@settings(max_examples=40, deadline=None)
@given(names, shapes(), st.data())
def test_copies_beside_are_played_alike_with_and_without_shared_cores(
    name: str, shape: tuple[int, int, list[int]], data: st.DataObject
) -> None:
    num_stages, num_microbatches, placement = shape
    schedule = insert_offload(make_schedule(name, num_stages, num_microbatches, placement), [True] * num_stages)
    durations = st.lists(st.integers(0, 9).map(float), min_size=num_stages, max_size=num_stages)
    backward = data.draw(durations)
    other_seconds = {**halves(backward), "O": data.draw(durations), "L": data.draw(durations)}
    seconds = StageSeconds(data.draw(durations), backward, other=other_seconds)
    alone = simulate(schedule, seconds, copies_beside=True)
    shared = simulate(schedule, seconds, copies_beside=True, shared_links=True)
    # links that take no time may be shared without any difference
    assert (shared.actions, shared.copies) == (alone.actions, alone.copies)
    back = {
        (copy.action.stage, copy.action.microbatch): copy.end_seconds
        for copy in alone.copies
        if copy.action.kind == "L"
    }
    for span in (span for row in alone.actions for span in row):
        if span.action.kind in "BI":
            assert span.start_seconds >= back.get((span.action.stage, span.action.microbatch), 0.0)


def test_a_recomputation_inside_a_split_backward_is_a_part_of_its_input_half() -> None:
    seconds = StageSeconds([1.0], [4.0], backward_again=[5.5], other={"I": [3.0], "W": [1.0]})
    timeline = simulate(parse_csv("0F0,0F1,0R0,0I0,0W0,0R1,0I1,0W1"), seconds)
    took = {str(span.action): span.end_seconds - span.start_seconds for span in timeline.actions[0]}
    assert (took["0I0"], took["0W0"], took["0R0"]) == (4.5, 1.0, 1.0)


def test_forwards_without_a_graph_may_cost_less() -> None:
    schedule = make_schedule("gpipe", 1, 2, recompute=True)
    # F0, F1, R0 B0 R1 B1: F0 and F1 keep no graph.
    assert [str(action) for action in schedule[0]] == ["0F0", "0F1", "0R0", "0B0", "0R1", "0B1"]
    assert simulate(schedule, StageSeconds([1.0], [2.0], bare_forward=[0.0])).step_seconds == 6.0


@pytest.mark.parametrize("speeds", [[], [0.0], [1.0, 1.5]])
def test_impossible_speeds_are_refused(speeds: list[float]) -> None:
    with pytest.raises(CapslogError, match="speeds is"):
        simulate(make_schedule("gpipe", 2, 2), StageSeconds([1.0] * 2, [1.0] * 2), speeds=speeds)
