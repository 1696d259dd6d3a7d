"""Features that no other system has are refused by field name; equal pipelines become one pipeline and a number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planning.export.stage_line import StageLine, stage_line
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units
from varuna_capslog.plans.plan import Plan, stages_of_pipelines


def two(**of_the_second: Any) -> tuple[PlanStage, ...]:
    return PlanStage(((0, 2),), (0,)), replace(PlanStage(((2, 6),), (1,)), **of_the_second)


def test_stages_ranks_and_replicas_are_found() -> None:
    assert stage_line(Plan.of_cuts(6, [0, 2]), "X") == StageLine(((0, 2), (2, 6)), (0, 1), 1)
    looped = Plan(4, stages_of_pipelines(4, [0, 1, 2, 3], 3, 6, [0, 1, 0, 1]), Units(6, 1, 6), "interleaved")
    line = stage_line(looped, "X")
    assert line == StageLine(((0, 1), (1, 2), (2, 3), (3, 4)), (0, 1), 3)
    assert line.stages_per_rank == 2
    other_order = Plan(6, (replace(two()[0], ranks=(5,)), two()[1]), Units(2, 1, 1), "1f1b")
    assert stage_line(other_order, "X").ranks == (5, 1)


@pytest.mark.parametrize(
    ("stages", "more", "said"),
    [
        (two(grain=2), {}, r"stage 1 \(rank 1, layers 2 to 5\) takes 2 units in one call, but in X all stages"),
        (
            two(memory=(MemoryInterval(3, 5, "recompute"),)),
            {},
            r"stage 1 .* has the memory interval \[3, 5, recompute\], which the form for X cannot say",
        ),
        (two(moments=(MemoryInterval(3, 5, "host"),)), {}, "stage 1 .* keeps the optimizer's moments of some layers"),
        (two(ranks=(1, 2), parallel={"kind": "tensor", "degree": 2}), {}, "stage 1 .* is split by tensor"),
        (two(), {"variants": {"3": "fused"}}, "variants of layers, which X does not know"),
        (two(), {"routes": "direct"}, "routes is 'direct', but in X each stage hands on to the next one"),
        (
            (PlanStage(((0, 2), (4, 6)), (0,)), PlanStage(((2, 4),), (1,))),
            {"routes": "direct"},
            "export a plan with routes relay",
        ),
        (
            (*two(blocks=(0,)), PlanStage(((2, 6),), (2,), (1, 2, 3))),
            {},
            "2 ways through its stages that are not equal pipelines on ranks of their own, but X has equal replicas",
        ),
        (
            (PlanStage(((0, 6),), (0,), (0, 1, 2)), PlanStage(((0, 6),), (1,), (3,))),
            {},
            "2 ways through its stages that are not equal",
        ),
        (
            (two()[0], *two(blocks=(0, 1))[1:], PlanStage(((2, 6),), (2,), (2, 3))),
            {},
            "2 ways through its stages that are not equal pipelines on ranks of their own",
        ),
        (
            (
                *(replace(stage, blocks=(0, 1)) for stage in two()),
                PlanStage(((0, 3),), (2,), (2, 3)),
                PlanStage(((3, 6),), (3,), (2, 3)),
            ),
            {},
            "2 ways through its stages that are not equal",
        ),
        (
            (
                *(replace(stage, blocks=(0, 1)) for stage in two()),
                PlanStage(((0, 2),), (2,), (2, 3)),
                PlanStage(((2, 6),), (3,), (2, 3), memory=None),
            ),
            {},
            "whose replicas have the same cuts, shares and memory",
        ),
        (
            (*two(), PlanStage(((6, 7),), (0,))),
            {"num_layers": 7},
            r"the stages run on the ranks \[0, 1, 0\], but X deals them out in turn",
        ),
        (
            tuple(PlanStage(((n, n + 1),), (rank,)) for n, rank in enumerate((0, 1, 1, 0))),
            {"num_layers": 4},
            r"the stages run on the ranks \[0, 1, 1, 0\], but X deals them out in turn",
        ),
    ],
)  # fmt: skip
def test_what_other_systems_do_not_have_is_refused(stages: Any, more: dict[str, Any], said: str) -> None:
    plan = Plan(more.pop("num_layers", 6), tuple(stages), Units(8, 1, 4), "1f1b", **more)
    with pytest.raises(CapslogError, match=said):
        stage_line(plan, "X")


def test_several_stages_on_a_rank_are_refused_where_there_is_one() -> None:
    plan = Plan(4, stages_of_pipelines(4, [0, 1, 2, 3], 1, 1, [0, 1, 0, 1]), Units(2, 1, 1), "interleaved")
    with pytest.raises(CapslogError, match="each rank runs 2 stages, but X has one stage per rank"):
        stage_line(plan, "X", one_stage_per_rank=True)
