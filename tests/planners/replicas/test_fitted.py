"""CAPTURE's printed predictor on runs that were made by its own model of the bytes."""

from __future__ import annotations

import dataclasses

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.replicas.fitted import FittedPeaks
from varuna_capslog.profiles.record import LayerProfile, Observation, Profile
from varuna_capslog.profiles.runs import stage_runs

WEIGHTS, ACTIVATIONS = [100, 40, 700], [8, 4, 0]
"""Of each layer: bytes that every device holds, and bytes of a sample."""


def parts(first: int, end: int) -> tuple[int, int]:
    return sum(WEIGHTS[first:end]), sum(ACTIVATIONS[first:end])


def profile(degrees: tuple[int, ...] = (1, 2, 4)) -> Profile:
    rows = []
    for samples in (8, 16):
        for degree in degrees:
            for first, end in stage_runs(3):
                weights, activations = parts(first, end)
                size, parallel = weights + activations * samples // degree, {"kind": "data", "degree": degree}
                rows.append(Observation((first, end), "cpu", samples, {}, size, parallel))
    layers = [LayerProfile(f"layer.{n}", 1, None if n == 0 else 1) for n in range(3)]
    return Profile(tuple(layers), by_degree=tuple(rows))


def test_a_profiled_degree_is_a_line_through_both_batch_sizes() -> None:
    peaks = FittedPeaks(profile())
    assert peaks.degrees == {"data": [1, 2, 4]}
    for first, end in [(0, 1), (1, 3), (0, 3)]:
        weights, activations = parts(first, end)
        for degree in (1, 2, 4):
            assert peaks.of(first, end, "data", degree, 64) == weights + activations * 64 / degree


def test_other_degrees_are_a_logarithm_which_loses_the_activations_at_8_and_weights_beyond() -> None:
    """The paper's own bytes are weights + activations / d: its logarithm has no activations left at degree 8."""
    peaks, (weights, activations) = FittedPeaks(profile()), parts(0, 3)
    assert peaks.of(0, 3, "data", 8, 64) == pytest.approx(weights)
    assert peaks.of(0, 3, "data", 16, 64) == pytest.approx(weights - activations * 64 / 4)


def test_a_tensor_stage_on_one_device_is_the_one_of_a_data_stage() -> None:
    peaks = FittedPeaks(profile())
    assert peaks.of(0, 2, "tensor", 1, 8) == peaks.of(0, 2, "data", 1, 8)


def test_what_was_not_profiled_is_refused() -> None:
    with pytest.raises(CapslogError, match="no runs by degree"):
        FittedPeaks(dataclasses.replace(profile(), by_degree=()))
    with pytest.raises(CapslogError, match=r"kind 'tensor' on \[\] devices; a fit for 4 needs two degrees"):
        FittedPeaks(profile()).of(0, 3, "tensor", 4, 8)
    with pytest.raises(CapslogError, match=r"kind 'data' on \[1, 2\] devices; a fit for 4"):
        FittedPeaks(profile((1, 2))).of(0, 3, "data", 4, 8)
