"""Moments that another replica keeps: the bits under any layout and optimizer, checkpoints, and refusals."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import cases, models
from tests.engine.layouts import Cuts, random_layout, rectangle, with_shares
from tests.engine.pool import WorkerPool
from tests.equality import assert_same
from tests.sweeps import some
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.recipe import LearningRate, Recipe
from varuna_capslog.engine.replicated import check_shared_updates
from varuna_capslog.planning.verdict import fold_plan
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiling.rehearsal import rehearse_plan
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.choices import load_run_config
from varuna_capslog.start.ordinary import with_choices_of
from varuna_capslog.start.prepare import plan_run, profile_run
from varuna_capslog.training.checkpoint import latest_checkpoint

APART = frozenset(layer for shared in models.build_chain().shared for layer in shared.layers)
"""The layers of the tiny chain that share a head."""
RECIPES = [Recipe(LearningRate(1e-3), "adamw"), Recipe(LearningRate(1e-3), "rmsprop", {"momentum": 0.9}, ema=0.9)]


@functools.cache
def one_rank(pool: WorkerPool, number: int) -> dict[str, Any]:
    options = {"num_blocks": 4, "recipe": RECIPES[number], "clip_norm": 0.5}
    return pool.run(cases.train, 1, Cuts((0,), (0,)), options, 3)[0]


@pytest.mark.parametrize("seed", some([5, 6, 9, 7, 10, 11], 3))
def test_replicas_that_take_updated_values_have_the_bits_of_one_rank(pool: WorkerPool, seed: int) -> None:
    """The values also travel over one group for every ordered pair of ranks, as with NCCL."""
    layout = with_shares(random_layout(seed, 11, 4, 4), seed - 4, APART)
    assert sum(len(stage.moments_elsewhere) for stage in layout.stages) > 4
    options, twist = {"num_blocks": 4, "recipe": RECIPES[seed % 2], "clip_norm": 0.5}, "pair groups"
    results = pool.run(cases.train, layout.world_size, layout, options, 3, torch.float32, twist if seed == 6 else None)
    expected = one_rank(pool, seed % 2)
    for report in results:
        assert (report["parts"], report["norms"]) == (expected["parts"], expected["norms"])
        for kind in ("state", "buffers"):
            assert all(torch.equal(value, expected[kind][name]) for name, value in report[kind].items())


def shared_plan(*moments: tuple[MemoryInterval, ...]) -> Plan:
    """Two replicas of a pipeline of two stages on four ranks."""
    stages = [
        PlanStage(((first, end),), (rank,), blocks, moments=intervals)
        for (first, end, rank, blocks), intervals in zip(
            [(0, 5, 0, (0,)), (5, 11, 1, (0,)), (0, 5, 2, (1,)), (5, 11, 3, (1,))], moments, strict=True
        )
    ]
    return Plan(11, tuple(stages), Units(4, 2, 2), "1f1b", model="tiny")


def of(first: int, end: int, kind: str = "replica") -> MemoryInterval:
    return MemoryInterval(first, end, kind)


SHARED = shared_plan((of(0, 3),), (of(5, 7), of(7, 8, "host")), (of(3, 5),), (of(5, 6, "host"), of(7, 8)))
WHOLE = shared_plan((), (), (), ())


def run_of(pool: WorkerPool, run_dir: Path, plan: Plan | tuple[int, ...], **train: Any) -> dict[str, Any]:
    settings = {"optimizer": "rmsprop", "optimizer_args": {"momentum": 0.9}, "ema": 0.9, "evaluate_every": 3}
    config = cases.run_config(str(run_dir), train=settings | train)
    ranks = plan.num_ranks if isinstance(plan, Plan) else len(plan)
    return pool.run(cases.train_run, ranks, config, plan)[0]


def test_checkpoints_and_scores_do_not_know_who_kept_the_moments(pool: WorkerPool, tmp_path: Path) -> None:
    """Trained half the way under a plan of shares and half without, or the other way round, with averages judged."""
    ways: dict[str, tuple[Plan | tuple[int, ...], Plan | tuple[int, ...]]] = {
        "alone": ((0, 6), (0, 6)),
        "to one pipeline": (SHARED, (0, 6)),
        "to shares": (WHOLE, SHARED),
    }
    records = {}
    for name, (first, then) in ways.items():
        run_of(pool, tmp_path / name, first, max_steps=3)
        assert run_of(pool, tmp_path / name, then)["resumed"] == 3
        checkpoint, _ = latest_checkpoint(tmp_path / name / "checkpoints")
        assert checkpoint is not None
        layers = {layer: checkpoint.layer(layer) for layer in checkpoint.manifest["layers"]}
        rows = [(row["step"], row["loss"]) for row in files.read_jsonl(tmp_path / name / "metrics.jsonl")]
        scores = [row | {"time": 0} for row in files.read_jsonl(tmp_path / name / "evaluations.jsonl")]
        records[name] = layers, rows, [{k: v for k, v in row.items() if k != "generation"} for row in scores]
    layers, *expected = records["alone"]
    assert len(layers) == 11
    for name in ("to one pipeline", "to shares"):
        assert records[name][1:] == tuple(expected)
        assert_same(records[name][0], layers)


@pytest.mark.parametrize("operation", ["500 1", "500 20"])
def test_a_rank_that_is_lost_between_the_vote_and_its_values_is_in_no_checkpoint(
    pool: WorkerPool, tmp_path: Path, operation: str
) -> None:
    """Rank 1 fails in its update, before it hands values on to rank 3; the same command goes on from before."""
    settings: dict[str, Any] = {"optimizer": "rmsprop", "optimizer_args": {"momentum": 0.9}, "checkpoint_every": 2}
    settings["checkpoint_background"] = False  # that of step 2 has its name before step 4 fails
    with pytest.raises(RuntimeError, match="rank 1: RuntimeError: DefaultCPUAllocator"):
        pool.run(
            cases.train_run,
            4,
            cases.run_config(str(tmp_path / "run"), train=settings),
            SHARED,
            None,
            None,
            (4, operation),
        )
    for name, resumed in (("run", 2), ("undisturbed", None)):
        ends = pool.run(cases.train_run, 4, cases.run_config(str(tmp_path / name), train=settings), SHARED)
        assert (ends[3]["resumed"], ends[3]["step"]) == (resumed, 6)
    states = []
    for name in ("run", "undisturbed"):
        checkpoint, _ = latest_checkpoint(tmp_path / name / "checkpoints")
        assert checkpoint is not None
        states.append({layer: checkpoint.layer(layer) for layer in checkpoint.manifest["layers"]})
    assert_same(*states)


def test_some_holder_keeps_the_moments_of_every_layer() -> None:
    with pytest.raises(CapslogError, match=r"stages\[1\].moments leaves those of layer 6 to another replica, but no"):
        shared_plan((), (of(6, 8),), (), (of(5, 7),))
    with pytest.raises(CapslogError, match=r"stages\[0\].moments leaves those of layer 2"):
        Layout((dataclasses.replace(rectangle(0, 11, 0), moments=(of(2, 3),)),))


def test_a_parameter_of_several_layers_is_updated_by_every_rank() -> None:
    layer = min(APART)
    plan = shared_plan((), (), (), (of(layer, layer + 1),))
    with pytest.raises(CapslogError, match=rf"stages\[3\].moments leaves those of layer {layer} to another replica"):
        check_shared_updates(models.build_chain(), Layout(plan.stages, 2))


def test_an_elastic_run_refuses_it_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(SHARED.to_json()))
    overrides = {"run_dir": str(tmp_path / "run"), "pipeline": {"plan": str(tmp_path / "plan.json")}}
    config = cases.run_config(overrides["run_dir"], pipeline=overrides["pipeline"], elastic={"enabled": True})
    (tmp_path / "config.yaml").write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    with pytest.raises(CapslogError, match=r"stages\[0\].moments .* elastic.enabled=false"):
        plan_run(load_run_config(tmp_path / "config.yaml", []), None)


@pytest.mark.parametrize("planner", ["budget", "exact"])
def test_a_run_that_asks_for_it_has_the_same_bits_and_the_bytes_that_were_predicted(
    pool: WorkerPool, tmp_path: Path, planner: str
) -> None:
    """The profile is an estimate; fold and rehearsal of every rank agree on what is spared."""
    trained = {}
    for zero in (0, 1):
        pipeline = {
            "devices": 2,
            "replicas": 2,
            "planner": planner,
            "capacity": "1GiB",
            "schedule": "1f1b",
            "zero": zero,
        }
        run_dir = tmp_path / str(zero)
        train = {"optimizer": "adamw", "checkpoint_every": 6}
        profile = {"source": "estimated", "device": "cpu"}
        config = cases.run_config(str(run_dir), train=train, pipeline=pipeline, profile=profile)
        costs = profile_run(config, show=False)
        plan = plan_run(config, costs)
        assert any(stage.moments_elsewhere for stage in plan.stages) is bool(zero)
        if zero:
            whole = dataclasses.replace(plan, stages=tuple(dataclasses.replace(row, moments=()) for row in plan.stages))
            run = RunShape.of_config(config).settled()
            folds = [[rank.peak_bytes for rank in fold_plan(costs, either, run)] for either in (whole, plan)]
            peaks = [rehearse_plan(config, either) for either in (whole, plan)]
            # states of less than 512 bytes, here 4 of a parameter, are counted as the layer's, not as its moments
            assert np.subtract(*folds) == pytest.approx(np.subtract(*peaks), abs=4 * 40)
            shared = [layer for stage in plan.stages for layer in stage.moments_elsewhere]
            assert len(shared) == len({*shared})
            assert len(shared) > 2
            assert APART.isdisjoint(shared)
        pool.run(cases.train_run, 4, with_choices_of(config, plan), plan)
        checkpoint, _ = latest_checkpoint(run_dir / "checkpoints")
        assert checkpoint is not None
        losses = [row["loss"] for row in files.read_jsonl(run_dir / "metrics.jsonl")]
        trained[zero] = {layer: checkpoint.layer(layer) for layer in checkpoint.manifest["layers"]}, losses
    assert len(trained[0][1]) == 6
    assert trained[0][1] == trained[1][1]
    assert_same(trained[0][0], trained[1][0])


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, "pipeline.zero=1 does not go with pipeline.replicas=1: .* set pipeline.replicas to 2 or more"),
        ({"plan": "plan.json"}, "does not go with pipeline.plan=plan.json: stages"),
        ({"replicas": 2, "elastic": {"enabled": True}}, "does not go with elastic.enabled=true"),
        ({"replicas": 2, "engine": "varuna"}, "does not go with engine=varuna"),
    ],
)
def test_sharing_is_refused_by_name_where_there_is_none(keys: dict[str, Any], sentence: str) -> None:
    sections = {name: keys[name] for name in ("elastic", "engine") if name in keys}
    pipeline = {"zero": 1, **{name: keys[name] for name in ("replicas", "plan") if name in keys}}
    with pytest.raises(ValueError, match=sentence):
        cases.run_config("run", pipeline=pipeline, **sections)
