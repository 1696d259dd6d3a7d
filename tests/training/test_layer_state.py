"""State by layer: there and back, from disk, into another engine; and copies that make their owner's steps."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine import cases, models
from tests.engine.layouts import Cuts, layout_for
from tests.engine.pool import WorkerPool
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import ParameterGroup
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.pipeline import PipelineEngine, Ready
from varuna_capslog.engine.recipe import EngineOptions, LearningRate, LossScale, Recipe
from varuna_capslog.engine.step import train_step
from varuna_capslog.training import layer_state
from varuna_capslog.training.checkpoint import open_checkpoint
from varuna_capslog.training.checkpoint_writer import CheckpointWriter
from varuna_capslog.training.layer_state import digest
from varuna_capslog.training.stored_layers import from_checkpoint, load_layers, to_checkpoint

CPU = torch.device("cpu")
ONE, THREE_STAGES = Cuts((0,), (0,)), Cuts((0, 3, 9), (0, 0, 0))
# clipping, a warm-up and two multipliers: everything that makes a step of one layer differ from another's
OPTIONS = EngineOptions(
    num_microbatches=4,
    num_blocks=2,
    seed=7,
    clip_norm=0.5,
    recipe=Recipe(
        rate=LearningRate(1e-2, warmup_steps=2),
        groups=(ParameterGroup(match="*norm*", lr_factor=0.5), ParameterGroup(match="*head*", lr_factor=3.0)),
    ),
)
SHARED = (8, 9, 10)
FLOAT16 = dataclasses.replace(OPTIONS, precision="float16", weights="float16", loss_scale=LossScale(8.0))
ROUNDED = dataclasses.replace(OPTIONS.recipe, moments="bfloat16")
BFLOAT16 = dataclasses.replace(OPTIONS, precision="bfloat16", weights="bfloat16", recipe=ROUNDED)
TYPES = pytest.mark.parametrize(
    "options", [OPTIONS, FLOAT16, BFLOAT16], ids=["float32", "float16 weights", "bfloat16 weights and moments"]
)


def make_engine(
    layout: Cuts = ONE,
    communicator: Communicator | None = None,
    layers: Mapping[int, EngineLayer] | None = None,
    chain: Any = None,
    options: EngineOptions = OPTIONS,
) -> PipelineEngine:
    alone = communicator or Communicator(0, 1, 0, datetime.timedelta(0))
    chain = chain or models.build_chain()
    placed = layout_for(layout, len(chain), options.num_blocks)
    shapes = cases.shapes_of(precision=options.precision, weights=options.weights)
    return PipelineEngine(chain, models.loss, placed, options, alone, CPU, Ready(shapes, layers))


def train(engine: PipelineEngine, *steps: int) -> None:
    for step in steps:
        minibatch, inputs = minibatch_of(engine.options, step)
        train_step(engine, step, minibatch, inputs.__getitem__)


def minibatch_of(options: EngineOptions, step: int) -> Any:
    """That of `models`; the gradients of step 2 overflow in float16."""
    minibatch, inputs = models.make_minibatch(4, step)
    if options.loss_scale is not None and step == 2:
        minibatch.targets[1] = 1e15 * minibatch.targets[1]
    return minibatch, inputs


def states(engine: PipelineEngine, copy: bool = True) -> dict[int, layer_state.LayerState]:
    return {layer.index: layer_state.capture(layer, engine.optimizer, copy) for layer in engine.layers}


def digests(layer_states: Mapping[int, Mapping[str, Tensor]]) -> dict[int, bytes]:
    return {index: digest(state) for index, state in layer_states.items()}


def test_keys_name_parameters_buffers_and_moments_of_every_use() -> None:
    engine = make_engine()
    train(engine, 1)
    captured = states(engine)
    assert set(captured[1]) == {
        "buffers/norm.num_batches_tracked",
        "buffers/norm.running_mean",
        "buffers/norm.running_var",
        *(f"parameters/{name}" for name in ("conv.weight", "norm.weight", "norm.bias")),
        *(
            f"optimizer/{name}/{moment}"
            for name in ("conv.weight", "norm.weight", "norm.bias")
            for moment in ("exp_avg", "exp_avg_sq", "step")
        ),
    }
    assert set(captured[0]) == {"parameters/conv.weight", "parameters/conv.bias"}, "a frozen layer has no moments"
    for index in SHARED:
        assert torch.equal(
            captured[index]["optimizer/head.0.weight/exp_avg"], captured[8]["optimizer/head.0.weight/exp_avg"]
        )


@TYPES
def test_sizes_are_those_of_a_trained_state(options: EngineOptions) -> None:
    engine, chain = make_engine(options=options), models.build_chain()
    train(engine, 1)
    for index, state in states(engine).items():
        size = sum(t.numel() * t.dtype.itemsize for key, t in state.items() if not key.startswith("scaler/"))
        assert layer_state.size_of(chain, index, options.recipe, options.weights) == size


def test_initial_is_the_untrained_layer_even_after_training() -> None:
    chain = models.build_chain()
    fresh = digests({index: layer_state.initial(chain, index) for index in range(len(chain))})
    assert fresh == digests(states(make_engine()))
    engine = make_engine(chain=chain, layers={})
    train(engine, 1)
    assert digests({index: layer_state.initial(chain, index) for index in range(len(chain))}) == fresh
    assert digests(states(engine))[1] != fresh[1]


def test_what_an_optimizer_keeps_comes_back_as_it_was() -> None:
    """Tensors stay tensors, integers stay integers; names may contain dots, and a name may begin with another."""
    kept = {"a.b": {"step": 3, "rate": 0.5, "mean": torch.ones(2), "hook": None}, "a.b.c": {"step": torch.tensor(1.0)}}
    state = layer_state.flatten({"a.b": torch.zeros(2)}, {}, kept)
    assert sorted(state) == [
        "number/a.b/rate", "number/a.b/step", "optimizer/a.b.c/step", "optimizer/a.b/mean", "parameters/a.b"
    ]  # fmt: skip
    moments = layer_state.moments_of(state, "a.b")
    assert (moments["step"], type(moments["step"]), moments["rate"]) == (3, int, 0.5)
    assert moments["mean"] is kept["a.b"]["mean"]
    assert set(moments) == {"step", "rate", "mean"}
    assert layer_state.moments_of(state, "a") == {}


@TYPES
def test_a_checkpoint_gives_every_layer_its_state(tmp_path: Path, options: EngineOptions) -> None:
    engine, chain = make_engine(options=options), models.build_chain()
    train(engine, 1, 2)
    checkpoint = open_checkpoint(CheckpointWriter(tmp_path, 2, 0, engine, {}, copies=None).complete())
    captured = states(engine)
    for index, state in captured.items():
        assert digest(from_checkpoint(checkpoint, chain, index)) == digest(state)
        kept = to_checkpoint(state, chain, index)
        stored = checkpoint.layer(chain.layers[index].name)
        for kind, part in stored.items():
            assert sorted(kept[kind]) == sorted(part)
        assert any("head" in name for name in kept["parameters"]) == (index == SHARED[0])
    # and the plain way of loading it, which knows nothing of these states
    restored = make_engine(options=options)
    load_layers(checkpoint, restored.chain, restored.layers, restored.optimizer)
    assert digests(states(restored)) == digests(captured)
    assert restored.optimizer.loss_scale == engine.optimizer.loss_scale
    wider = models.build_chain(dtype=torch.float64)
    wider.layers[1].module.conv = torch.nn.Conv2d(3, 8, 5)
    with pytest.raises(CapslogError, match=r"'conv1\.conv\.weight' has shape .*the model wants \[8, 3, 5, 5\]"):
        from_checkpoint(checkpoint, wider, 1)


@TYPES
@pytest.mark.parametrize("live", [False, True], ids=["from copies", "with the layers that stay"])
def test_an_installed_state_goes_on_to_the_last_bit(live: bool, options: EngineOptions) -> None:
    undisturbed = make_engine(THREE_STAGES, options=options)
    train(undisturbed, 1, 2, 3, 4)
    engine, chain = make_engine(options=options), models.build_chain()
    train(engine, 1, 2)
    minibatch, inputs = models.make_minibatch(4, 3)
    engine.compute(3, minibatch, inputs.__getitem__)  # a step that is broken off leaves its gradients and statistics
    kept = states(engine, copy=not live)
    before = digests(kept)
    layers = {layer.index: layer for layer in engine.layers}
    engine = make_engine(THREE_STAGES, layers=layers if live else {}, chain=chain, options=options)
    for layer in engine.layers:
        layer_state.install(layer, engine.optimizer, kept[layer.index])
        assert (layer is layers[layer.index]) == (live and layer.index not in SHARED)
    assert digests(states(engine)) == before
    train(engine, 3, 4)
    assert digests(states(engine)) == digests(states(undisturbed))
    if not live:
        assert digests(kept) == before, "what was installed is a copy"


@TYPES
def test_installing_an_untrained_state_forgets_the_moments(options: EngineOptions) -> None:
    engine, chain = make_engine(options=dataclasses.replace(options, loss_scale=None)), models.build_chain()
    fresh, low = digests(states(engine)), [weight.detach().clone() for weight in engine.optimizer.parameters.values()]
    train(engine, 1)
    for layer in engine.layers:
        layer_state.install(layer, engine.optimizer, layer_state.initial(chain, layer.index))
    assert digests(states(engine)) == fresh
    assert all(map(torch.equal, engine.optimizer.parameters.values(), low))


def test_a_state_of_another_layer_is_one_sentence() -> None:
    engine, chain = make_engine(), models.build_chain()
    with pytest.raises(CapslogError, match=r"the state for layer 'conv1' has no parameter 'norm\.weight'"):
        layer_state.install(engine.layers[1], engine.optimizer, {"parameters/conv.weight": torch.zeros(8, 8, 3, 3)})
    with pytest.raises(CapslogError, match=r"parameter 'conv\.weight' of shape \[1\], the model wants \[8, 8, 3, 3\]"):
        layer_state.install(engine.layers[1], engine.optimizer, {"parameters/conv.weight": torch.zeros(1)})
    follower = layer_state.Follower(chain, 1, OPTIONS, CPU, layer_state.initial(chain, 1))
    with pytest.raises(CapslogError, match=r"'conv1' has nothing to do with 'gradients/query\.weight'"):
        follower.apply({"gradients/query.weight": torch.zeros(8, 8)}, 1, 1.0)


def follow(communicator: Communicator, layout: Cuts, options: EngineOptions) -> dict[str, Any]:
    """Five steps with a copy of every layer beside its owner; every second copy makes its steps by itself, the others
    make theirs together.
    """
    engine = make_engine(layout, communicator, options=options)
    chain = models.build_chain()
    followers = {
        index: layer_state.Follower(chain, index, options, CPU, state) for index, state in states(engine).items()
    }
    scales, equal, traced = [], [], []
    for step in range(1, 6):
        minibatch, inputs = minibatch_of(options, step)
        engine.compute(step, minibatch, inputs.__getitem__)
        updates = {
            # as sending it would do
            index: {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in update.items()}
            for index, update in ((index, engine.update_of(index)) for index in followers)
        }
        verdict = engine.vote(step, minibatch)
        engine.apply(verdict)
        for index in list(followers)[::2]:
            followers[index].apply(updates[index], step, verdict.scale)
        layer_state.apply_together(
            [(followers[index], updates[index], step, verdict.scale) for index in list(followers)[1::2]]
        )
        scales.append(verdict.scale)
        theirs = digests({index: follower.state(copy=False) for index, follower in followers.items()})
        low = [(layer.parameters, followers[layer.index].layer.parameters) for layer in engine.layers]
        alike = all(torch.equal(mine[name], copy[name]) for mine, copy in low for name in mine)
        equal.append(alike and theirs == digests(states(engine)))
        traced.append({index: sorted(update) for index, update in updates.items()})
    return {"scales": scales, "equal": equal, "keys": traced[0]}


@TYPES
@pytest.mark.parametrize(
    "layout",
    [ONE, Cuts((0, 8, 9, 10), (0, 1, 2, 3)), Cuts((0, 2, 8, 9), (0, 1, 0, 1), 2)],
    ids=["one rank", "heads on three ranks", "two replicas, heads on two ranks each"],
)
def test_a_follower_is_its_owner_to_the_last_bit(pool: WorkerPool, layout: Cuts, options: EngineOptions) -> None:
    results = pool.run(follow, layout.world_size, layout, options)
    for result in results:
        assert result["equal"] == [True] * 5
        assert min(result["scales"]) < 1.0
        skipped = [step for step, scale in enumerate(result["scales"], 1) if scale == 0.0]
        assert skipped == ([] if options.loss_scale is None else [2])
    keys = {index: layer_keys for result in results for index, layer_keys in result["keys"].items()}
    assert [key for key in keys[1] if key.startswith("statistics")] == [f"statistics/{index}/0/0" for index in range(4)]
    assert not keys[0], "nothing of a frozen layer changes"
    for index in SHARED:
        assert "gradients/head.0.weight" in keys[index], "the total, wherever its leaf lies"


def places(layer: EngineLayer) -> list[int]:
    return [tensor.data_ptr() for tensor in (*layer.parameters.values(), *layer.masters.values())]


@TYPES
def test_a_copy_becomes_the_layer_and_the_layer_a_copy_without_being_copied(options: EngineOptions) -> None:
    """The layers of a member change so at a boundary; training goes on as if nothing had happened."""
    expected = make_engine(options=options)
    train(expected, 1, 2, 3, 4)
    engine = make_engine(options=options)
    train(engine, 1, 2)
    chain = models.build_chain()
    followers = {
        index: layer_state.Follower(chain, index, options, CPU, state) for index, state in states(engine).items()
    }
    taken = {index: follower.layer for index, follower in followers.items()}
    for index, follower in followers.items():
        assert layer_state.lies_in(follower.state(copy=False), taken[index])
    assert not layer_state.lies_in(followers[1].state(copy=True), taken[1])
    lay = {index: places(layer) for index, layer in taken.items() if not layer.shared}
    second = make_engine(layers=taken, chain=chain, options=options)
    for layer in second.layers:
        layer_state.install(layer, second.optimizer, followers[layer.index].state(copy=False))
    assert {layer.index: places(layer) for layer in second.layers if not layer.shared} == lay
    train(second, 3)
    live, engine_layers = states(second, copy=False), {layer.index: layer for layer in second.layers}
    copies = {
        index: layer_state.Follower(chain, index, options, CPU, live[index], layer)
        for index, layer in engine_layers.items()
    }
    assert {index: places(copies[index].layer) for index in lay} == lay
    for index in SHARED:  # an engine's uses of a shared parameter lie in one place, a copy in another
        assert places(copies[index].layer) != places(engine_layers[index])
    third = make_engine(options=options)
    for layer in third.layers:
        layer_state.install(layer, third.optimizer, copies[layer.index].state(copy=False))
    minibatch, inputs = minibatch_of(options, 4)
    third.compute(4, minibatch, inputs.__getitem__)
    updates = {index: third.update_of(index) for index in copies}
    updates = {index: {key: tensor.clone() for key, tensor in update.items()} for index, update in updates.items()}
    verdict = third.vote(4, minibatch)
    third.apply(verdict)
    layer_state.apply_together([(copy, updates[index], 4, verdict.scale) for index, copy in copies.items()])
    wanted = digests(states(expected))
    assert digests(states(third)) == wanted
    assert digests({index: copy.state(copy=False) for index, copy in copies.items()}) == wanted
    copied = layer_state.Follower(chain, 1, options, CPU, states(third)[1], engine_layers[1])
    assert places(copied.layer) != places(engine_layers[1]), "a state of another memory is copied"
