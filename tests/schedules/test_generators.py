"""The lists that the generators make: hand-written ones for S=4 M=6, and rules that hold for all."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedules.cases import format_csv, names, parse_csv, shapes
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules import (
    ALWAYS_RECOMPUTE,
    SCHEDULES,
    Action,
    Schedule,
    StageGraph,
    StageSeconds,
    backwards_at_once,
    find_deadlock,
    graph_keeping_forwards,
    in_flight_limits,
    insert_recompute,
    lower,
    make_schedule,
    placement_of,
    schedule_of,
    simulate,
    to_strings,
    validate,
)
from varuna_capslog.schedules.generators import list_schedule

# Written by hand, from the definition: min(S - s, M) forwards, then a backward and a forward in turn, then backwards.
ONE_F_ONE_B_4_6 = """\
0F0,0F1,0F2,0F3,0B0,0F4,0B1,0F5,0B2,0B3,0B4,0B5
1F0,1F1,1F2,1B0,1F3,1B1,1F4,1B2,1F5,1B3,1B4,1B5
2F0,2F1,2B0,2F2,2B1,2F3,2B2,2F4,2B3,2F5,2B4,2B5
3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3,3F4,3B4,3F5,3B5
"""
GPIPE_4_6 = """\
0F0,0F1,0F2,0F3,0F4,0F5,0B0,0B1,0B2,0B3,0B4,0B5
1F0,1F1,1F2,1F3,1F4,1F5,1B0,1B1,1B2,1B3,1B4,1B5
2F0,2F1,2F2,2F3,2F4,2F5,2B0,2B1,2B2,2B3,2B4,2B5
3F0,3F1,3F2,3F3,3F4,3F5,3B0,3B1,3B2,3B3,3B4,3B5
"""
# Followed by hand with forward 1, recompute 1, backward 2: stage 2 may have 3 in flight, stages 0 and 1 all 6.
VARUNA_4_6 = """\
0F0,0F1,0F2,0F3,0F4,0F5,0R0,0B0,0R1,0B1,0R2,0B2,0R3,0B3,0R4,0B4,0R5,0B5
1F0,1F1,1F2,1F3,1F4,1F5,1R0,1B0,1R1,1B1,1R2,1B2,1R3,1B3,1R4,1B4,1R5,1B5
2F0,2F1,2F2,2R0,2B0,2R1,2B1,2R2,2B2,2F3,2F4,2F5,2R3,2B3,2R4,2B4,2R5,2B5
3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3,3F4,3B4,3F5,3B5
"""
# Groups of two: as 1F1B of three microbatches, each written twice.
KFKB_4_6 = """\
0F0,0F1,0F2,0F3,0F4,0F5,0B0,0B1,0B2,0B3,0B4,0B5
1F0,1F1,1F2,1F3,1F4,1F5,1B0,1B1,1B2,1B3,1B4,1B5
2F0,2F1,2F2,2F3,2B0,2B1,2F4,2F5,2B2,2B3,2B4,2B5
3F0,3F1,3B0,3B1,3F2,3F3,3B2,3B3,3F4,3F5,3B4,3B5
"""
# 1F1B with I for B; stage s runs W s calls later, so that every stage has at most four microbatches in flight.
ZB_H1_4_6 = """\
0F0,0F1,0F2,0F3,0I0,0W0,0F4,0I1,0W1,0F5,0I2,0W2,0I3,0W3,0I4,0W4,0I5,0W5
1F0,1F1,1F2,1I0,1F3,1I1,1W0,1F4,1I2,1W1,1F5,1I3,1W2,1I4,1W3,1I5,1W4,1W5
2F0,2F1,2I0,2F2,2I1,2F3,2I2,2W0,2F4,2I3,2W1,2F5,2I4,2W2,2I5,2W3,2W4,2W5
3F0,3I0,3F1,3I1,3F2,3I2,3F3,3I3,3W0,3F4,3I4,3W1,3F5,3I5,3W2,3W3,3W4,3W5
"""
# Two ranks with two stages each, as in Megatron's figure: 4 and 2 forwards, then one of each in turn, in rounds of 2.
INTERLEAVED_2_2_4 = """\
0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3
1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3
"""
HAND_WRITTEN = {
    "gpipe": GPIPE_4_6,
    "1f1b": ONE_F_ONE_B_4_6,
    "1f1b-star": ONE_F_ONE_B_4_6,
    "interleaved": ONE_F_ONE_B_4_6,
    "kfkb": KFKB_4_6,
    "zb-h1": ZB_H1_4_6,
    "varuna": VARUNA_4_6,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_hand_written_lists(name: str) -> None:
    assert to_strings(make_schedule(name, 4, 6)) == to_strings(parse_csv(HAND_WRITTEN[name]))


def test_hand_written_interleaved_stages() -> None:
    placement = [0, 1, 0, 1]
    assert format_csv(make_schedule("interleaved", 4, 4, placement)) == INTERLEAVED_2_2_4
    graph = StageGraph.line(4, 4, placement)
    assert schedule_of("interleaved", graph, in_flight=[2]) == schedule_of("1f1b", graph, in_flight=[2])
    for zigzag in ([0, 1, 1, 0], [0, 1, 2, 1, 2, 0]):  # more rounds than stages on a rank
        assert make_schedule("interleaved", len(zigzag), 4, zigzag) == make_schedule("1f1b", len(zigzag), 4, zigzag)


@pytest.mark.parametrize(
    "pattern",  # of the chunks in the order of the model; x: empty
    ["..|x.", "..|.x", "...|x..|..x", "...|.x.", "....|xx..|..x.", "..|.x|.x"],
)
def test_ranks_without_a_chunk_in_a_round_do_nothing_where_an_empty_one_would_run(pattern: str) -> None:
    """Megatron's order with the calls of empty chunks left out."""
    ranks = pattern.index("|")
    chunks = pattern.replace("|", "")
    full = [number for number, chunk in enumerate(chunks) if chunk == "."]
    placement = [number % ranks for number in full]
    for microbatches in (1, 4, 6, 7):
        whole = make_schedule("interleaved", len(chunks), microbatches, [n % ranks for n in range(len(chunks))])
        expected = [
            [Action(full.index(a.stage), a.kind, a.microbatch) for a in row if a.stage in full] for row in whole
        ]
        schedule = make_schedule("interleaved", len(full), microbatches, placement)
        assert schedule == expected
        validate(schedule, StageGraph.line(len(full), microbatches, placement))
        assert find_deadlock(lower(schedule)) is None


