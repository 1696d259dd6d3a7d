"""Routes of microbatches through stages: which stages send to which, and schedules of unequal pipelines."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedules.cases import halves, has_cycle, names
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules import (
    ALWAYS_RECOMPUTE,
    Action,
    RunShape,
    Schedule,
    StageGraph,
    StageSeconds,
    find_deadlock,
    lower,
    make_schedule,
    schedule_of,
    simulate,
    to_strings,
    validate,
)
from varuna_capslog.schedules.generators import in_flight_microbatches

THREE_AND_TWO = StageGraph((0, 1, 2, 3, 4), ((0, 1, 2), (3, 4), (0, 1, 2), (3, 4), (0, 1, 2)))
"""Two pipelines of unequal length on five ranks; the longer one takes three of the five microbatches."""
REPLICATED_MIDDLE = StageGraph((0, 1, 2, 0), ((0, 1, 3), (0, 2, 3), (0, 1, 3), (0, 1, 3)))
"""The middle stage twice, with unequal shares; the first and the last stage share rank 0."""


def test_neighbours_are_named_by_their_own_calls() -> None:
    graph = REPLICATED_MIDDLE
    assert graph.microbatches == [[0, 1, 2, 3], [0, 2, 3], [1], [0, 1, 2, 3]]
    assert graph.downstream == [
        [((1, 0),), ((2, 0),), ((1, 1),), ((1, 2),)],
        [((3, 0),), ((3, 2),), ((3, 3),)],
        [((3, 1),)],
        [()] * 4,
    ]
    assert graph.upstream[0] == [()] * 4
    assert graph.upstream[3] == [((1, 0),), ((2, 0),), ((1, 1),), ((1, 2),)]
    assert graph.depths == [3, 2, 2, 1]
    assert THREE_AND_TWO.depths == [3, 2, 1, 2, 1]
    assert sorted(graph.edges) == [(0, 1), (0, 2), (1, 3), (2, 3)]


@pytest.mark.parametrize("route", [(), (0, 0), (0, 2)])
def test_a_route_passes_known_stages_once(route: tuple[int, ...]) -> None:
    with pytest.raises(CapslogError, match=r"microbatch 1 takes the stages .*stages 0 to 1, each once"):
        StageGraph((0, 1), ((0, 1), route))


def test_pipelines_of_unequal_length_run_each_for_itself() -> None:
    rows = to_strings(schedule_of("1f1b", THREE_AND_TWO))
    assert rows[:3] == to_strings(make_schedule("1f1b", 3, 3))
    renamed = [[text.replace("1", "4", 1) if text[0] == "1" else "3" + text[1:] for text in row] for row in
               to_strings(make_schedule("1f1b", 2, 2))]  # fmt: skip
    assert rows[3:] == renamed


def test_replicas_of_one_stage_take_turns_in_the_order_of_microbatches() -> None:
    schedule = schedule_of("1f1b", REPLICATED_MIDDLE)
    validate(schedule, REPLICATED_MIDDLE)
    lowered = lower(schedule, graph=REPLICATED_MIDDLE)
    assert find_deadlock(lowered) is None
    sent = [str(message) for message in lowered.channels[2, 0]]
    assert sent == [
        "the activation of microbatch 1 from stage 2 to stage 3",
        "the gradient of microbatch 0 from stage 2 to stage 0",
    ]


FORK_AND_JOIN = frozenset({(0, 1), (0, 3), (1, 2), (2, 4), (3, 4)})
"""Stage 0 sends to two branches, 1 and 2, and 3, which stage 4 joins."""


def test_the_depth_of_a_fork_is_that_of_its_longer_branch() -> None:
    graph = StageGraph((0, 1, 2, 3, 4), ((0, 1, 2, 3, 4),) * 2, FORK_AND_JOIN)
    assert graph.depths == [4, 3, 2, 2, 1]
    assert graph.upstream[4] == [((2, 0), (3, 0)), ((2, 1), (3, 1))]
    assert graph.downstream[0] == [((1, 0), (3, 0)), ((1, 1), (3, 1))]
    assert sorted(graph.edges) == sorted(FORK_AND_JOIN)
    assert in_flight_microbatches(graph) == graph.depths
    assert graph.lines() == [(0, 1, 2, 4), (0, 3, 4)]
    assert REPLICATED_MIDDLE.lines() == [(0, 1, 3), (0, 2, 3)]


def test_two_towers_of_one_stage_each_are_as_deep_as_one() -> None:
    """GraphPipe, Sec. 3.5: the limits of 1F1B follow the longest way to the loss, not the number of stages."""
    towers = StageGraph((0, 1, 2), ((0, 1, 2),) * 4, frozenset({(0, 2), (1, 2)}))
    rows = to_strings(schedule_of("1f1b", towers))
    assert rows[0][:4] == ["0F0", "0F1", "0B0", "0F2"]
    assert [row[1:] for row in rows[0]] == [row[1:] for row in rows[1]]


def test_a_step_that_nobody_can_list_is_refused_before_it_is_listed() -> None:
    """`simulate --microbatches 1000000000` listed the actions of every microbatch without end."""
    with pytest.raises(CapslogError, match="a pipeline takes 1000000000 microbatches in a step; at most 8192 can be"):
        StageGraph.line(2, 10**9)
    with pytest.raises(
        CapslogError, match="the 8192 microbatches of a step pass 270336 stages together; at most 262144"
    ):
        StageGraph.line(33, 8192)
    with pytest.raises(CapslogError, match="stage 1 takes 8193 microbatches in a step"):
        StageGraph((0, 1), ((0, 1), *((1,),) * 8192))
    with pytest.raises(
        CapslogError, match="the number of microbatches of a step is 1000000000; it must be at most 262"
    ):
        RunShape(10**9)


def test_a_link_that_leads_backwards_is_refused() -> None:
    with pytest.raises(CapslogError, match=r"stage 0 takes what stage 1 makes, but comes before it on the route"):
        StageGraph((0, 1), ((0, 1),), frozenset({(1, 0)}))


def test_a_stage_of_a_larger_grain_waits_for_all_its_microbatches() -> None:
    """Stage 1 takes two microbatches per call, stages 0 and 2 one; the lists are worked out by hand."""
    graph = StageGraph((0, 1, 2), ((0, 1, 2),) * 4, grains=(1, 2, 1))
    assert graph.calls == [[(0,), (1,), (2,), (3,)], [(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)]]
    assert graph.upstream[1] == [((0, 0), (0, 1)), ((0, 2), (0, 3))]
    assert graph.upstream[2] == [((1, 0),), ((1, 0),), ((1, 1),), ((1, 1),)]
    assert in_flight_microbatches(graph) == [6, 4, 1]
    assert to_strings(schedule_of("1f1b", graph))[1] == ["1F0", "1F1", "1B0", "1B1"]


def test_a_grain_divides_the_microbatches_of_its_stage() -> None:
    with pytest.raises(CapslogError, match="stage 1 takes 4 microbatches, 3 per call; choose a grain that divides"):
        StageGraph((0, 1), ((0, 1),) * 4, grains=(1, 3))


def test_a_limit_below_what_a_larger_grain_waits_for_is_refused() -> None:
    graph = StageGraph((0, 1), ((0, 1),) * 4, grains=(1, 4))
    with pytest.raises(CapslogError, match="stage 0 may have 3 calls in flight, which is less than a stage behind it"):
        schedule_of("1f1b", graph, in_flight=[3])
    validate(schedule_of("1f1b", graph, in_flight=[4]), graph, max_in_flight=[4])


@st.composite
def graphs(draw: st.DrawFn) -> StageGraph:
    """Layers in two to four columns; every column has its own stages, each microbatch takes one of each column.

    Half of them have links of their own, and some larger grains, which all powers of two divide evenly.
    """
    columns = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    first = [sum(columns[:place]) for place in range(len(columns))]
    grains: tuple[int, ...] = ()
    size = 1
    if draw(st.booleans()):
        size = 4
        grains = tuple(draw(st.sampled_from([1, 1, 2, 4])) for _ in range(sum(columns)))
    routes = []
    for _ in range(draw(st.integers(1, 6 if size == 1 else 3))):
        kept = draw(st.lists(st.booleans(), min_size=len(columns), max_size=len(columns)))
        places = [place for place in range(len(columns)) if kept[place]] or [0]
        route = tuple(first[place] + draw(st.integers(0, columns[place] - 1)) for place in places)
        routes += [route] * size
    links = None
    if draw(st.booleans()):
        pairs = [(a, b) for a in range(sum(columns)) for b in range(a + 1, sum(columns))]
        links = frozenset(pair for pair in pairs if draw(st.booleans()))
    ranks = draw(st.lists(st.integers(0, 4), min_size=sum(columns), max_size=sum(columns)))
    return StageGraph(tuple(ranks), tuple(routes), links, grains)


def _edges(schedule: Schedule, graph: StageGraph) -> dict[object, set[object]]:
    """Map each action to those it waits for, by the routes alone: the previous one on its rank, and its producers."""
    taken = {stage: [m for m, route in enumerate(graph.routes) if stage in route] for stage in range(len(graph.ranks))}
    edges: dict[object, set[object]] = {}
    for row in schedule:
        before: Action | None = None
        for action in row:
            assert action.microbatch is not None
            edges[action] = set() if before is None else {before}
            grain = graph.grains[action.stage]
            for microbatch in taken[action.stage][action.microbatch * grain : (action.microbatch + 1) * grain]:
                route = graph.routes[microbatch]
                pairs = list(pairwise(route)) if graph.pairs is None else graph.pairs & set(permutations(route, 2))
                wanted = {"F": [a for a, b in pairs if b == action.stage]}
                wanted |= {kind: [b for a, b in pairs if a == action.stage] for kind in "BI"}
                for producer in wanted.get(action.kind, []):
                    call = taken[producer].index(microbatch) // graph.grains[producer]
                    edges[action].add(Action(producer, action.kind, call))
            before = action
    return edges


@settings(max_examples=150, deadline=None)
@given(names, graphs(), st.booleans())
def test_every_graph_has_a_schedule_that_ends(name: str, graph: StageGraph, asked: bool) -> None:
    schedule = schedule_of(name, graph, asked)
    recompute = asked or name in ALWAYS_RECOMPUTE
    validate(schedule, graph, recompute)
    lowered = lower(schedule, graph=graph)
    assert find_deadlock(lowered) is None
    assert not has_cycle(_edges(schedule, graph))  # type: ignore[arg-type]
    stages = len(graph.ranks)
    timeline = simulate(
        schedule, StageSeconds([1.0] * stages, [2.0] * stages, other=halves([2.0] * stages)), graph=graph
    )
    assert not recompute or name == "zb-h1" or max(timeline.max_live_graphs) <= 1
    done = {span.action for row in timeline.actions for span in row if span.action.kind != "R"}
    assert done == {
        Action(stage, kind, call)
        for stage, row in enumerate(graph.microbatches)
        for call in range(len(row) // graph.grains[stage])
        for kind in ("FIW" if name == "zb-h1" else "FB")
    }
    ends = {span.action: span.end_seconds for row in timeline.actions for span in row}
    begins = {span.action: span.start_seconds for row in timeline.actions for span in row}
    for action, needed in _edges(schedule, graph).items():
        assert all(ends[needed_action] <= begins[action] for needed_action in needed)  # type: ignore[index]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["1f1b", "1f1b-star", "interleaved", "varuna", "zb-h1"]), graphs(), st.data())
def test_any_limits_in_flight_are_kept(name: str, graph: StageGraph, data: st.DataObject) -> None:
    limits = data.draw(st.lists(st.none() | st.integers(1, 3), max_size=len(graph.ranks)))
    if max(graph.grains) > 1:  # a limit of at least all that a larger grain waits for
        limits = [None if limit is None else limit + 7 for limit in limits]
    schedule = schedule_of(name, graph, in_flight=limits)
    most = [limits[n] if n < len(limits) else None for n in range(len(graph.ranks))]
    in_flight = [max(1, len(row)) if limit is None else limit for limit, row in zip(most, graph.calls, strict=True)]
    validate(schedule, graph, name in ALWAYS_RECOMPUTE, max_in_flight=in_flight)


def test_groups_of_calls_of_any_sizes_keep_their_limits() -> None:
    """Calls of 2 and of 3 microbatches on the two sides of calls of 1: a group of kfkb with k = 1 is of 6."""
    graph = StageGraph((0, 1, 2), ((0, 1, 2),) * 12, grains=(2, 1, 3))
    validate(schedule_of("kfkb", graph, in_flight=[3, 6, 2], k=1), graph, max_in_flight=[3, 6, 2])
    with pytest.raises(CapslogError, match="stage 1 takes 12 microbatches and may have 5 in flight, but kfkb runs 6"):
        schedule_of("kfkb", graph, in_flight=[3, 5, 2], k=1)


def test_limits_know_the_stages_behind_on_other_routes() -> None:
    """Stages 0 and 1 are both three stages from the loss, each on its own route, yet 0 sends to 1."""
    graph = StageGraph((0, 1, 2, 3), ((1, 2, 3),) * 4 + ((0, 1, 2),) * 4, grains=(1, 1, 2, 1))
    validate(schedule_of("1f1b", graph), graph)
    limits = in_flight_microbatches(graph)
    assert limits[0] > limits[1] > limits[2] > limits[3]


def test_gpipe_keeps_no_limit() -> None:
    """All its forwards come first, so that a smaller limit would wait for ever."""
    with pytest.raises(CapslogError, match="stage 1 takes 3 microbatches and may have 2 in flight, but gpipe"):
        schedule_of("gpipe", REPLICATED_MIDDLE, in_flight=[None, 2])
    assert schedule_of("gpipe", REPLICATED_MIDDLE, in_flight=[4, 3]) == schedule_of("gpipe", REPLICATED_MIDDLE)


def test_an_action_on_another_rank_than_its_stages_is_refused() -> None:
    graph = StageGraph((1, 0), ((0, 1),))
    with pytest.raises(CapslogError, match=r"rank 0, position 0.*0F0 is refused: stage 0 runs on rank 1"):
        validate(make_schedule("gpipe", 2, 1), graph)


def test_a_call_that_the_stage_does_not_have_is_refused() -> None:
    schedule = schedule_of("gpipe", REPLICATED_MIDDLE)
    schedule[2].append(Action(2, "F", 1))
    with pytest.raises(CapslogError, match=r"rank 2.*2F1 is refused: stage 2 takes 1 microbatches"):
        validate(schedule, REPLICATED_MIDDLE)
