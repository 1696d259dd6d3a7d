"""A rank with all layers of a plain chain traces nothing, to the same bits; what it must trace it traces."""

from __future__ import annotations

import copy
import datetime
import gc
import subprocess
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine, Ready
from varuna_capslog.engine.recipe import EngineOptions, Recipe
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.model.workload import Minibatch

WIDTH = 4


class Add(nn.Module):
    def forward(self, x: Tensor, passed: Tensor) -> Tensor:
        return x + passed


class Signs(nn.Module):
    """The signs of x, which carry no gradient, and x."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x > 0).float(), x


def plain() -> list[Layer]:
    return [Layer(f"layer.{index}", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())) for index in range(3)]


def passing_by() -> list[Layer]:
    return [
        Layer("first", nn.Linear(WIDTH, WIDTH), ("x",), ("passed",)),
        Layer("second", nn.Linear(WIDTH, WIDTH), ("passed",), ("x",)),
        Layer("third", Add(), ("x", "passed"), ("x",)),
    ]


def with_signs() -> list[Layer]:
    return [*plain(), Layer("signs", Signs(), ("x",), ("signs", "x"))]


class CountedTable(ShapeTable):
    """Counts the traces."""

    traces = 0

    def _trace(self, inputs: Mapping[str, TensorSpec]) -> list[dict[str, TensorSpec]]:
        self.traces += 1
        return super()._trace(inputs)


def loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    if "signs" in outputs:
        assert not outputs["signs"].requires_grad
        return {"loss": (outputs["signs"] * outputs["x"]).sum() / normalisers["samples"]}
    return {"loss": (outputs["x"] - targets).pow(2).sum() / normalisers["samples"]}


def minibatch(width: int = WIDTH) -> Minibatch:
    inputs = [{"x": TensorSpec((2, width))} for _ in range(2)]
    return Minibatch(inputs, [torch.ones(2, WIDTH)] * 2, {"samples": 4.0}, [[0, 1], [2, 3]], [[0, 1], [2, 3]])


def engine_of(layers: list[Layer]) -> tuple[PipelineEngine, CountedTable]:
    chain = Chain(layers, outputs=("signs", "x") if layers[-1].name == "signs" else ("x",))
    table = CountedTable(chain)
    alone = Communicator(0, 1, "alone", datetime.timedelta(seconds=1))
    options = EngineOptions(num_microbatches=2, seed=1, recipe=Recipe(optimizer="adamw"))
    layout = Layout.pipelines((0,), len(chain))
    return PipelineEngine(chain, loss, layout, options, alone, torch.device("cpu"), Ready(table)), table


def load(microbatch: int) -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH) * (microbatch + 1)}


@pytest.mark.parametrize(("made", "traces"), [(plain, 0), (passing_by, 1), (with_signs, 1)])
def test_three_steps_are_those_of_the_unsplit_model(made: Any, traces: int) -> None:
    torch.manual_seed(0)
    layers = made()
    modules = nn.ModuleList(layer.module for layer in copy.deepcopy(layers))
    whole = Chain(
        [Layer(layer.name, module, layer.reads, layer.writes) for layer, module in zip(layers, modules, strict=True)],
        outputs=("signs", "x") if made is with_signs else ("x",),
    )
    engine, table = engine_of(layers)
    rule = Recipe(optimizer="adamw")
    adam = torch.optim.AdamW(modules.parameters(), lr=rule.rate.at(1), weight_decay=rule.weight_decay, fused=True)
    for step in (1, 2, 3):
        train_step(engine, step, minibatch(), load)
        adam.param_groups[0]["lr"] = rule.rate.at(step)
        for microbatch in range(2):
            loss(whole.run(load(microbatch)), torch.ones(2, WIDTH), {"samples": 4.0})["loss"].backward()
        adam.step()
        adam.zero_grad()
    assert table.traces == traces
    trained = engine.chain.named_parameters()
    for name, parameter in whole.named_parameters().items():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-6, atol=1e-7)
    # the same engine with the specs of a trace, as a rank of a longer pipeline has them
    torch.manual_seed(0)
    traced, _ = engine_of(made())
    traced._specs_of(minibatch().inputs[0])[0].settle()
    for step in (1, 2, 3):
        train_step(traced, step, minibatch(), load)
    for name, parameter in traced.chain.named_parameters().items():
        assert torch.equal(trained[name], parameter), name


def test_inputs_that_do_not_fit_are_one_sentence() -> None:
    """A trace before the step said so; without it torch's own error came through."""
    engine, _ = engine_of(plain())
    with pytest.raises(CapslogError, match=r"layer 'layer.0' cannot run on x\[2, 5\]"):
        train_step(engine, 1, minibatch(5), lambda microbatch: {"x": torch.ones(2, 5)})


def test_its_process_does_not_import_torchs_compiler() -> None:
    """It takes a second of every worker's start, and only fake tensors and marks of torch's optimizers ask for it."""
    code = (
        "import sys; from tests.engine import test_stage_late_specs as t; engine, _ = t.engine_of(t.plain()); "
        "t.train_step(engine, 1, t.minibatch(), t.load); sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_engine_that_is_dropped_is_gone_without_a_collection() -> None:
    """Its specs held it by the function that traces, and every generation left its groups' threads behind."""
    engine, _ = engine_of(plain())
    train_step(engine, 1, minibatch(), load)
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()
