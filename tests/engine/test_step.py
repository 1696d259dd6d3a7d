"""A step of the pipeline equals the unsplit model's step: engine rule 1, against plain autograd as the oracle."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.engine import cases, models
from tests.engine.compare import gradient_error, merged
from tests.engine.pool import WorkerPool
from varuna_capslog.engine.pipeline import Layout

# 0 stem (frozen) | 1 conv1 | 2 pool (no parameters) | 3 conv2 | 4 sequence (no parameters) | 5, 6 encoders | 7
# queries |
# 8, 9, 10 decoders, which share their head
CASES = {
    "one rank": (Layout((0,), (0,)), "varuna", True),
    "frozen-only first stage": (Layout((0, 1), (0, 1)), "varuna", True),
    "frozen-only first stage, no recompute": (Layout((0, 1), (0, 1)), "1f1b", False),
    "stage without parameters": (Layout((0, 2, 3), (0, 1, 2)), "1f1b", True),
    "before the shared heads": (Layout((0, 5, 8), (0, 1, 2)), "gpipe", False),
    "heads on three ranks": (Layout((0, 8, 9, 10), (0, 1, 2, 3)), "varuna", True),
    "one-layer stages": (Layout((0, 3, 4, 5), (0, 1, 2, 3)), "gpipe", True),
    "eight ranks": (Layout((0, 1, 2, 4, 6, 8, 9, 10), tuple(range(8))), "varuna", True),
    "eight ranks, no recompute": (Layout((0, 1, 2, 4, 6, 8, 9, 10), tuple(range(8))), "1f1b", False),
    "stages in any order": (Layout((0, 2, 4, 7, 8, 10), (0, 1, 2, 0, 2, 1)), "1f1b", False),
    "several stages per rank": (Layout((0, 2, 4, 7, 8, 10), (0, 1, 0, 1, 0, 1)), "varuna", True),
    "two replicas": (Layout((0,), (0,), 2), "varuna", True),
    "two replicas of two": (Layout((0, 7), (0, 1), 2), "1f1b", True),
    "two replicas of four": (Layout((0, 2, 8, 9), (0, 1, 2, 3), 2), "varuna", True),
}


def run(pool: WorkerPool, name: str, **options: Any) -> list[dict[str, Any]]:
    layout, schedule, recompute = CASES[name]
    steps, dtype = options.pop("steps", 2), options.pop("dtype", torch.float32)
    twist = options.pop("twist", None)
    settings = {"schedule": schedule, "recompute": recompute} | options
    return pool.run(cases.train, layout.world_size, layout, settings, steps, dtype, twist)


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
        found, expected = merged(results, kind), one_rank(pool)[kind]
        assert found.keys() == expected.keys()
        different = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not different


def test_hooks_of_a_stage_run_once_before_its_first_and_after_its_last_use(pool: WorkerPool) -> None:
    results = run(pool, "several stages per rank", steps=1)
    assert sorted(results[0]["calls"]) == [f"{when} {stage}" for when in ("after", "before") for stage in (0, 2, 4)]
    assert results[0]["calls"][0] == "before 0"
    assert results[0]["calls"][-1] == "after 0"


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
    """NCCL's way of sending, tried with gloo: every pair that talks has a group, and no message is needed out of
    order.
    """
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
        found = merged(run(pool, name, steps=1), "buffers")
        assert int(found["conv1.norm.num_batches_tracked"]) == 4
        for key, buffer in expected.items():
            torch.testing.assert_close(found[key], buffer, rtol=1e-6, atol=1e-7)


def test_clipping_and_adamw_are_torchs(pool: WorkerPool) -> None:
    chain = models.build_chain()
    minibatch, inputs = models.make_minibatch(4, 1)
    models.plain_step(chain, minibatch, inputs, seed=7, step=1)
    parameters = chain.named_parameters()
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 0.1)
    torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=1e-4).step()
    results = run(pool, "heads on three ranks", steps=1, clip_norm=0.1)
    assert results[0]["norms"][0] == pytest.approx(float(norm), rel=1e-6)
    found = merged(results, "state")
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_refused_by_every_rank(pool: WorkerPool, poison: str) -> None:
    layout = Layout((0, 3, 8), (0, 1, 2))
    for message in pool.run(cases.refuse_a_step, 3, layout, poison):
        assert message.startswith("StepRefused: step 2:")
        if poison == "loss":
            assert "microbatch 2 (samples ['image-2']): loss=nan" in message
        else:
            assert "gradient is not finite in layers" in message
