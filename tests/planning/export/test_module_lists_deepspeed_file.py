"""The exported file is a PipelineModule whose ranks build the layers of the plan's stages."""

from __future__ import annotations

import ast
import sys
import types
from dataclasses import replace
from typing import Any

import pytest

from tests.planning.export.models import detr_names, named, names, plan_of
from tests.planning.export.readers import FakePipelineModule, FakeTopology
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.names import ModelNames
from varuna_capslog.planning.export import deepspeed
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules import RunShape

KEEPS = RunShape(recompute=False, schedule="1f1b")


@pytest.fixture
def run_file(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a file's text and returns its class; DeepSpeed's base class is faked."""

    def non_reentrant_checkpoint() -> None: ...

    path, parts = "deepspeed", ["runtime", "activation_checkpointing", "checkpointing"]
    monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    for part in parts:
        path = f"{path}.{part}"
        monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    sys.modules[path].non_reentrant_checkpoint = non_reentrant_checkpoint  # type: ignore[attr-defined]
    pipe = types.ModuleType("deepspeed.pipe")
    pipe.PipelineModule = FakePipelineModule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", pipe)

    def run(text: str) -> Any:
        space: dict[str, Any] = {}
        exec(compile(text, "planned.py", "exec"), space)
        return space["PlannedPipelineModule"]

    return run


def built(module: Any, layers: list[str], stages: int, **options: Any) -> list[list[str]]:
    rank_layers = []
    for rank in range(stages):
        module.rank = rank
        rank_layers.append(module(layers, **options).built)
    return rank_layers


def test_ranks_build_the_layers_of_their_stages(run_file: Any) -> None:
    for model_names in (names("gpt2"), names("vit"), detr_names()):
        layers = list(model_names.layers)
        text = deepspeed(plan_of(0, 2, 5, layers=len(layers)), KEEPS, model_names)
        module = run_file(text)
        assert built(module, layers, 3) == [layers[:2], layers[2:5], layers[5:]]
        assert built(module, layers, 3, topology=FakeTopology(3)) == [layers[:2], layers[2:5], layers[5:]]
        assert f"stage 1: layer 2 ({layers[2]}) to layer 4 ({layers[4]})" in text
        with pytest.raises(ValueError, match=f"the plan is for {len(layers)} layers, but {len(layers) - 1} are given"):
            module(layers[1:])
        with pytest.raises(ValueError, match="the plan has 3 stages, but the topology 2"):
            module(layers, topology=FakeTopology(2))
    assert "give them as TiedLayerSpec of one key" in deepspeed(plan_of(0, 2), KEEPS, names("tied gpt2"))


def intervals(*pieces: tuple[int, int]) -> tuple[MemoryInterval, ...]:
    return tuple(MemoryInterval(*piece, "recompute") for piece in pieces)


@pytest.mark.parametrize(
    ("first", "second", "recompute", "interval"),
    [
        (None, None, False, 0),
        (None, None, True, 3),
        ((), (), True, 0),
        (intervals((0, 3)), intervals((3, 5)), False, 3),
        (intervals((0, 2), (2, 3)), intervals((3, 5)), False, 2),
        (intervals((0, 1), (1, 2), (2, 3)), intervals((3, 4), (4, 5)), False, 1),
        (intervals((0, 3)), None, True, 3),
    ],
)
def test_recomputation_is_a_number_of_layers(
    run_file: Any, first: Any, second: Any, recompute: bool, interval: int
) -> None:
    stages = (PlanStage(((0, 3),), (0,), memory=first), PlanStage(((3, 5),), (1,), memory=second))
    plan = Plan(5, stages, Units(2, 1, 1), "1f1b")
    made = run_file(deepspeed(plan, replace(KEEPS, recompute=recompute)))(list("abcde"))
    assert made.interval == interval
    assert (made.function is None) == (interval == 0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (intervals((0, 3)), ()),
        (intervals((1, 3)), intervals((3, 5))),
        (intervals((0, 3)), None),
        ((MemoryInterval(0, 3, "offload"),), (MemoryInterval(3, 5, "offload"),)),
    ],
)
def test_other_intervals_are_refused(first: Any, second: Any) -> None:
    stages = (PlanStage(((0, 3),), (0,), memory=first), PlanStage(((3, 5),), (1,), memory=second))
    with pytest.raises(CapslogError, match=r"stage 0 has the memory intervals .* DeepSpeed recomputes equal numbers"):
        deepspeed(Plan(5, stages, Units(2, 1, 1), "1f1b"), KEEPS)


def test_the_names_are_of_the_plans_model() -> None:
    with pytest.raises(CapslogError, match="the plan has 6 layers, but the model has 2"):
        deepspeed(plan_of(0, 2), KEEPS, named("a", "b"))


def test_a_name_of_a_layer_stays_inside_the_docstring() -> None:
    """A profile's layer named \"\"\" and then some code put that code into the exported file."""
    for evil in ('"""\nimport os\n"""', "\\", 'x"', "\x1b[31m\u202e"):
        layers = tuple(f"{number}{evil}" for number in range(6))
        text = deepspeed(plan_of(0, 3), KEEPS, ModelNames(layers, ((evil, (0, 1)),)))
        first, *statements = ast.parse(text).body
        assert isinstance(first, ast.Expr)
        assert [type(node) for node in statements] == [ast.ImportFrom, ast.Assign, ast.Expr, ast.ClassDef]
        assert "\x1b" not in text
