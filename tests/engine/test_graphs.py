"""Models whose layers form branches: direct routes, and stages of several pieces of the chain, change no bit."""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import cases, models
from tests.engine.compare import differences, gradient_error, merged
from tests.engine.layouts import Cuts, random_layout, with_intervals
from tests.engine.pool import WorkerPool
from varuna_capslog.config.reading import load_config
from varuna_capslog.engine.layout import GradientKey, Gradients, Layout, layout_of, ports_of
from varuna_capslog.model.chain import Value
from varuna_capslog.model.splitting.chains import part_number
from varuna_capslog.planners.replicas import ReplicatedStage
from varuna_capslog.planning.placed.replicated import plan_of_stages
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.planning.verdict import fold_plan
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiling.rehearsal import rehearse_plan
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.ordinary import with_choices_of
from varuna_capslog.start.prepare import profile_run

TOWERS = Layout(
    (
        PlanStage(((0, 2),), (0,), memory=None),
        PlanStage(((2, 4),), (1,), memory=None),
        PlanStage(((4, 7),), (2,), memory=None),
        PlanStage(((7, 8),), (3,), memory=None),
    ),
    2,
    direct=True,
)
CROSSED = Layout(
    (
        PlanStage(((0, 1), (4, 5)), (0,), memory=None),
        PlanStage(((1, 3), (5, 6)), (1,), memory=None),
        PlanStage(((3, 4), (6, 8)), (2,), memory=None),
    ),
    2,
    direct=True,
)
"""Every stage holds parts of both towers."""


@functools.cache
def alone(pool: WorkerPool, name: str, blocks: int) -> dict[str, Any]:
    """Train on one rank and one stage, which keeps everything."""
    options = {"schedule": "1f1b", "recompute": False, "num_blocks": blocks}
    return pool.run(cases.train, 1, Cuts((0,), (0,)), options, 2, torch.float32, None, None, name)[0]


def check(pool: WorkerPool, name: str, layout: Layout, **options: Any) -> list[dict[str, Any]]:
    """Runs two steps and compares every bit."""
    settings = options | {"num_blocks": layout.num_blocks}
    results = pool.run(cases.train, layout.world_size, layout, settings, 2, torch.float32, None, None, name)
    assert not differences(results, alone(pool, name, layout.num_blocks))
    return results


@pytest.mark.parametrize("name", models.GRAPHS)
def test_one_stage_is_the_plain_model(pool: WorkerPool, name: str) -> None:
    graph = models.GRAPHS[name]
    chain = graph.build_chain()
    minibatch, inputs = graph.make_minibatch(4, 1)
    models.plain_step(chain, minibatch, inputs, seed=7, step=1, loss=graph.loss)
    gradients = {key: p.grad for key, p in chain.named_parameters().items() if p.grad is not None}
    error, worst = gradient_error(alone(pool, name, 2)["gradients"], gradients)
    assert error <= 1e-5, f"{worst}: {error:.2e}"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "kfkb", "zb-h1", "varuna"])
@pytest.mark.parametrize("layout", [TOWERS, CROSSED])
def test_stages_of_towers_give_the_bits_of_one_rank(pool: WorkerPool, layout: Layout, schedule: str) -> None:
    check(pool, "towers", layout, schedule=schedule, recompute=schedule == "varuna")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", models.GRAPHS)
def test_any_stages_of_a_graph_give_the_bits_of_one_rank(pool: WorkerPool, name: str, seed: int) -> None:
    chain, dice = models.GRAPHS[name].build_chain(), random.Random(seed)
    layout = with_intervals(random_layout(seed, len(chain), 2, 5, chain.edges), seed)
    check(pool, name, layout, schedule=dice.choice(["1f1b", "1f1b-star", "zb-h1", "varuna"]))


def test_parts_of_captured_layers_give_the_bits_of_one_rank(pool: WorkerPool) -> None:
    """Two ranks train a GPT-2, each with some of the parts of attention and of the columns."""
    edges = (0, 3, 4, 6, 7, 11, 13, 16, 18, 20)
    stages = (PlanStage((span,), (at % 2,), memory=None) for at, span in enumerate(itertools.pairwise(edges)))
    check(pool, "split, captured", Layout(tuple(stages), 2, direct=True), schedule="1f1b")


