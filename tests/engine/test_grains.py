"""Stages that take several microbatches in one call: equal grains give equal bits, different ones differ by 1e-5."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest
import torch

from tests.engine import cases, models
from tests.engine.compare import differences, gradient_error, merged
from tests.engine.layouts import random_layout, with_intervals
from tests.engine.pool import WorkerPool
from tests.sweeps import some
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.grains import (
    Joining,
    check_grains,
    check_joined,
    joined_inputs,
    layers_of_one_microbatch,
    sample_dimensions,
    specs_of_values,
)
from varuna_capslog.engine.layout import Layout
from varuna_capslog.model.capture.runtime import Guard
from varuna_capslog.model.chain import Chain, TensorSpec, Value
from varuna_capslog.model.layer import Layer
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.plans.parts import PlanStage

COUNT = 8
NAMES = ("towers", "translation")


def train(pool: WorkerPool, name: str, layout: Layout, **options: Any) -> list[dict[str, Any]]:
    settings = {"num_microbatches": COUNT, "num_blocks": layout.num_blocks} | options
    return pool.run(cases.train, layout.world_size, layout, settings, 2, torch.float32, "even", None, name)


@functools.cache
def layer_by_layer(pool: WorkerPool, name: str, grains: tuple[int, ...]) -> dict[str, Any]:
    """Train on one rank with a stage per layer; each takes its grain of microbatches in a call and keeps everything."""
    stages = tuple(PlanStage(((n, n + 1),), (0,), grain=grain) for n, grain in enumerate(grains))
    return train(pool, name, Layout(stages, 1), schedule="gpipe", recompute=False)[0]


@functools.cache
def plain(name: str) -> dict[str, torch.Tensor]:
    graph = models.GRAPHS[name]
    chain = graph.build_chain(dropout=0.0)
    minibatch, inputs = graph.make_minibatch(COUNT, 1, even=True)
    models.plain_step(chain, minibatch, inputs, seed=7, step=1, loss=graph.loss)
    return {key: p.grad for key, p in chain.named_parameters().items() if p.grad is not None}


def grained(layout: Layout, dice: random.Random, name: str) -> tuple[Layout, tuple[int, ...]]:
    """The layout with grains, and the grain of every layer. The join of the towers compares samples: grain 1."""
    stages, grains = [], dict[int, int]()
    for stage in layout.stages:
        joins = name == "towers" and stage.end == layout.num_layers
        grain = 1 if joins else dice.choice((1, 2, 4, 8))
        stages.append(dataclasses.replace(stage, grain=grain, in_flight=None))
        grains |= dict.fromkeys(stage.numbers, grain)
    return dataclasses.replace(layout, stages=tuple(stages)), tuple(grains[n] for n in range(layout.num_layers))


@pytest.mark.parametrize("seed", some(range(6), 2))
@pytest.mark.parametrize("name", NAMES)
def test_any_stages_of_equal_grains_give_the_same_bits(pool: WorkerPool, name: str, seed: int) -> None:
    """Every second layout has direct routes."""
    chain, dice = models.GRAPHS[name].build_chain(), random.Random(seed)
    layout = random_layout(seed, len(chain), 1, 4, chain.edges if seed % 2 else None)
    layout, grains = grained(with_intervals(layout, seed), dice, name)
    results = train(pool, name, layout, schedule=dice.choice(["gpipe", "1f1b", "kfkb", "zb-h1", "varuna"]))
    assert not differences(results, layer_by_layer(pool, name, grains))
    error, worst = gradient_error(merged(results, "gradients"), plain(name))
    assert error <= 1e-5, f"{worst}: {error:.2e}"


def towers(join: int = 1, others: int = 2) -> Layout:
    stages = (
        PlanStage(((0, 4),), (0,), grain=others),
        PlanStage(((4, 7),), (1,)),
        PlanStage(((7, 8),), (2,), grain=join),
    )
    return Layout(stages, 1, direct=True)


def test_a_layer_that_compares_samples_takes_one_microbatch(pool: WorkerPool) -> None:
    with pytest.raises(RuntimeError, match=r"'logits' \(written by layer 'join'\) is \[2, 2\] .* and \[4, 4\] for 2"):
        train(pool, "towers", towers(join=2, others=1))


def test_microbatches_of_unequal_sizes_are_refused_by_every_rank(pool: WorkerPool) -> None:
    settings = {"num_microbatches": COUNT, "num_blocks": 1, "schedule": "1f1b"}
    with pytest.raises(
        RuntimeError, match="microbatches 0 and 1 are to be taken in one call, but their input"
    ) as error:
        pool.run(cases.train, 3, towers(), settings, 1, torch.float32, None, None, "towers")
    assert all(f"rank {rank}: CapslogError: microbatches 0 and 1" in str(error.value) for rank in range(3))


def test_a_batch_norm_takes_one_microbatch() -> None:
    chain = models.GRAPHS["inception"].build_chain()
    layout = Layout((PlanStage(((0, len(chain)),), (0,), grain=2),), 1)
    with pytest.raises(CapslogError, match=r"stages\[0\].grain is 2, but layer 'norm' has a BatchNorm2d, whose"):
        check_grains(chain, layout)


def test_a_model_captured_for_one_batch_size_takes_one_microbatch() -> None:
    """Its ranks refused the second call of a stage, after the start; layers that take any batch are not refused."""
    guard, linear = Guard("stem", ("x",), ((2, 3),), None), torch.nn.Linear(3, 2)

    class Captured(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            guard(x)
            return linear(x)

    layers = [Layer("in", torch.nn.Identity(), ("image",), ("x",)), Layer("stem", Captured(), ("x",), ("y",))]
    chain = Chain(layers, ("image",), ("y",))
    inputs = {name: TensorSpec((2, 3)) for name in chain.inputs}
    layout = Layout((PlanStage(((0, 1),), (0,)), PlanStage(((1, len(chain)),), (1,), grain=2)), 1)
    with pytest.raises(CapslogError, match=r"stages\[1\].grain is 2, but layer .* was captured for .* choose grain 1"):
        check_joined(chain, layout, inputs)
    check_joined(chain, Layout((PlanStage(((0, len(chain)),), (0,)),), 1), inputs)
    graph = models.GRAPHS["translation"]
    plain_chain, (minibatch, _) = graph.build_chain(), graph.make_minibatch(2, 1, even=True)
    whole = Layout((PlanStage(((0, len(plain_chain)),), (0,), grain=2),), 1)
    check_joined(plain_chain, whole, dict(minibatch.inputs[0]))


@pytest.mark.parametrize(("name", "alone"), [("towers", ["join"]), ("inception", ["norm"]), ("translation", [])])
def test_profiles_name_the_layers_that_the_checks_refuse(name: str, alone: list[str]) -> None:
    graph = models.GRAPHS[name]
    chain, (minibatch, _) = graph.build_chain(), graph.make_minibatch(2, 1, even=True)
    table, inputs = ShapeTable(chain), dict(minibatch.inputs[0])
    cuts = [table.boundaries(joined_inputs([inputs] * count, range(count))) for count in (1, 2)]
    small, large = (specs_of_values(chain, specs) for specs in cuts)
    layers = layers_of_one_microbatch(chain, (small, large), 2)
    assert [chain.layers[layer].name for layer in layers] == alone


def test_the_dimension_of_the_samples_is_the_one_that_grows() -> None:
    graph = models.GRAPHS["translation"]
    chain, (minibatch, _) = graph.build_chain(), graph.make_minibatch(4, 1, even=True)
    rows = [dict(microbatch) for microbatch in minibatch.inputs]
    table = ShapeTable(chain)
    specs = []
    for microbatches in ((0,), (0, 1, 2)):
        cuts = table.boundaries(joined_inputs([rows[microbatch] for microbatch in microbatches], microbatches))
        specs.append({value: cuts[cut][value.name] for cut in range(len(cuts)) for value in chain.values_at(cut)})
    samples = sample_dimensions(chain, range(len(chain) + 1), (), (specs[0], specs[1]), 3)
    assert set(samples) == set(chain.readers)
    assert set(samples.values()) == {0}


def test_inputs_are_joined_in_their_first_dimension() -> None:
    spec = TensorSpec((2, 3, 4, 4), stride=(48, 1, 12, 3))
    assert joined_inputs([{"x": spec}] * 3, (0, 1, 2)) == {"x": TensorSpec((6, 3, 4, 4), stride=(48, 1, 12, 3))}


def test_a_value_without_samples_is_handed_on_and_its_gradients_are_added() -> None:
    """Example by hand: a table of positions, which two calls of one microbatch make and one call of both reads."""
    table, images = Value("table", 0), Value("images", 1)
    joining, spec = Joining({table: None, images: 0}), TensorSpec((2, 3))
    first, second = torch.ones(2, 3), torch.full((2, 3), 2.0)
    assert joining.join(table, [first, second], spec) is first
    assert torch.equal(joining.join((table, None), [first, second], spec), torch.full((2, 3), 3.0))
    assert [float(joining.part((table, 4), first, place, spec).sum()) for place in (0, 1)] == [6.0, 0.0]
    together = joining.join(images, [first, second], TensorSpec((4, 3)))
    assert torch.equal(joining.part((images, 4), together, 1, spec), second)
