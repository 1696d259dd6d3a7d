"""A step of the pipeline equals the unsplit model's (by plain autograd), and its three parts alone."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest
import torch

from tests.engine import cases, models
from tests.engine.compare import differences, gradient_error, merged
from tests.engine.layouts import Cuts, layout_for, random_layout, rectangle
from tests.engine.pool import WorkerPool
from tests.memory.machine import Model, profile_of
from tests.planning.asking import plan
from tests.sweeps import some
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.interface import Verdict
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine, Ready
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.planners.seconds import Link
from varuna_capslog.schedules import RunShape

# 0 stem (frozen) | 1 conv1 | 2 pool (no parameters) | 3 conv2 | 4 sequence (no parameters) | 5, 6 encoders | 7
# queries |
# 8, 9, 10 decoders, which share their head
CASES = {
    "one rank": (Cuts((0,), (0,)), "varuna", True),
    "frozen-only first stage": (Cuts((0, 1), (0, 1)), "varuna", True),
    "frozen-only first stage, no recompute": (Cuts((0, 1), (0, 1)), "1f1b", False),
    "stage without parameters": (Cuts((0, 2, 3), (0, 1, 2)), "1f1b", True),
    "before the shared heads": (Cuts((0, 5, 8), (0, 1, 2)), "gpipe", False),
    "heads on three ranks": (Cuts((0, 8, 9, 10), (0, 1, 2, 3)), "varuna", True),
    "one-layer stages": (Cuts((0, 3, 4, 5), (0, 1, 2, 3)), "gpipe", True),
    "eight ranks": (Cuts((0, 1, 2, 4, 6, 8, 9, 10), tuple(range(8))), "varuna", True),
    "eight ranks, no recompute": (Cuts((0, 1, 2, 4, 6, 8, 9, 10), tuple(range(8))), "1f1b", False),
    "stages in any order": (Cuts((0, 2, 4, 7, 8, 10), (0, 1, 2, 0, 2, 1)), "1f1b", False),
    "several stages per rank": (Cuts((0, 2, 4, 7, 8, 10), (0, 1, 0, 1, 0, 1)), "varuna", True),
    "interleaved stages": (Cuts((0, 2, 4, 7, 8, 10), (0, 1, 0, 1, 0, 1)), "interleaved", False),
    "interleaved stages recompute": (Cuts((0, 2, 5, 8), (0, 1, 0, 1)), "interleaved", True),
    "interleaved, unequal chunks": (Cuts((0, 2, 4, 7, 9), (0, 1, 0, 1, 1)), "interleaved", False),
    "interleaved, unequal chunks, recomputed": (Cuts((0, 2, 5, 8), (0, 1, 2, 1)), "interleaved", True),
    "backwards in halves": (Cuts((0, 3, 6, 9), (0, 1, 2, 3)), "zb-h1", False),
    "backwards in halves, recomputed": (Cuts((0, 5, 8), (0, 1, 2)), "zb-h1", True),
    "groups of two": (Cuts((0, 3, 6, 9), (0, 1, 2, 3)), "kfkb", True),
    "two replicas in halves": (Cuts((0, 7), (0, 1), 2), "zb-h1", False),
    "two replicas": (Cuts((0,), (0,), 2), "varuna", True),
    "two replicas of two": (Cuts((0, 7), (0, 1), 2), "1f1b", True),
    "two replicas of four": (Cuts((0, 2, 8, 9), (0, 1, 2, 3), 2), "varuna", True),
    "a replicated stage": (
        Layout((rectangle(0, 2, 0), rectangle(2, 8, 1, (1,)), rectangle(2, 8, 2, (0,)), rectangle(8, 11, 3)), 2),
        "1f1b",
        True,
    ),
    "pipelines of three and two": (
        Layout(
            (
                *(rectangle(first, end, rank, (0,)) for rank, (first, end) in enumerate([(0, 2), (2, 8), (8, 11)])),
                *(rectangle(first, end, 3 + rank, (1,)) for rank, (first, end) in enumerate([(0, 9), (9, 11)])),
            ),
            2,
        ),
        "varuna",
        True,
    ),
    "two pipelines share ranks crosswise": (
        Layout(
            (rectangle(0, 5, 0, (0,)), rectangle(5, 11, 1, (0,)), rectangle(0, 5, 1, (1,)), rectangle(5, 11, 0, (1,))),
            2,
        ),
        "gpipe",
        False,
    ),
}


def run(pool: WorkerPool, name: str, **options: Any) -> list[dict[str, Any]]:
    layout, schedule, recompute = CASES[name]
    steps, dtype = options.pop("steps", 2), options.pop("dtype", torch.float32)
    twist = options.pop("twist", None)
    settings = {"schedule": schedule, "recompute": recompute} | options
    return pool.run(cases.train, layout.world_size, layout, settings, steps, dtype, twist)


@pytest.mark.parametrize("seed", some(range(8), 3))
def test_any_rectangles_give_the_bits_of_one_rank(pool: WorkerPool, seed: int) -> None:
    """Several stages per rank, single stages in unequal shares, pipelines of unequal length; four blocks."""
    layout = random_layout(seed, 11, 4, 5)
    schedule, recompute = [("1f1b", False), ("varuna", True), ("1f1b", True)][seed % 3]
    settings = {"schedule": schedule, "recompute": recompute, "num_blocks": 4}
    results = pool.run(cases.train, layout.world_size, layout, settings, 2)
    assert not differences(results, blocks_of_one(pool))


@functools.cache
def blocks_of_one(pool: WorkerPool) -> dict[str, Any]:
    return pool.run(cases.train, 1, Cuts((0,), (0,)), {"num_blocks": 4}, 2)[0]


@functools.cache
def by_hand(pool: WorkerPool) -> dict[str, Any]:
    made = "factory_chain_by_hand"
    return pool.run(cases.train, 1, Cuts((0,), (0,)), {"num_blocks": 4}, 2, torch.float32, None, None, made)[0]


@functools.cache
def oracle(dtype: torch.dtype) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    chain = models.build_chain(dtype=dtype)
    minibatch, inputs = models.make_minibatch(4, 1, dtype)
    parts = models.plain_step(chain, minibatch, inputs, seed=7, step=1)
    return parts, {name: p.grad for name, p in chain.named_parameters().items() if p.grad is not None}


@functools.cache
def one_rank(pool: WorkerPool) -> dict[str, Any]:
    return run(pool, "one rank")[0]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_unsplit_models_and_bits_do_not_depend_on_the_cuts(pool: WorkerPool, name: str) -> None:
    results = run(pool, name)
    parts, gradients = oracle(torch.float32)
    error, worst = gradient_error(merged(results, "gradients"), gradients)
    assert error <= 1e-5, f"{worst}: {error:.2e}"
    for result in results:
        assert result["parts"][0] == pytest.approx(parts, rel=1e-6)
        assert result["parts"] == one_rank(pool)["parts"]
        assert result["norms"] == one_rank(pool)["norms"]
    for kind in ("state", "buffers"):
        tensors, expected = merged(results, kind), one_rank(pool)[kind]
        assert tensors.keys() == expected.keys()
        different = [name for name in expected if not torch.equal(tensors[name], expected[name])]
        assert not different


def test_a_periodic_schedule_on_a_rank_that_comes_back_gives_the_bits_of_one_rank(pool: WorkerPool) -> None:
    """MadPipe's plan: two heavy layers in the middle, and the layers around them on one of three ranks."""
    drawn = profile_of(Model.random(random.Random(5), 11, True, 1000), "cuda")
    seconds = [1.0, 1.0, 0.1, 5.0, 0.1, 0.1, 0.1, 5.0, 0.1, 0.9, 1.0]
    rows = [
        dataclasses.replace(row, forward_seconds=took / 3, backward_seconds=2 * took / 3)
        for row, took in zip(drawn.layers, seconds, strict=True)
    ]
    profile = dataclasses.replace(drawn, layers=tuple(rows))
    planned = plan(profile, 3, "madpipe", run=RunShape(4, "1f1b", False, num_blocks=2), link=Link(10**7))
    assert [stage.rank for stage in planned.stages] == [0, 1, 0, 2, 0]
    layout, options = Layout(planned.stages, 2), {"schedule": "1f1b", "recompute": False, "actions": planned.actions}
    results = pool.run(cases.train, 3, layout, options, 2)
    assert not differences(results, one_rank(pool))