def test_two_pipelines_interleave_each_for_itself() -> None:
    graph = StageGraph((0, 1, 0, 1, 2, 3, 2, 3), ((0, 1, 2, 3),) * 4 + ((4, 5, 6, 7),) * 3)
    rows = schedule_of("interleaved", graph)
    assert format_csv(rows[:2]) == INTERLEAVED_2_2_4
    second = [[Action(action.stage - 4, action.kind, action.microbatch) for action in row] for row in rows[2:]]
    assert second == make_schedule("interleaved", 4, 3, [0, 1, 0, 1])


@pytest.mark.parametrize("num_ranks", range(1, 7))
def test_interleaved_lists_of_any_size_are_never_slower_than_1f1b(num_ranks: int) -> None:
    for stages_per_rank in range(2, 4):
        placement = [stage % num_ranks for stage in range(num_ranks * stages_per_rank)]
        seconds = StageSeconds([1.0] * len(placement), [2.0] * len(placement))
        for num_microbatches in range(1, 15):
            schedule = make_schedule("interleaved", len(placement), num_microbatches, placement)
            validate(schedule, StageGraph.line(len(placement), num_microbatches, placement))
            assert find_deadlock(lower(schedule)) is None
            plain = make_schedule("1f1b", len(placement), num_microbatches, placement)
            assert simulate(schedule, seconds).step_seconds <= simulate(plain, seconds).step_seconds
            if num_microbatches % num_ranks == 0:  # Narayanan et al., Sec. 2.2.2: the bubble is that of 1F1B divided
                busy = 3.0 * num_microbatches * stages_per_rank
                assert simulate(schedule, seconds).step_seconds == busy + 3.0 * (num_ranks - 1)


