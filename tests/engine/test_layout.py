"""Plans in the engine: the plan's layout, or one sentence that names the field that the engine cannot run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.engine.layouts import random_layout, rectangle
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config, section
from varuna_capslog.engine.layout import Layout, layout_of
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units
from varuna_capslog.plans.plan import Plan


def config_of(blocks: int | None = None, **pipeline: Any) -> Config:
    train = {"minibatch_size": 8, "microbatch_size": 2, "accumulation_blocks": blocks}
    return section(Config, {"workload": "a.b:c", "train": train, "pipeline": pipeline}, "")


def full(*stages: PlanStage, units: Units | None = None, **more: Any) -> Plan:
    return Plan(3, stages, units or Units(4, 2, 2), "varuna", **more)


FIRST, SECOND = PlanStage(((0, 1),), (1,), memory=None), PlanStage(((1, 3),), (0,), memory=None)


def test_a_short_plan_is_one_pipeline_in_the_replicas_of_the_config() -> None:
    layout = layout_of(Plan.of_cuts(3, (0, 1)), config_of(2, replicas=2))
    assert layout == Layout(
        (rectangle(0, 1, 0, (0,)), rectangle(1, 3, 1, (0,)), rectangle(0, 1, 2, (1,)), rectangle(1, 3, 3, (1,))), 2, 2
    )
    assert (layout.cuts, layout.devices, layout.world_size, layout.first_replica) == ((0, 1), 2, 4, (0, 1))
    assert layout.describe(3) == "rank 3 (stage 1, replica 1)"


def test_a_full_plan_is_taken_as_it_is() -> None:
    layout = layout_of(full(FIRST, SECOND), config_of(2))
    assert layout == Layout((rectangle(0, 1, 1), rectangle(1, 3, 0)), 2)
    assert layout.describe(1) == "rank 1 (stage 0)"
    shared = full(
        dataclasses.replace(FIRST, blocks=(0,), in_flight=1),
        dataclasses.replace(FIRST, ranks=(2,), blocks=(1,)),
        SECOND,
    )
    layout = layout_of(shared, config_of(2))
    assert layout.ways == [(0, 2), (1, 2)]
    assert layout.stages[0] == rectangle(0, 1, 1, (0,), 1)
    assert layout.graph(4).routes == ((0, 2), (0, 2), (1, 2), (1, 2))
    assert (layout.holders(0), layout.holders(2), layout.reporter(0)) == ([1, 2], [0], 1)
    assert layout.microbatches_of(2, 0, 4) == [2, 3]


@pytest.mark.parametrize("memory", [(), (MemoryInterval(1, 2, "recompute"), MemoryInterval(2, 3, "offload"))])
def test_memory_intervals_are_the_plans_whatever_the_config_says(memory: tuple[MemoryInterval, ...]) -> None:
    second = dataclasses.replace(SECOND, memory=memory, bytes=7, seconds=0.5)
    layout = layout_of(full(FIRST, second), config_of(2))
    assert [stage.memory for stage in layout.stages] == [None, memory]
    assert layout.stages[1] == dataclasses.replace(SECOND, memory=memory)  # predictions are not what a stage does


def test_stages_of_several_pieces_are_ordered_by_what_they_read() -> None:
    """Example by hand: layers 0 and 2 make one branch, layer 1 another, and layer 3 joins them."""
    stages = PlanStage(((1, 2),), (1,)), PlanStage(((3, 4),), (0,)), PlanStage(((0, 1), (2, 3)), (2,))
    layout = layout_of(Plan(4, stages, Units(4, 2, 2), "varuna", routes="direct"), config_of(2))
    graph = layout.graph(4, ((0, 2), (1, 3), (2, 3)))
    assert graph.routes == ((2, 0, 1),) * 4
    assert sorted(graph.edges) == [(0, 1), (2, 1)]
    assert (layout.layers_of(2), layout.owner(2, 0), layout.holders(2)) == ([0, 2], 2, [2])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        # A size of its own and another schedule were once dropped without a word, and another plan was trained.
        (full(FIRST, SECOND, variants={"1": "sdpa"}), r"variants is \{'1': 'sdpa'\}"),
        (
            full(dataclasses.replace(FIRST, ranks=(1, 2), parallel={"kind": "tensor", "degree": 2}), SECOND),
            r"stages\[0\]\.parallel is \{'kind': 'tensor', 'degree': 2\}",
        ),
        (Plan.of_cuts(3, (0, 1), microbatch_size=1), "units.samples is 1 in the plan, but the config makes it 2"),
        (full(FIRST, SECOND, units=Units(8, 2, 2)), "units.per_step is 8 in the plan, but the config makes it 4"),
        (full(FIRST, SECOND, units=Units(4, 2, 4)), r"units.blocks is 4 .*set train.accumulation_blocks=4"),
        (Plan.of_cuts(3, (0, 1), schedule="gpipe"), "schedule is 'gpipe' in the plan, but pipeline.schedule is 'varu"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_by_the_name_of_its_field(plan: Plan, message: str) -> None:
    with pytest.raises(CapslogError, match=message):
        layout_of(plan, config_of(2, planner="exact"))


def test_a_plan_with_its_own_actions_names_its_schedule_as_it_likes() -> None:
    stages = (PlanStage(((0, 1),), (0,), memory=None), PlanStage(((1, 3),), (1,), memory=None))
    actions = tuple(tuple(f"{stage}{kind}{call}" for kind in "FB" for call in range(4)) for stage in range(2))
    plan = dataclasses.replace(full(*stages), schedule="by hand", actions=actions)
    assert layout_of(plan, config_of(2)).cuts == (0, 1)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((rectangle(0, 1, 0), rectangle(2, 3, 1)), "no stage holds layer 1; each layer must be in exactly one stage"),
        (
            (rectangle(0, 3, 0, (0,)), rectangle(0, 3, 1)),
            "stages 0 .rank 0, layers 0 to 2. and 1 .* both hold layer 0 for block 0",
        ),
        (
            (rectangle(0, 3, 0, (0,)), rectangle(0, 3, 0, (1,))),
            r"stages 0 \(.*\) and 1 \(.*\) hold layer 0 twice on one rank",
        ),
    ],
)
def test_a_layout_holds_every_layer_once(stages: tuple[PlanStage, ...], message: str) -> None:
    with pytest.raises(CapslogError, match=message):
        Layout(stages, 2)


@pytest.mark.parametrize("seed", range(30))
def test_owners_of_random_layouts(seed: int) -> None:
    """Every layer of every block has one owner; a rank without a use of a shared parameter asks a rank that has one."""
    layout = random_layout(seed, 6, 4, 5)
    for layer in range(6):
        owners = [layout.owner(layer, block) for block in range(4)]
        assert layout.holders(layer) == list(dict.fromkeys(owners))
        for rank in range(layout.world_size):
            assert layout.blocks_of(rank, layer) == [block for block in range(4) if owners[block] == rank]
            assert (layer in layout.layers_of(rank)) == (rank in owners)
    for rank, sources in layout.uses_from((1, 4, 5)).items():
        assert set(sources) == {1, 4, 5} - set(layout.layers_of(rank))
        assert all(layer in layout.layers_of(peer) for layer, peer in sources.items())