@pytest.mark.parametrize("name", ["heads on three ranks", "two replicas of two"])
def test_float64_agrees_to_1e_12(pool: WorkerPool, name: str) -> None:
    results = run(pool, name, steps=1, dtype=torch.float64)
    error, worst = gradient_error(merged(results, "gradients"), oracle(torch.float64)[1])
    assert error <= 1e-12, f"{worst}: {error:.2e}"


@pytest.mark.parametrize("sabotage", ["drop", "swap", "reseed"])
def test_the_comparison_notices_a_broken_engine(pool: WorkerPool, sabotage: str) -> None:
    results = run(pool, "before the shared heads", steps=1, twist=sabotage)
    error, _ = gradient_error(merged(results, "gradients"), oracle(torch.float32)[1])
    assert error > 1e-3


@pytest.mark.parametrize("name", ["heads on three ranks", "stages in any order", "two replicas of two"])
def test_one_group_per_ordered_pair_carries_the_same_step(pool: WorkerPool, name: str) -> None:
    """NCCL's way of sending, by its stand-in: every pair that talks has a group, and no message comes out of order."""
    results = run(pool, name, twist="pair groups")
    assert results[0]["parts"] == one_rank(pool)["parts"]


def test_bfloat16_autocast_does_not_depend_on_the_cuts(pool: WorkerPool) -> None:
    alone = run(pool, "one rank", precision="bfloat16")
    split = run(pool, "heads on three ranks", precision="bfloat16")
    assert split[0]["parts"] == alone[0]["parts"]
    assert all(torch.equal(merged(split, "state")[name], tensor) for name, tensor in alone[0]["state"].items())
    assert alone[0]["parts"] != one_rank(pool)["parts"]


