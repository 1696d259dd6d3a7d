"""float16 with a loss scale: the steps of torch's GradScaler, skipped on every rank alike, in the same bits for any
layout.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from typing import Any

import pytest
import torch

from tests.engine import cases, models
from tests.engine.compare import differences, merged
from tests.engine.layouts import Cuts, layout_for
from tests.engine.pool import WorkerPool
from tests.engine.test_step import CASES
from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.pipeline import PipelineEngine, Ready
from varuna_capslog.engine.recipe import EngineOptions, LossScale
from varuna_capslog.engine.step import train_step

SMALL = LossScale(8.0)
FLOAT16: dict[str, Any] = {"precision": "float16", "loss_scale": SMALL}
ONE = Cuts((0,), (0,))


@pytest.mark.parametrize("dynamic", [True, False])
def test_steps_change_the_scale_as_torchs_scaler_does(dynamic: bool) -> None:
    dice, ours = random.Random(0), LossScale(1024.0, dynamic=dynamic)
    scale, tracker = torch.tensor(1024.0), torch.tensor(0, dtype=torch.int32)
    seen = set()
    for _ in range(60_000):
        overflows = dice.random() < 2e-4
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflows)), 2.0, 0.5, 2000)
        ours = ours.after(applied=not overflows)
        seen.add(ours.scale)
        if dynamic:
            assert (ours.scale, max(ours.streak, 0)) == (float(scale), int(tracker))
    assert len(seen) > 4 if dynamic else seen == {1024.0}
    assert dataclasses.replace(ours, scale=2.0**127, streak=1999).after(applied=True).scale == 2.0**127


def test_a_scale_that_has_fallen_far_below_1_is_at_its_end() -> None:
    scale, fixed = LossScale(), LossScale(4.0, dynamic=False)
    for _ in range(23):
        scale, fixed = scale.after(applied=False), fixed.after(applied=False)
    assert (scale.scale, scale.exhausted, fixed.exhausted) == (2.0**-7, False, False)
    scale, fixed = scale.after(applied=False), fixed.after(applied=False)
    assert (scale.exhausted, fixed.scale, fixed.exhausted) == (True, 4.0, True)
    assert scale.after(applied=True).exhausted, "one step that fits makes no model smaller"
    assert not fixed.after(applied=True).exhausted


STEPS = 5
SCALES = [(8.0, False), (8.0, True), (4.0, False), (4.0, False), (4.0, False)]


@functools.cache
def plain(clip_norm: float) -> dict[str, Any]:
    """Make five steps of the unsplit model in torch's own way; a target of step 2 is far away."""
    graph = models.LINE["line"]
    chain = graph.build_chain()
    parameters = chain.named_parameters()
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=SMALL.scale)
    records: dict[str, Any] = {"parts": [], "norms": [], "scales": []}
    for step in range(1, STEPS + 1):
        minibatch, inputs = graph.make_minibatch(4, step)
        if step == 2:
            minibatch.targets[1] = 1e15 * minibatch.targets[1]
        records["scales"].append(scaler.get_scale())
        records["parts"].append(models.plain_step(chain, minibatch, inputs, 7, step, graph.loss, "float16", scaler))
        scaler.unscale_(optimizer)
        records["norms"].append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), clip_norm or 1e30)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    buffers = {
        f"{layer.name}.{name}": buffer for layer in chain.layers for name, buffer in layer.module.named_buffers()
    }
    return records | {"state": {name: parameter.detach() for name, parameter in parameters.items()}, "buffers": buffers}


