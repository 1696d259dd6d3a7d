"""Running sums of the seconds of layers."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from tests.planners.timed import chain
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.profiles.record import Profile


def test_ranges_of_equal_layers_have_equal_seconds_wherever_they_begin() -> None:
    draw = random.Random(4)
    block = list(chain(draw, 3).layers)
    # only the first layer of a chain has no added bytes
    layers = [replace(layer, name=f"{number}") for number, layer in enumerate(block[:1] + 40 * block[1:])]
    profile = Profile(tuple(layers))
    for sums in (LayerSeconds.of_profile(profile).forward, LayerSeconds.of_profile(profile).backward):
        for size in (1, 5, 60):
            ranges = sums[1 + size :] - sums[1:-size]
            assert np.array_equal(ranges[2:], ranges[:-2]), "the sums of float seconds depend on where a range begins"
    whole = sum(layer.forward_seconds or 0.0 for layer in profile.layers)
    assert abs(LayerSeconds.of_profile(profile).forward[-1] - whole) <= 1e-12 * whole
