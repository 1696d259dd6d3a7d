"""A valid schedule passes, and every small error is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedules.cases import names, parse_csv, scrambled, shapes
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules import ALWAYS_RECOMPUTE, Action, Schedule, StageGraph, make_schedule, validate


def check(text: str, num_stages: int, num_microbatches: int, recompute: bool = False) -> None:
    schedule = parse_csv(text)
    ranks = {action.stage: rank for rank, row in reversed(list(enumerate(schedule))) for action in row}
    graph = StageGraph.line(num_stages, num_microbatches, [ranks.get(stage, 0) for stage in range(num_stages)])
    validate(schedule, graph, recompute)


def test_a_stage_keeps_its_limit_in_flight() -> None:
    with pytest.raises(CapslogError, match="1 microbatches are in flight on the stage and the limit is 1"):
        validate(parse_csv("0F0,0F1,0B0,0B1"), StageGraph.line(1, 2), max_in_flight=[1])
    validate(parse_csv("0F0,0B0,0F1,0B1"), StageGraph.line(1, 2), max_in_flight=[1])


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0F1,0I0,0W0,0B1,0U",
        "0F0,0F1,0I0,0I1,0W0,0W1,0U",
        "0F0,0O0,0F1,0L0,0B0,0B1",
        "0F0,0F1,0B0,0B1",
    ],
)
def test_every_kind_is_known(text: str) -> None:
    check(text, 1, 2)


@pytest.mark.parametrize(
    ("text", "num_stages", "recompute", "message"),
    [
        ("0F0,0F1,0B0", 1, False, "rank 0, stage 0, at the end of its list: missing 0B1"),
        ("0F0,0B0", 1, False, "missing 0F1"),
        ("0F0,0F1,0I0,0W0,0I1", 1, False, "missing 0W1"),
        ("0F0,0F0,0F1,0B0,0B1", 1, False, "rank 0, position 1, stage 0, microbatch 0: 0F0 is refused: duplicate"),
        (
            "0F0,0B1,0F1,0B0",
            1,
            False,
            "position 1, stage 0, microbatch 1: 0B1 is refused: backward before the forward 0F1",
        ),
        ("0F0,0F1,0B1,0B0", 1, False, "position 2.*backward out of microbatch order, the next one is 0B0"),
        ("0F1,0F0,0B0,0B1", 1, False, "position 0.*forward out of microbatch order"),
        ("0F0,0F1,0I0,0I1,0W1,0W0", 1, False, "position 4.*out of microbatch order, the next one is 0W0"),
        ("0F0,0F1,0I0,0B1,0W0", 1, False, "position 3.*out of microbatch order"),
        ("0F0,0F1,0W0,0I0,0B1", 1, False, "weight half before the input half 0I0"),
        ("0F0,0F1,0I0,0B0,0B1", 1, False, "backward after the backward of microbatch 0"),
        ("0F0,0F1,0B0,0W0,0B1", 1, False, "weight half"),
        ("0R0,0F0,0F1,0B0,0B1", 1, True, "position 0.*recompute before the forward 0F0"),
        ("0F0,0F1,0R0,0B0,0B1", 1, True, "position 4.*missing 0R1.*0B0 came between"),
        ("0F0,0F1,0B0,0R0,0R1,0B1", 1, True, "backward before its recompute 0R0"),
        ("0F0,0F1,0R0,0B0,0R1,0B1", 1, False, "position 2.*without recomputation"),
        ("0F0,0R0,0R0,0B0,0F1,0B1", 1, True, "position 2.*duplicate"),
        ("0F0,0U,0F1,0B0,0B1", 1, False, "position 1, stage 0: 0U is refused: U before the last backward"),
        ("0F0,0F1,0B0,0B1,0U,0U", 1, False, "duplicate"),
        ("0O0,0F0,0L0,0F1,0B0,0B1", 1, False, "offload before the forward"),
        ("0F0,0L0,0F1,0B0,0B1", 1, False, "load without the offload 0O0"),
        ("0F0,0O0,0F1,0B0,0B1", 1, False, "backward before 0L0"),
        ("0F0,0F1,0B0,0O0,0B1", 1, False, "offload after the backward"),
        ("0F0,0F1,0F2,0B0,0B1,0B2", 1, False, "position 2.*1 stages and 2 microbatches"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1", 1, False, "rank 1, position 0.*1 stages"),
        ("0F0,0F1,0B0,0B1", 2, False, "stage 1 has no action"),
        ("0F0,0F1,0B0\n1F0,1F1,1B0,1B1,0B1", 2, False, "rank 1, position 4, .*0B1 is refused: stage 0 runs on rank 0"),
        ("1F0,0F0,0F1,1F1,1B0,1B1,0B0,0B1", 2, False, "position 0.*forward before 0F0"),
        ("0F0,0F1,1F0,1F1,0B0,1B0,1B1,0B1", 2, False, "position 4.*backward before 1B0"),
    ],
)
def test_wrong_lists_are_refused_by_name(text: str, num_stages: int, recompute: bool, message: str) -> None:
    with pytest.raises(CapslogError, match=message):
        check(text, num_stages, 2, recompute)


def test_graphs_may_be_recomputed_ahead() -> None:
    check("0F0,0R0,0B0,0F1,0B1", 1, 2, True)
    check("0F0,0F1,0R0,0R1,0B0,0B1", 1, 2, True)


@settings(max_examples=60, deadline=None)
@given(shapes(max_stages=5, max_microbatches=6), st.integers(0, 10**6))
def test_any_order_that_respects_each_rank_passes(shape: tuple[int, int, list[int]], seed: int) -> None:
    num_stages, num_microbatches, placement = shape
    graph = StageGraph.line(num_stages, num_microbatches, placement)
    validate(scrambled(num_stages, num_microbatches, placement, seed), graph)


def _mutants(schedule: Schedule, rank: int, position: int) -> list[Schedule]:
    """The schedule with one action dropped, run twice, moved to another rank, or swapped with one it must not pass."""
    actions = schedule[rank]
    action = actions[position]

    def with_rank(row: list[Action]) -> Schedule:
        return [*schedule[:rank], row, *schedule[rank + 1 :]]

    dropped = with_rank(actions[:position] + actions[position + 1 :])
    mutants = [
        dropped,
        with_rank(actions[: position + 1] + actions[position:]),
        with_rank([*actions, action]),
        [*dropped, [action]],
    ]
    for later in range(position + 1, len(actions)):
        same_stage = actions[later].stage == action.stage
        if same_stage and (actions[later].kind == action.kind or actions[later].microbatch == action.microbatch):
            row = list(actions)
            row[position], row[later] = row[later], row[position]
            mutants.append(with_rank(row))
    return mutants


@settings(max_examples=80, deadline=None)
@given(names, shapes(), st.booleans(), st.data())
def test_every_mutation_is_refused(
    name: str, shape: tuple[int, int, list[int]], asked: bool, data: st.DataObject
) -> None:
    num_stages, num_microbatches, placement = shape
    recompute = asked or name in ALWAYS_RECOMPUTE
    schedule = make_schedule(name, num_stages, num_microbatches, placement, asked)
    graph = StageGraph.line(num_stages, num_microbatches, placement)
    rank = data.draw(st.integers(0, len(schedule) - 1))
    position = data.draw(st.integers(0, len(schedule[rank]) - 1))
    for mutant in _mutants(schedule, rank, position):
        with pytest.raises(CapslogError):
            validate(mutant, graph, recompute)