def test_zb_h1_has_the_papers_bubble_at_1f1bs_memory() -> None:
    """Qi et al., Sec. 2.2 and Table 2, with f, b = i + w for a stage's forward and its whole backward."""
    for stages, forward, inputs, weights in (
        (2, 1.0, 1.0, 1.0),
        (4, 1.0, 1.25, 0.75),
        (8, 2.0, 2.0, 2.0),
        (5, 3, 3, 1),
    ):
        count = 4 * stages
        seconds = StageSeconds(
            [forward] * stages, [inputs + weights] * stages, other={"I": [inputs] * stages, "W": [weights] * stages}
        )
        halves = simulate(make_schedule("zb-h1", stages, count), seconds)
        unsplit = simulate(make_schedule("1f1b", stages, count), seconds)
        work, back = count * (forward + inputs + weights), inputs + weights
        assert unsplit.step_seconds == work + (stages - 1) * (forward + back)
        assert halves.step_seconds == work + (stages - 1) * (forward + back - 2 * weights)
        assert max(halves.max_in_flight) == max(unsplit.max_in_flight) == stages


def test_a_limit_below_a_group_is_refused() -> None:
    with pytest.raises(CapslogError, match="stage 1 takes 4 microbatches and may have 2 in flight, but kfkb runs 3"):
        schedule_of("kfkb", StageGraph.line(2, 4), in_flight=[None, 2], k=3)
    assert schedule_of("kfkb", StageGraph.line(2, 4), k=1) == make_schedule("1f1b", 2, 4)


