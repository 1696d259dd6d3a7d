"""The memory model of inference, compared with its equation for every stage."""

from __future__ import annotations

import random

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import resolve
from varuna_capslog.profiles.conditions import CACHE_BYTES, PURPOSE
from varuna_capslog.profiles.record import Observation, Profile, SharedParameter, layers_of_runs
from varuna_capslog.profiles.runs import stage_runs
from varuna_capslog.schedules import RunShape

LAYERS, SHARED = 6, (1, 2, 5)


def drawn(seed: int, **conditions: object) -> Profile:
    """Draw a profile: weights below 1,000 (layers 1, 2 and 5 share 70 bytes), transients and caches below 500."""
    rng = random.Random(seed)
    weights = [rng.randrange(100, 1000) for _ in range(LAYERS)]
    rows = []
    for first, end in stage_runs(LAYERS):
        uses = len({*SHARED} & {*range(first, end)})
        static = sum(weights[first:end]) - 70 * max(0, uses - 1)
        rows.append(
            Observation((first, end), "cpu", 2, {}, static + rng.randrange(500), static_bytes=static, saved_bytes=0)
        )
    defaults = {PURPOSE: "inference", "microbatch_size": 2, CACHE_BYTES: [rng.randrange(500) for _ in range(LAYERS)]}
    layers = layers_of_runs([f"l{n}" for n in range(LAYERS)], rows)
    return Profile(
        layers, conditions=defaults | conditions, shared=(SharedParameter("w", 70, SHARED),), observations=rows
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_equation_for_every_stage(seed: int) -> None:
    profile = drawn(seed)
    run = {row.layers: row for row in profile.observations}
    name, costs = resolve("auto", profile, RunShape(3, microbatch_size=2))
    assert name == "inference"
    for first in range(LAYERS):
        for end in range(first + 1, LAYERS + 1):
            weights = sum(run[k, k + 1].static_bytes for k in range(first, end))
            weights -= 70 * max(0, len({*SHARED} & {*range(first, end)}) - 1)
            alone = run[first, first + 1]
            works = [alone.peak_bytes - alone.static_bytes]
            works += [run[k - 1, k + 1].peak_bytes - run[k - 1, k + 1].static_bytes for k in range(first + 1, end)]
            cached = 6 * sum(profile.conditions[CACHE_BYTES][first:end])
            assert costs.stage_bytes(first, end) == weights + cached + max(works)


def test_profiles_of_one_purpose_feed_the_models_of_that_purpose() -> None:
    profile = drawn(0)
    with pytest.raises(CapslogError, match="memory model '1f1b' describes training, but the profile is of inference"):
        resolve("1f1b", profile, RunShape())
    training = Profile(profile.layers, observations=profile.observations)
    with pytest.raises(CapslogError, match="'inference' is for profiles of inference, but this one is of training"):
        resolve("inference", training, RunShape(1))


def test_caches_that_cannot_be_added_up_are_refused() -> None:
    with pytest.raises(CapslogError, match="has 2 numbers for 6 layers"):
        resolve("auto", drawn(0, **{CACHE_BYTES: [1, 2]}), RunShape(1))
    with pytest.raises(CapslogError, match="more than 1 EiB"):
        resolve("auto", drawn(0, **{CACHE_BYTES: [1 << 58] * 6}), RunShape(1))
    with pytest.raises(CapslogError, match=r"conditions.cache_bytes_of_a_sequence\[0\] is -1"):
        drawn(0, **{CACHE_BYTES: [-1] * 6})