def test_running_statistics_are_those_of_one_process(pool: WorkerPool) -> None:
    """Recomputation once counted every microbatch twice: num_batches_tracked tells."""
    chain = models.build_chain()
    minibatch, inputs = models.make_minibatch(4, 1)
    models.plain_step(chain, minibatch, inputs, seed=7, step=1)
    expected = {f"{layer.name}.{name}": b for layer in chain.layers for name, b in layer.module.named_buffers()}
    for name in ("one-layer stages", "two replicas of two"):
        buffers = merged(run(pool, name, steps=1), "buffers")
        assert int(buffers["conv1.norm.num_batches_tracked"]) == 4
        for key, buffer in expected.items():
            torch.testing.assert_close(buffers[key], buffer, rtol=1e-6, atol=1e-7)


def test_clipping_and_adamw_are_torchs(pool: WorkerPool) -> None:
    chain = models.build_chain()
    minibatch, inputs = models.make_minibatch(4, 1)
    models.plain_step(chain, minibatch, inputs, seed=7, step=1)
    parameters = chain.named_parameters()
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 0.1)
    torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=1e-4).step()
    results = run(pool, "heads on three ranks", steps=1, clip_norm=0.1)
    assert results[0]["norms"][0] == pytest.approx(float(norm), rel=1e-6)
    tensors = merged(results, "state")
    for name, parameter in parameters.items():
        torch.testing.assert_close(tensors[name], parameter.detach(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_refused_by_every_rank(pool: WorkerPool, poison: str) -> None:
    layout = Cuts((0, 3, 8), (0, 1, 2))
    for message in pool.run(cases.refuse_a_step, 3, layout, poison):
        assert message.startswith("StepRefused: step 2:")
        if poison == "loss":
            assert "microbatch 2 (samples ['image-2']): loss=nan" in message
        else:
            assert "gradient is not finite in layers" in message


# -- the three parts of a step by themselves ---------------------------------------------------------------------------

TWO = Cuts((0, 7), (0, 1))


def step_in_parts(communicator: Communicator, layout: Cuts, ballots: list[bytes], poison: bool) -> dict[str, Any]:
    """Two steps by `compute`, `vote`, `apply`; the second one may be poisoned.

    Between vote and apply rank 0 leaves the others for good: what follows must be local.
    """
    chain, options = models.build_chain(), EngineOptions(**(cases.SETTINGS | {"clip_norm": 0.5}))
    placed = layout_for(layout, len(chain), options.num_blocks)
    ready = Ready(cases.shapes_of())
    engine = PipelineEngine(chain, models.loss, placed, options, communicator, torch.device("cpu"), ready)
    tensors = [t for layer in engine.layers for t in (*layer.parameters.values(), *layer.buffers.values())]
    untouched, verdicts = [], []
    for step in (1, 2):
        minibatch, inputs = models.make_minibatch(4, step)
        if poison and step == 2:
            minibatch.targets[1][0, 0, 0] = float("nan")
        before = [tensor.clone() for tensor in tensors]
        engine.compute(step, minibatch, inputs.__getitem__)
        wishes = step == 1 and communicator.rank == communicator.world_size - 1
        verdict = engine.vote(step, minibatch, wishes, ballots[communicator.rank] if step == 1 else b"")
        untouched.append(all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True)))
        if verdict.refusal is None:
            communicator.world_size, kept = 1, communicator.world_size  # a message to any rank would now fail
            communicator.sum_numbers = communicator.send = communicator.receive = None  # type: ignore[assignment, method-assign]
            engine.apply(verdict)
            communicator.world_size = kept
            for name in ("sum_numbers", "send", "receive"):
                delattr(communicator, name)
        else:
            engine.forget()
        verdicts.append(verdict)
    layers = engine.layers
    return {
        "untouched": untouched,
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
        "state": {f"{layer.name}.{n}": p.detach().clone() for layer in layers for n, p in layer.parameters.items()},
        "buffers": {f"{layer.name}.{n}": b.clone() for layer in layers for n, b in layer.buffers.items()},
        "idle": engine.idle,
        "name": placed.describe(communicator.rank),
    }


