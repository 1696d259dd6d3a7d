"""Routes of microbatches through stages: who hands on to whom, and schedules over pipelines that are not equal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedules.cases import halves, has_cycle, names
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules import (
    ALWAYS_RECOMPUTE,
    Action,
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

THREE_AND_TWO = StageGraph((0, 1, 2, 3, 4), ((0, 1, 2), (3, 4), (0, 1, 2), (3, 4), (0, 1, 2)))
"""Two pipelines of unequal length on five ranks; the longer one takes three of the five microbatches."""
REPLICATED_MIDDLE = StageGraph((0, 1, 2, 0), ((0, 1, 3), (0, 2, 3), (0, 1, 3), (0, 1, 3)))
"""The middle stage twice, with unequal shares; the first and the last stage share rank 0."""


def test_neighbours_are_named_by_their_own_calls() -> None:
    graph = REPLICATED_MIDDLE
    assert graph.microbatches == [[0, 1, 2, 3], [0, 2, 3], [1], [0, 1, 2, 3]]
    assert graph.downstream == [
        [(1, 0), (2, 0), (1, 1), (1, 2)],
        [(3, 0), (3, 2), (3, 3)],
        [(3, 1)],
        [None] * 4,
    ]
    assert graph.upstream[0] == [None] * 4
    assert graph.upstream[3] == [(1, 0), (2, 0), (1, 1), (1, 2)]
    assert graph.depths == [3, 2, 2, 1]
    assert THREE_AND_TWO.depths == [3, 2, 1, 2, 1]
    assert sorted(graph.edges()) == [(0, 1), (0, 2), (1, 3), (2, 3)]


@pytest.mark.parametrize("route", [(), (0, 0), (0, 2)])
def test_a_route_passes_known_stages_once(route: tuple[int, ...]) -> None:
    with pytest.raises(CapslogError, match=r"microbatch 1 takes the stages .*stages 0 to 1, each once"):
        StageGraph((0, 1), ((0, 1), route))


def test_pipelines_of_unequal_length_run_each_for_itself() -> None:
    found = to_strings(schedule_of("1f1b", THREE_AND_TWO))
    assert found[:3] == to_strings(make_schedule("1f1b", 3, 3))
    renamed = [[text.replace("1", "4", 1) if text[0] == "1" else "3" + text[1:] for text in row] for row in
               to_strings(make_schedule("1f1b", 2, 2))]  # fmt: skip
    assert found[3:] == renamed


def test_replicas_of_one_stage_take_turns_in_the_order_of_microbatches() -> None:
    schedule = schedule_of("1f1b", REPLICATED_MIDDLE)
    validate(schedule, REPLICATED_MIDDLE)
    lowered = lower(schedule, graph=REPLICATED_MIDDLE)
    assert find_deadlock(lowered) is None
    sent = [str(message) for message in lowered.channels[2, 0]]
    assert sent == [
        "the activation of microbatch 1 across the cut before stage 3",
        "the gradient of microbatch 0 across the cut before stage 2",
    ]


@st.composite
def graphs(draw: st.DrawFn) -> StageGraph:
    """Layers in two to four columns; every column has its own stages, each microbatch takes one of each column."""
    columns = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    first = [sum(columns[:place]) for place in range(len(columns))]
    count = draw(st.integers(1, 6))
    routes = []
    for _ in range(count):
        kept = draw(st.lists(st.booleans(), min_size=len(columns), max_size=len(columns)))
        places = [place for place in range(len(columns)) if kept[place]] or [0]
        routes.append(tuple(first[place] + draw(st.integers(0, columns[place] - 1)) for place in places))
    ranks = draw(st.lists(st.integers(0, 4), min_size=sum(columns), max_size=sum(columns)))
    return StageGraph(tuple(ranks), tuple(routes))


def _edges(schedule: Schedule, graph: StageGraph) -> dict[object, set[object]]:
    """What each action waits for, from the routes alone: the action before it on its rank, and who makes its input."""
    taken = {stage: [m for m, route in enumerate(graph.routes) if stage in route] for stage in range(len(graph.ranks))}
    edges: dict[object, set[object]] = {}
    for row in schedule:
        before: Action | None = None
        for action in row:
            assert action.microbatch is not None
            microbatch = taken[action.stage][action.microbatch]
            route = graph.routes[microbatch]
            place = (
                route.index(action.stage) + {"F": -1, "B": 1, "I": 1, "R": -len(route), "W": -len(route)}[action.kind]
            )
            edges[action] = set() if before is None else {before}
            if 0 <= place < len(route):
                edges[action].add(Action(route[place], action.kind, taken[route[place]].index(microbatch)))
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
    done = {one.action for row in timeline.actions for one in row if one.action.kind != "R"}
    assert done == {
        Action(stage, kind, call)
        for stage, row in enumerate(graph.microbatches)
        for call in range(len(row))
        for kind in ("FIW" if name == "zb-h1" else "FB")
    }
    ends = {one.action: one.end_seconds for row in timeline.actions for one in row}
    begins = {one.action: one.start_seconds for row in timeline.actions for one in row}
    for action, needed in _edges(schedule, graph).items():
        assert all(ends[one] <= begins[action] for one in needed)  # type: ignore[index]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["1f1b", "1f1b-star", "interleaved", "varuna", "zb-h1"]), graphs(), st.data())
def test_any_limits_in_flight_are_kept(name: str, graph: StageGraph, data: st.DataObject) -> None:
    limits = data.draw(st.lists(st.none() | st.integers(1, 3), max_size=len(graph.ranks)))
    schedule = schedule_of(name, graph, in_flight=limits)
    most = [limits[n] if n < len(limits) else None for n in range(len(graph.ranks))]
    known = [max(1, len(row)) if limit is None else limit for limit, row in zip(most, graph.microbatches, strict=True)]
    validate(schedule, graph, name in ALWAYS_RECOMPUTE, max_in_flight=known)


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