def test_a_plan_of_budget_with_branches_replicas_and_intervals_gives_the_bits_of_one_rank(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """The bytes of the fold are also those of each rank's own program."""
    text = "workload: tests.engine.workload:workload\ntrain: {minibatch_size: 8, microbatch_size: 2}\n"
    (tmp_path / "config.yaml").write_text(text)
    words = ["device=cpu", "model.graph=towers", "profile.source=estimated", "train.accumulation_blocks=4"]
    words += ["pipeline.devices=4", "pipeline.capacity=20KiB"]
    config = load_config(tmp_path / "config.yaml", words)
    profile = profile_run(config, show=False)
    keys = config.pipeline.model_copy(update={"bandwidth": 10**9})
    config = config.model_copy(update={"pipeline": keys})
    plan = solve(Problem.of_config(config, profile), "budget", weighs_others=False)
    assert (plan.planner, plan.routes, plan.fits) == ("budget", "direct", True)
    assert any(stage.memory for stage in plan.stages)
    assert any(stage.blocks is not None for stage in plan.stages)
    assert any(len(stage.layers) > 1 for stage in plan.stages)
    settled = with_choices_of(config, plan)
    folds = fold_plan(profile, plan, RunShape.of_config(settled))
    assert [fold.peak_bytes for fold in folds] == pytest.approx(rehearse_plan(settled, plan), rel=0.01)
    check(pool, "towers", layout_of(plan, settled), schedule="1f1b", actions=plan.actions)


def test_devices_that_share_the_parts_of_split_layers_give_the_bits_of_one_rank(pool: WorkerPool) -> None:
    """As planner `capture` places them: the first device has all other layers, too."""
    chain = models.SPLIT["split, captured"].build_chain()
    devices = tuple(part_number(layer) for layer in chain.layers)
    units = Units(4, 2, 2)
    frame = Plan(len(chain), (PlanStage(((0, len(chain)),), (0,)),), units, "1f1b", routes="direct")
    plan = plan_of_stages(frame, [ReplicatedStage(tuple(range(len(chain))), 1, devices)], 2, chain.edges)
    assert len(plan.stages) == 1 + sum(a != b for a, b in itertools.pairwise(devices)) > 4
    check(pool, "split, captured", Layout(plan.stages, 2, direct=True), schedule="1f1b", actions=plan.actions)


def test_a_parameter_that_the_loss_does_not_reach_has_no_gradient(pool: WorkerPool) -> None:
    """With a gradient of zeros, weight decay would change it where a cut lies between it and the loss."""
    chain = models.GRAPHS["dead ends"].build_chain()
    for direct in (False, True):
        spans = [(n, n + 1) for n in range(len(chain))]
        layout = Layout(
            tuple(PlanStage((span,), (n % 3,), memory=None) for n, span in enumerate(spans)), 2, direct=direct
        )
        gradients = merged(check(pool, "dead ends", layout, schedule="1f1b"), "gradients")
        assert {name.rsplit(".", 1)[0] for name in gradients} == {"stem", "gated", "head.linear"}


def test_a_value_with_many_readers_travels_once_and_its_gradients_one_by_one() -> None:
    """Example by hand: layer 1 reads the encoder's output on another stage twice, layers 2 and 4."""
    chain = models.GRAPHS["translation"].build_chain()
    many = max(chain.readers, key=lambda value: len(chain.readers[value]))
    writer, readers = many.writer, chain.readers[many]
    assert len(readers) > 2
    ports = ports_of(chain, [layer for layer in range(len(chain)) if layer > writer], direct=True)
    assert ports.enters.count(many) == 1
    assert [reader for value, reader in ports.wanted if value == many] == list(readers)


def test_gradients_are_added_from_the_last_reader_to_the_first_wherever_they_come_from() -> None:
    """Three numbers whose sum depends on the order: 1e8 + 1 is 1e8 in float32."""
    value = Value("x", 0)
    parts = {1: torch.tensor(1.0), 2: torch.tensor(-1e8), 3: torch.tensor(1e8)}
    for local in ((), (1,), (2,), (3,), (1, 3), (1, 2, 3)):
        arrived: dict[GradientKey, torch.Tensor] = {
            (value, reader): part for reader, part in parts.items() if reader not in local
        }
        sums = Gradients(arrived)
        for reader in sorted(local, reverse=True):
            sums.add(value, reader, parts[reader])
        assert not arrived
        assert float(sums.take(value)) == 1.0  # type: ignore[arg-type]