def test_idle_ranks_vote_and_the_step_is_as_without_them(pool: WorkerPool) -> None:
    """Four ranks are connected, two have stages."""
    alone = pool.run(cases.train, 2, TWO, {"clip_norm": 0.5}, 2)
    ballots = [b"", b"leave: me", b"", bytes(range(256)) * 9]
    results = pool.run(step_in_parts, 4, TWO, ballots, False)
    assert [result["idle"] for result in results] == [False, False, True, True]
    assert results[2]["name"] == "rank 2 (idle)"
    for result in results:
        assert result["verdicts"] == results[0]["verdicts"]
        first, second = (Verdict(**verdict) for verdict in result["verdicts"])
        assert (first.stop, second.stop) == (True, False)
        assert (list(first.ballots), second.ballots) == (ballots, ())
        assert [first.parts, second.parts] == alone[0]["parts"]
        assert [first.grad_norm, second.grad_norm] == alone[0]["norms"]
        assert result["untouched"] == [True, True]
    for rank in (0, 1):
        for kind in ("state", "buffers"):
            assert results[rank][kind].keys() == alone[rank][kind].keys()
            assert all(torch.equal(results[rank][kind][name], t) for name, t in alone[rank][kind].items())


def test_replicas_of_the_vote_apply_alone(pool: WorkerPool) -> None:
    """With two replicas the other one's running statistics arrive before the vote."""
    alone = pool.run(cases.train, 1, Cuts((0,), (0,)), {"clip_norm": 0.5}, 2)[0]
    for result in pool.run(step_in_parts, 3, Cuts((0,), (0,), 2), [b""] * 3, False)[:2]:
        for kind in ("state", "buffers"):
            assert all(torch.equal(result[kind][name], tensor) for name, tensor in alone[kind].items())


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_refused_step_is_a_verdict_with_a_sentence(pool: WorkerPool, ranks: int) -> None:
    results = pool.run(step_in_parts, ranks, TWO, [b"x"] * ranks, True)
    for result in results:
        first, second = (Verdict(**verdict) for verdict in result["verdicts"])
        assert (first.finite, first.refusal, first.ballots) == (True, None, (b"x",) * ranks)
        assert not second.finite
        assert second.refusal is not None
        assert "step 2: the loss is not finite in microbatch 1" in second.refusal
        assert result["untouched"] == [True, True]


def test_a_rank_holds_its_own_layers_only(pool: WorkerPool) -> None:
    total = sum(p.nbytes for p in models.build_chain().named_parameters().values())
    held = pool.run(cases.bytes_of_parameters, 3, Cuts((0, 5, 8), (0, 1, 2)))
    assert sum(held) == total
    # a head that three layers share is held where it is used, independent of the others
    assert sum(pool.run(cases.bytes_of_parameters, 3, Cuts((0, 5, 8), (0, 1, 2)), "factory_chain")) == total
    held = pool.run(cases.bytes_of_parameters, 2, Cuts((0, 9), (0, 1)))
    head = sum(p.nbytes for n, p in models.build_chain().named_parameters().items() if ".head." in n)
    assert sum(held) == total + head


@pytest.mark.parametrize("seed", [None, 0, 3])
def test_layers_of_factories_have_the_bits_of_those_that_one_process_builds(pool: WorkerPool, seed: int | None) -> None:
    """Any ranks may build them; the heads are tied, and with one layer per stage no rank has two of them."""
    each = Layout.pipelines(tuple(range(11)), 11, tuple(k % 6 for k in range(11)), 1, 4)
    layout = each if seed is None else random_layout(seed, 11, 4, 5)
    settings = {"num_blocks": 4}
    results = pool.run(cases.train, layout.world_size, layout, settings, 2, torch.float32, None, None, "factory_chain")
    alone = by_hand(pool)
    for result in results:
        assert result["parts"] == alone["parts"]
    for kind in ("gradients", "state", "buffers"):
        tensors, expected = merged(results, kind), alone[kind]
        assert tensors.keys() == expected.keys()
        assert not [name for name in expected if not torch.equal(tensors[name], expected[name])]


def test_a_rank_never_has_more_than_its_own_layers_of_factories(pool: WorkerPool) -> None:
    """The chain of one factory per layer beside the ready-made one, by the allocator's events while both are built."""
    bulk, slack = cases.BULK_BYTES, 1 << 16
    for peak in pool.run(cases.peak_of_building, 4, True):
        assert bulk <= peak <= bulk + slack
    for peak in pool.run(cases.peak_of_building, 4, False):
        assert 4 * bulk <= peak <= 4 * bulk + slack
