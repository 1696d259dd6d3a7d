"""Trimmed stages: dummies of the right shapes that hold shared parameters only; and shapes without computing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.pool import WorkerPool
from tests.varuna_plugin import models, trimmed
from tests.varuna_plugin.cases import Case
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin.stages import CutShapes
from varuna_capslog.varuna_plugin.tracing import trace_model


def shapes_of(model: models.Model, sample: dict[str, Any]) -> tuple[Any, CutShapes]:
    trace = trace_model(model, sample, models.PlainCut)
    return trace, CutShapes(model, tuple(cut.name for cut in trace.cuts))


@pytest.mark.parametrize("size", [(1, 6, 10), (3, 12, 8), (2, 8, 8)])
def test_shapes_without_computing_are_those_of_a_real_forward(size: tuple[int, int, int]) -> None:
    model = models.Model(models.PlainCut, dropout=0.1)
    _, shapes = shapes_of(model, models.get_batch(2))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    inferred = shapes(models.batch(*size))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    real = trace_model(model, models.batch(*size), models.PlainCut)
    assert inferred == [cut.tensors for cut in real.cuts]
    # the same size, other values
    assert shapes(models.batch(*size, seed=5)) is inferred


def test_shapes_that_depend_on_values_are_refused_with_a_sentence() -> None:
    class Deciding(models.Model):
        def forward(self, images: Any, targets: Any) -> Any:
            return super().forward(images[: int(images.sum() > 0) + 1], targets)

    _, shapes = shapes_of(Deciding(models.PlainCut), models.get_batch(1))
    with pytest.raises(CapslogError, match="code before a cut asks tensors for their values"):
        shapes(models.get_batch(1))


@pytest.mark.parametrize("interest", [[2], [1, 2], [0, 3]])
def test_trimmed_stages_send_what_whole_ones_would(pool: WorkerPool, interest: list[int]) -> None:
    """Every microbatch of another size, one Linear shared by three stages, two tensors per cut."""
    case = Case([0, 2, 3, 4], ragged=True, steps=2)
    untrimmed = pool.run(trimmed.crossing, 4, case, None)
    results = pool.run(trimmed.crossing, 4, case, interest)
    shared = {name for name in untrimmed[2]["held"] if ".project." in name}
    assert shared
    for stage, (full, ours) in enumerate(zip(untrimmed, results, strict=True)):
        assert ours["seen"] == full["seen"], stage
        if stage in interest:
            assert ours["held"] == full["held"]
            assert set(ours["gradients"]) == set(full["gradients"])
            assert all(torch.isfinite(gradient).all() for gradient in ours["gradients"].values())
        else:
            assert set(ours["held"]) - {"capslog_anchor"} == shared & set(full["held"]), stage
        assert "nothing to write" in ours["refused"]


def test_trimming_with_replicas(pool: WorkerPool) -> None:
    case = Case([0, 3], replicas=2, steps=2)
    results = pool.run(trimmed.crossing, 4, case, [1])
    ends = [result for result in results if result["stage"] == 1]
    assert len(ends) == 2
    for name, gradient in ends[0]["gradients"].items():
        assert torch.equal(gradient, ends[1]["gradients"][name]), name