def test_hand_written_recomputation() -> None:
    assert to_strings(make_schedule("1f1b", 2, 3, recompute=True)) == [
        ["0F0", "0F1", "0R0", "0B0", "0F2", "0R1", "0B1", "0R2", "0B2"],
        ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"],
    ]
    assert to_strings(make_schedule("gpipe", 1, 2, recompute=True)) == [["0F0", "0F1", "0R0", "0B0", "0R1", "0B1"]]
    # One microbatch: nothing comes between its forward and its backward anywhere.
    assert to_strings(make_schedule("varuna", 2, 1)) == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_hand_written_two_stages_on_one_rank() -> None:
    """Stages 0 and 2 on rank 0: a backward goes first, and the deeper stage before the other."""
    assert to_strings(make_schedule("1f1b", 3, 2, placement=[0, 1, 0])) == [
        ["0F0", "0F1", "2F0", "2B0", "2F1", "2B1", "0B0", "0B1"],
        ["1F0", "1F1", "1B0", "1B1"],
    ]
    assert to_strings(make_schedule("1f1b", 2, 2, placement=[0, 0])) == [
        ["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]
    ]


# Also followed by hand. First: rank 0's stage 0 recomputes one unit before each of rank 1's gradients, although stage 3
# could go on. Second: rank 0's stage 2 waits one unit with the graph of 2F0 for its gradient, although 2F1 could go on.
VARUNA_OF_0100 = """\
0F0,0F1,2F0,3F0,3B0,2B0,2F1,0R0,0B0,3F1,3B1,2B1,0F2,0R1,0B1,2F2,3F2,3B2,2B2,0R2,0B2
1F0,1F1,1R0,1B0,1R1,1B1,1F2,1B2
"""
VARUNA_OF_0001 = """\
0F0,1F0,2F0,0F1,1F1,2B0,1R0,1B0,0R0,0B0,2F1,2B1,1R1,1B1,0R1,0B1
3F0,3B0,3F1,3B1
"""


def test_hand_written_varuna_with_three_stages_on_one_rank() -> None:
    assert format_csv(make_schedule("varuna", 4, 3, placement=[0, 1, 0, 0])) == VARUNA_OF_0100
    assert format_csv(make_schedule("varuna", 4, 2, placement=[0, 0, 0, 1])) == VARUNA_OF_0001


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_one_stage_per_rank_is_the_textbook(num_stages: int) -> None:
    for num_microbatches in range(1, 13):
        for rank, actions in enumerate(make_schedule("1f1b", num_stages, num_microbatches)):
            ahead = min(num_stages - rank, num_microbatches)
            expected = [f"{rank}F{m}" for m in range(ahead)]
            for m in range(num_microbatches):
                expected.append(f"{rank}B{m}")
                if m + ahead < num_microbatches:
                    expected.append(f"{rank}F{m + ahead}")
            assert [str(action) for action in actions] == expected
        for rank, actions in enumerate(make_schedule("gpipe", num_stages, num_microbatches)):
            assert [str(a) for a in actions] == [f"{rank}{kind}{m}" for kind in "FB" for m in range(num_microbatches)]


def _count_graphs(schedule: Schedule, num_stages: int) -> list[int]:
    """Most live graphs per stage, counted from the lists alone: F keeps its graph unless an R comes later."""
    most = [0] * num_stages
    for actions in schedule:
        alive: dict[int, set[int]] = {}
        for position, action in enumerate(actions):
            assert action.microbatch is not None
            mine = alive.setdefault(action.stage, set())
            again = Action(action.stage, "R", action.microbatch)
            if action.kind == "R" or (action.kind == "F" and again not in actions[position:]):
                mine.add(action.microbatch)
            most[action.stage] = max(most[action.stage], len(mine))
            if action.kind in "BW":
                mine.remove(action.microbatch)
    return most


@settings(max_examples=120, deadline=None)
@given(names, shapes())
def test_any_placement_is_valid_and_does_not_deadlock(name: str, shape: tuple[int, int, list[int]]) -> None:
    num_stages, num_microbatches, placement = shape
    limits = in_flight_limits(name, num_stages, num_microbatches)
    for requested in (False, True):
        recompute = requested or name in ALWAYS_RECOMPUTE
        schedule = make_schedule(name, num_stages, num_microbatches, placement, requested)
        validate(schedule, StageGraph.line(num_stages, num_microbatches, placement), recompute)
        assert placement_of(schedule) == placement
        assert find_deadlock(lower(schedule)) is None
        halves = {"I": [1.0] * num_stages, "W": [1.0] * num_stages}
        timeline = simulate(schedule, StageSeconds([1.0] * num_stages, [2.0] * num_stages, other=halves))
        if name != "interleaved" or len(set(placement)) == len(placement):
            assert all(seen <= limit for seen, limit in zip(timeline.max_in_flight, limits, strict=True))
        assert timeline.max_live_graphs == _count_graphs(schedule, num_stages)
        if recompute and name != "zb-h1":
            assert timeline.max_live_graphs == [1] * num_stages


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_varuna_does_nothing_else_on_a_stage_between_recompute_and_backward(shape: tuple[int, int, list[int]]) -> None:
    num_stages, num_microbatches, placement = shape
    schedule = make_schedule("varuna", num_stages, num_microbatches, placement)
    for stage in range(num_stages):
        mine = [action for action in schedule[placement[stage]] if action.stage == stage]
        for before, action in pairwise(mine):
            if before.kind == "R":
                assert action == Action(stage, "B", before.microbatch)
    # The last stage: forward and backward back to back on its rank, whatever else lives there, and never a recompute.
    of_rank = schedule[placement[-1]]
    for m in range(num_microbatches):
        forward = of_rank.index(Action(num_stages - 1, "F", m))
        assert of_rank[forward + 1] == Action(num_stages - 1, "B", m)


def test_varuna_recomputes_before_the_gradient_arrives() -> None:
    """With the costs of the played step the first R of every stage ends no later than its gradient comes."""
    timeline = simulate(make_schedule("varuna", 4, 6), StageSeconds([1.0] * 4, [2.0] * 4))
    end_of = {str(span.action): span.end_seconds for row in timeline.actions for span in row}
    early = [end_of[f"{stage}R0"] <= end_of[f"{stage + 1}B0"] for stage in range(3)]
    assert early == [True, True, True]


@pytest.mark.parametrize("num_stages", [2, 3, 4, 6, 8])
def test_varunas_limit_costs_no_time(num_stages: int) -> None:
    """With uniform costs no number of forwards in flight gives a shorter step, and one less gives a longer one."""
    for num_microbatches in (1, 4, 12, 24):

        def seconds(limits: list[int], num_microbatches: int = num_microbatches) -> float:
            again = [True] * num_stages
            schedule = list_schedule(StageGraph.line(num_stages, num_microbatches), limits, recompute=again)
            return simulate(schedule, StageSeconds([1.0] * num_stages, [2.0] * num_stages)).step_seconds

        limits = in_flight_limits("varuna", num_stages, num_microbatches)
        assert seconds(limits) == seconds([num_microbatches] * num_stages)
    assert seconds([limits[0] - 1, *limits[1:]]) > seconds(limits)


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_graphs_are_kept_where_nothing_comes_between(shape: tuple[int, int, list[int]]) -> None:
    num_stages, num_microbatches, placement = shape
    plain = make_schedule("1f1b", num_stages, num_microbatches, placement)
    assert graph_keeping_forwards(plain) == {(s, m) for s in range(num_stages) for m in range(num_microbatches)}
    schedule = insert_recompute(plain)
    assert [[a for a in actions if a.kind != "R"] for actions in schedule] == plain
    kept = graph_keeping_forwards(schedule)
    for stage in range(num_stages):
        mine = [action for action in plain[placement[stage]] if action.stage == stage]
        for m in range(num_microbatches):
            adjacent = mine.index(Action(stage, "B", m)) == mine.index(Action(stage, "F", m)) + 1
            assert ((stage, m) in kept) == adjacent


@settings(max_examples=60, deadline=None)
@given(names, shapes())
def test_the_numbers_of_the_ranks_do_not_matter(name: str, shape: tuple[int, int, list[int]]) -> None:
    num_stages, num_microbatches, placement = shape
    schedule = make_schedule(name, num_stages, num_microbatches, placement)
    turned = make_schedule(name, num_stages, num_microbatches, [max(placement) - rank for rank in placement])
    assert turned == schedule[::-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1fb1", 2, 2), "did you mean '1f1b'"),
        (("zigzag", 2, 2), "use one of gpipe, 1f1b, 1f1b-star, interleaved, kfkb, zb-h1, varuna"),
        (("gpipe", 0, 2), "at least one"),
        (("gpipe", 2, 0), "at least one"),
        (("1f1b", 3, 2, [0, 1]), "2 ranks for 3 stages"),
        (("1f1b", 2, 2, [0, 2]), "without a gap"),
        (("1f1b", 2, 2, [-1, 0]), "without a gap"),
    ],
)
def test_what_makes_no_schedule_is_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(CapslogError, match=message):
        make_schedule(*arguments)  # type: ignore[arg-type]


