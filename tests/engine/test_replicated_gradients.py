"""The norm of a gradient is that of float64, also where it is taken in pieces."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from varuna_capslog.engine.replicated import norm_of


@pytest.mark.parametrize("shape", [(), (5,), (1 << 20,), ((1 << 20) + 1,), (1100, 1030)])
def test_the_norm_is_float64s(shape: tuple[int, ...]) -> None:
    gradient = 1e25 * torch.randn(shape, generator=torch.Generator().manual_seed(0))  # squares overflow float32
    expected = math.sqrt(math.fsum((gradient.double().numpy() ** 2).ravel()))
    assert float(norm_of(gradient)) == pytest.approx(expected, rel=1e-13)
    if len(shape) == 2:
        transposed = gradient.t().contiguous().t()
        assert float(norm_of(transposed)) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(value: float) -> None:
    gradient = torch.zeros((1 << 20) + 7)
    gradient[-1] = value
    assert not np.isfinite(float(norm_of(gradient)))
