"""Replicas share the optimizer's moments where they do not fit otherwise: evenly, and as the fold counts it."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.memory.machine import Model, profile_of
from tests.planning.asking import plan
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.placed.equal_pipelines import with_shared_moments
from varuna_capslog.planning.verdict import fold_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Observation, Profile, SharedParameter
from varuna_capslog.schedules import RunShape

RUN, LINK = RunShape(12, "1f1b", False), Link(1000.0)


def profile_with_moments() -> Profile:
    """Return eight layers of equal seconds; half of each one's static bytes are moments."""
    rows = profile_of(Model.random(random.Random(5), 8, True, 100), "cuda")

    def told(row: Observation) -> Observation:
        assert row.action_bytes is not None
        assert row.static_bytes is not None
        bytes_ = dataclasses.replace(row.action_bytes, moment_bytes=row.static_bytes // 2)
        return dataclasses.replace(row, action_bytes=bytes_)

    costs = {"forward_seconds": 1.0, "backward_seconds": 2.0, "parameter_bytes": 100}
    layers = tuple(dataclasses.replace(row, **costs) for row in rows.layers)
    return dataclasses.replace(rows, layers=layers, observations=tuple(map(told, rows.observations)))


def free_plan(profile: Profile, devices: int) -> Plan:
    return plan(profile, devices, "pipedream", run=RUN, link=LINK)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_every_layer_is_kept_once_and_every_replica_keeps_about_as_much(devices: int) -> None:
    profile = profile_with_moments()
    free = free_plan(profile, devices)
    shared = with_shared_moments(profile, free)
    assert shared is not None
    sizes = [(row.static_bytes or 0) // 2 for row in profile.layers]
    kept = [sorted(frozenset(stage.numbers) - stage.moments_elsewhere) for stage in shared.stages]
    assert sorted(layer for layers in kept for layer in layers) == list(range(8))
    loads = [sum(sizes[layer] for layer in layers) for layers in kept]
    assert max(loads) - min(loads) < max(sizes)
    for before, after, load in zip(fold_plan(profile, free, RUN), fold_plan(profile, shared, RUN), loads, strict=True):
        assert before.peak_bytes - after.peak_bytes == sum(sizes) - load
        assert after.host_bytes == 0


def test_a_plan_shares_them_only_where_it_does_not_fit_otherwise() -> None:
    profile = profile_with_moments()
    free = free_plan(profile, 2)
    assert free.peak_bytes is not None
    assert not any(stage.moments for stage in free.stages)
    with_room, tight = (
        plan(profile, 2, "pipedream", capacity=size, run=RUN, link=LINK)
        for size in (free.peak_bytes, free.peak_bytes * 9 // 10)
    )
    assert [stage.moments for stage in with_room.stages] == [(), ()]
    assert tight.fits
    assert [stage.numbers for stage in tight.stages] == [list(range(8))] * 2
    assert all(stage.moments_elsewhere for stage in tight.stages)
    assert any("replicas share the optimizer's moments" in note for note in tight.notes)
    assert tight.step_seconds is not None
    assert free.step_seconds is not None
    values = 8 * LINK.seconds(100)
    assert tight.step_seconds == pytest.approx(free.step_seconds + values)


def test_layers_with_shared_parameters_keep_theirs_everywhere() -> None:
    profile = profile_with_moments()
    free = free_plan(profile, 2)
    tied = dataclasses.replace(profile, shared=(SharedParameter("tied", 40, (0, 7)),))
    shared = with_shared_moments(tied, free)
    assert shared is not None
    assert not any({0, 7} & stage.moments_elsewhere for stage in shared.stages)
    untold = [dataclasses.replace(row, action_bytes=None) for row in profile.observations]
    assert with_shared_moments(dataclasses.replace(profile, observations=tuple(untold)), free) is None
    alone = dataclasses.replace(
        free, stages=(dataclasses.replace(free.stages[0], blocks=None),), ranks=free.ranks[:1], actions=None
    )
    assert with_shared_moments(profile, alone) is None, "no replicas"