def test_copies_run_beside_computations() -> None:
    """Hand-written lists: each L stands one computation before the action that needs it, unless its O stands there. No
    copies where B follows F.
    """
    graph = StageGraph.line(2, 4)
    kept = to_strings(schedule_of("1f1b", graph, offload=[True, True]))
    assert " ".join(kept[0]) == "0F0 0O0 0F1 0O1 0L0 0B0 0L1 0F2 0O2 0B1 0L2 0F3 0O3 0B2 0L3 0B3"
    assert " ".join(kept[1]) == "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    again = to_strings(schedule_of("varuna", graph, offload=[True, False]))
    assert " ".join(again[0]) == "0F0 0O0 0F1 0O1 0L0 0F2 0O2 0R0 0L1 0B0 0R1 0L2 0B1 0R2 0B2 0F3 0B3"


@given(shapes(), names, st.data())
@settings(max_examples=60, deadline=None)
def test_stages_may_recompute_and_offload_each_for_itself(
    shape: tuple[int, int, list[int]], name: str, data: st.DataObject
) -> None:
    num_stages, num_microbatches, placement = shape
    graph = StageGraph.line(num_stages, num_microbatches, placement)
    flags = st.lists(st.booleans(), min_size=num_stages, max_size=num_stages)
    recompute, offload = data.draw(flags), data.draw(flags)
    rows = schedule_of(name, graph, recompute, offload=offload)
    validate(rows, graph, recompute, offload=offload)
    assert find_deadlock(lower(rows, graph=graph)) is None
    for row in rows:
        at_once = backwards_at_once(row)
        moved = {(action.stage, action.microbatch) for action in row if action.kind == "O"}
        calls = {(action.stage, action.microbatch) for action in row if action.kind == "F" and offload[action.stage]}
        assert moved == calls - at_once
