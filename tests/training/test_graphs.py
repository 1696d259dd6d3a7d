"""Runs of a model with branches: stages of several pieces of the chain, between which tensors go straight."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.engine import cases
from tests.engine.models import GRAPHS
from tests.engine.pool import WorkerPool
from tests.equality import assert_same
from tests.training.test_run import losses
from varuna_capslog.base import files
from varuna_capslog.planners.replicas.capture import capture_stages
from varuna_capslog.planners.replicas.costs import GraphCosts, ReplicatedStage
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.placed.replicated import plan_of_stages
from varuna_capslog.plans.plan import Plan
from varuna_capslog.training.checkpoint import open_checkpoint

RELAY: dict[str, Any] = {
    "format": "varuna-capslog/plan/2",
    "num_layers": 8,
    "schedule": "varuna",
    "units": {"per_step": 4, "samples": 2, "blocks": 2},
    "stages": [
        {"layers": [[0, 3]], "ranks": [1], "memory": None},
        {"layers": [[3, 8]], "ranks": [0], "memory": [[3, 5, "recompute"]]},
    ],
}
CROSSED: dict[str, Any] = RELAY | {
    "routes": "direct",
    "stages": [
        {"layers": [[0, 1], [4, 5]], "ranks": [0], "memory": [[0, 1, "recompute"]]},
        {"layers": [[1, 3], [5, 6]], "ranks": [1], "memory": None},
        {"layers": [[3, 4], [6, 8]], "ranks": [2], "blocks": [0]},
        {"layers": [[3, 4], [6, 8]], "ranks": [1], "blocks": [1], "memory": [[7, 8, "recompute"]]},
    ],
}
"""Every stage holds parts of both towers; the last one has two replicas, one of them on a rank of another stage."""
BOTH_STEMS: dict[str, Any] = RELAY | {
    "routes": "direct",
    "stages": [
        {"layers": [[0, 1]], "ranks": [0]},
        {"layers": [[4, 5]], "ranks": [0]},
        {"layers": [[1, 4], [7, 8]], "ranks": [0]},
        {"layers": [[5, 7]], "ranks": [1]},
    ],
}
"""Two stages of one rank take inputs of the chain."""


def train(pool: WorkerPool, run_dir: Path, plan: dict[str, Any], **options: Any) -> dict[str, Any]:
    settings = {"max_steps": 4, "evaluate_every": 2, "checkpoint_every": 2} | options.pop("train", {})
    config = cases.run_config(str(run_dir), model={"graph": "towers"}, train=settings)
    made = Plan.from_json(plan)
    return pool.run(cases.train_run, made.num_ranks, config, made, options.get("stop_after"))[0]


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps on one rank, which keeps everything."""
    run_dir = tmp_path_factory.mktemp("alone")
    plan = RELAY | {"stages": [{"layers": [[0, 8]], "ranks": [0]}]}
    assert train(pool, run_dir, plan, train={"max_steps": 6})["step"] == 6
    return run_dir


@pytest.mark.parametrize("plan", [CROSSED, BOTH_STEMS], ids=["crossed", "both stems"])
def test_direct_plans_train_evaluate_and_go_on_as_one_stage_does(
    pool: WorkerPool, alone: Path, tmp_path: Path, plan: dict[str, Any]
) -> None:
    """Four steps under a direct plan, then two under one of relays: losses, norms, scores and state to the last bit."""
    assert train(pool, tmp_path, plan)["step"] == 4
    end = train(pool, tmp_path, RELAY, train={"max_steps": 6})
    assert (end["resumed"], end["step"]) == (4, 6)
    assert losses(tmp_path) == losses(alone)
    rows = [files.read_jsonl(folder / "evaluations.jsonl") for folder in (tmp_path, alone)]
    scores = [{row["step"]: row["scores"] for row in part} for part in rows]
    assert scores[0] == scores[1]
    assert sorted(scores[0]) == [2, 4, 6]
    direct, single = (open_checkpoint(folder / "checkpoints" / "step-00000006") for folder in (tmp_path, alone))
    for name in single.manifest["layers"]:
        assert_same(direct.layer(name), single.layer(name))


def test_a_run_of_relays_goes_on_under_a_direct_plan(pool: WorkerPool, alone: Path, tmp_path: Path) -> None:
    assert train(pool, tmp_path, RELAY, stop_after=2)["step"] == 2
    assert train(pool, tmp_path, CROSSED, train={"max_steps": 6})["resumed"] == 2
    assert losses(tmp_path) == losses(alone)


def test_stages_with_replicas_in_the_lists_that_planners_give_them_train_as_one_rank(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    """Two replicas of the second half of a tower; the stages before them run ahead as far as their lists say."""
    frame = Plan.from_json(RELAY | {"routes": "direct", "schedule": "1f1b"})
    parts = [ReplicatedStage((0, 1)), ReplicatedStage((2, 3), 2), ReplicatedStage((4, 5, 6, 7))]
    made = plan_of_stages(frame, parts, 2, GRAPHS["towers"].build_chain().edges)
    assert made.actions is not None
    train(pool, tmp_path, made.to_json(), train={"max_steps": 6})
    assert losses(tmp_path) == losses(alone)


def test_stages_that_capture_places_on_two_nodes_train_as_one_rank(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    """The first layer holds the most: it has a node of two devices, the others a device each."""
    saved = (90, 1, 1, 1, 1, 1, 1, 1)
    costs = GraphCosts((1.0,) * 8, (1,) * 8, saved, (1,) * 8, (0,) * 9, (), 4, 4, None, 2, Link(node_devices=2))
    costs = dataclasses.replace(costs, isolated=(30,) * 8, added=(None, *[20] * 7))
    parts = capture_stages(costs)
    assert [(len(stage.layers), stage.replicas) for stage in parts] == [(1, 2), (3, 1), (4, 1)]
    frame = Plan.from_json(RELAY | {"schedule": "1f1b"})
    made = plan_of_stages(frame, parts, 2, None)
    train(pool, tmp_path, made.to_json(), train={"max_steps": 6})
    assert losses(tmp_path) == losses(alone)
