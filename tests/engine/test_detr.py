"""DETR's step on pipelines equals the uncut model's: dilated, heads shared by three stages, trainable BatchNorm, split.
RT-DETR's equals that of transformers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.engine import detr
from tests.engine.compare import gradient_error, merged
from tests.engine.layouts import Cuts
from tests.engine.pool import WorkerPool
from tests.sweeps import some


@functools.cache
def oracle(model: str) -> tuple[float, dict[str, torch.Tensor]]:
    return detr.of_transformers(model) if model == "rt-detr" else detr.plain(model, seed=7)


# 10 layers with the short resnet50, 11 and 12 (separate heads) with resnet18 to layer3
CASES = {
    "dilated on four": ("dilated", Cuts((0, 3, 7, 9), (0, 1, 2, 3)), "varuna", True),
    "variants, recomputed": ("variants", Cuts((0, 3, 7), (0, 1, 2)), "1f1b", True),
    "shared heads, two replicas": ("shared heads", Cuts((0, 7, 9), (0, 1, 2), 2), "gpipe", False),
    "split by rows and heads": ("split, shared heads", Cuts((0, 7, 9, 16, 33), (0, 1, 2, 3, 0)), "1f1b", True),
    "rt-detr on four": ("rt-detr", Cuts((0, 5, 12, 15), (0, 1, 2, 3)), "1f1b", True),
    "batch norm on eight": ("batch norm", Cuts((0, 1, 2, 4, 6, 8, 10, 11), tuple(range(8))), "1f1b", True),
    "dilated, frozen stage first": ("dilated", Cuts((0, 1, 4), (0, 1, 2)), "1f1b", False),
    "shared heads on four": ("shared heads", Cuts((0, 8, 9, 10), (0, 1, 2, 3)), "varuna", True),
    "split by heads and keys": ("split, keys", Cuts((0, 22, 23, 31, 39), (0, 1, 2, 3, 0)), "1f1b", True),
    "rt-detr, two replicas": ("rt-detr", Cuts((0, 9, 16), (0, 1, 2), 2), "varuna", True),
}


@functools.cache
def alone(pool: WorkerPool, model: str) -> dict[str, Any]:
    result: dict[str, Any] = pool.run(detr.step, 1, model, Cuts((0,), (0,)), {})[0]
    return result


@pytest.mark.parametrize("case", some(CASES, 6))
def test_detr_step_equals_the_unsplit_models(pool: WorkerPool, case: str) -> None:
    model, layout, schedule, recompute = CASES[case]
    if model == "rt-detr":
        pytest.importorskip("transformers", minversion="5.0")
    single, options = alone(pool, model), {"schedule": schedule, "recompute": recompute}
    results = pool.run(detr.step, layout.world_size, model, layout, options, single["shapes"])
    loss, gradients = oracle(model)
    assert results[0]["loss"] == pytest.approx(loss, rel=1e-5)
    error, worst = gradient_error(merged(results, "gradients"), gradients)
    assert error <= 1e-5, f"{worst}: {error:.2e}"
    assert [result["loss"] for result in results] == [single["loss"]] * len(results)
    state = merged(results, "state")
    assert not [name for name, tensor in single["state"].items() if not torch.equal(state[name], tensor)]