def run(pool: WorkerPool, layout: Any, made: str = "build_chain", **options: Any) -> list[dict[str, Any]]:
    settings, size = FLOAT16 | options, layout.world_size
    return pool.run(cases.train, size, layout, settings, STEPS, torch.float32, "overflow", None, made)


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
@pytest.mark.parametrize("layout", [ONE, Cuts((0, 2, 4), (0, 1, 2)), Cuts((0, 3), (0, 1), 2)], ids=str)
def test_losses_weights_and_skips_are_those_of_torchs_scaler(pool: WorkerPool, layout: Cuts, clip_norm: float) -> None:
    expected, results = plain(clip_norm), run(pool, layout, "line", clip_norm=clip_norm)
    for result in results:
        assert result["scales"] == SCALES
        assert [scale for scale, _ in result["scales"]] == expected["scales"]
        for ours, theirs in zip(result["parts"], expected["parts"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert result["norms"][1] == float("inf")
        assert result["norms"][::2] == pytest.approx(expected["norms"][::2], rel=1e-5)
    for kind in ("state", "buffers"):
        tensors = merged(results, kind)
        assert tensors.keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@functools.cache
def one_rank(pool: WorkerPool) -> dict[str, Any]:
    return run(pool, ONE)[0]


@pytest.mark.parametrize(
    "name",
    [
        "heads on three ranks",
        "stages in any order",
        "backwards in halves, recomputed",
        "two replicas of two",
        "pipelines of three and two",
    ],
)
def test_the_bits_do_not_depend_on_the_cuts(pool: WorkerPool, name: str) -> None:
    layout, schedule, recompute = CASES[name]
    results, expected = run(pool, layout, schedule=schedule, recompute=recompute), one_rank(pool)
    assert not differences(results, expected)
    assert all(result["scales"] == SCALES for result in results)


def one_engine(**options: Any) -> PipelineEngine:
    chain, settings = models.build_chain(), EngineOptions(**(cases.SETTINGS | FLOAT16 | options))
    alone, placed = Communicator(0, 1, 0, cases.SECOND), layout_for(ONE, len(chain), settings.num_blocks)
    ready = Ready(cases.shapes_of(precision="float16"))
    return PipelineEngine(chain, models.loss, placed, settings, alone, torch.device("cpu"), ready)


def test_a_scale_changes_no_bit_of_a_step_that_neither_over_nor_underflows() -> None:
    """Gradients are divided where they are added up, so that the norm and the update have the same bits."""
    minibatch, inputs = models.make_minibatch(4, 1)
    runs = []
    for scale in (1.0, 64.0):
        loss_scale = None if scale == 1.0 else LossScale(scale)
        engine = one_engine(loss_scale=loss_scale, clip_norm=0.5, precision="float32")
        verdict = train_step(engine, 1, copy.deepcopy(minibatch), inputs.__getitem__)
        runs.append([verdict.grad_norm, verdict.parts, verdict.scale * scale])
        runs[-1] += [parameter.detach().clone() for parameter in engine.optimizer.parameters.values()]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def test_a_skipped_step_leaves_averages_and_what_the_optimizer_counts() -> None:
    recipe = dataclasses.replace(cases.SETTINGS["recipe"], ema=0.9)
    engine = one_engine(recipe=recipe)
    for step in (1, 2):
        minibatch, inputs = models.make_minibatch(4, step)
        if step == 2:
            minibatch.targets[1] = 1e15 * minibatch.targets[1]
            before = {name: copy.deepcopy(engine.optimizer.moments(name)) for name in engine.optimizer.parameters}
        verdict = train_step(engine, step, minibatch, inputs.__getitem__)
    assert verdict.skipped
    for name, kept in before.items():
        now = engine.optimizer.moments(name)
        assert now.keys() == kept.keys()
        assert all(torch.equal(now[key], kept[key]) for key in kept)
        assert engine.optimizer.parameters[name].grad is None


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda targets: targets.fill_(float("nan")), r"step 1: the loss is not finite in microbatch 2 \(samples"),
        (lambda targets: targets.mul_(1e30), r"step 1: the loss is not finite in microbatch 2"),
    ],
    ids=["nan", "overflow"],
)
def test_a_loss_that_is_not_finite_is_refused_as_without_a_scale(spoil: Any, message: str) -> None:
    engine, (minibatch, inputs) = one_engine(), models.make_minibatch(4, 1)
    spoil(minibatch.targets[2])
    with pytest.raises(StepRefused, match=message):
        train_step(engine, 1, minibatch, inputs.__getitem__)
    assert engine.optimizer.loss_scale == SMALL


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (LossScale(2.0**-8, -24), r"at the loss scale 0.00390625, after 24 steps in a row were skipped for it; noth"),
        (LossScale(4.0, -24, dynamic=False), r"at the loss scale 4, after 24 .* or lower train.loss_scale"),
    ],
    ids=["dynamic", "fixed"],
)
def test_a_run_whose_gradients_overflow_again_and_again_ends_with_one_sentence(scale: LossScale, message: str) -> None:
    engine, (minibatch, inputs) = one_engine(loss_scale=scale), models.make_minibatch(4, 1)
    minibatch.targets[1] = 1e15 * minibatch.targets[1]
    with pytest.raises(CapslogError, match=message):
        train_step(engine, 1, minibatch, inputs.__getitem__)


def idle_verdicts(communicator: Communicator) -> list[Any]:
    """Three steps; two ranks have stages, the others vote only."""
    chain, options = models.build_chain(), EngineOptions(**(cases.SETTINGS | FLOAT16))
    ready = Ready(cases.shapes_of(precision="float16"))
    placed = layout_for(Cuts((0, 7), (0, 1)), len(chain), options.num_blocks)
    engine = PipelineEngine(chain, models.loss, placed, options, communicator, torch.device("cpu"), ready)
    verdicts = []
    for step in (1, 2, 3):
        minibatch, inputs = models.make_minibatch(4, step)
        if step == 2:
            minibatch.targets[1] = 1e15 * minibatch.targets[1]
        verdicts.append(dataclasses.asdict(train_step(engine, step, minibatch, inputs.__getitem__)))
    return verdicts


def test_idle_ranks_hear_the_scale_from_the_vote(pool: WorkerPool) -> None:
    results = pool.run(idle_verdicts, 4)
    assert results[0][2]["loss_scale"] < results[0][1]["loss_scale"]
    assert all(result == results[0] for result in results)
