"""M_p(l, m) = M_i(l) + sum of M_a, and the runs that the equation does not describe."""

from __future__ import annotations

import random

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import MEMORY_MODELS
from varuna_capslog.memory.additive import AdditiveCosts, stage_costs
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.schedules import RunShape


def test_every_stage_is_the_sum_of_the_equation() -> None:
    rng = random.Random(0)
    isolated = [rng.randrange(1000) for _ in range(12)]
    added = [None] + [rng.randrange(-500, 1000) for _ in range(11)]
    costs = AdditiveCosts.of_statistics(isolated, added)
    for first in range(12):
        for end in range(first + 1, 13):
            assert costs.stage_bytes(first, end) == isolated[first] + sum(added[first + 1 : end])
    assert costs.peaks([0, 4, 5]) == [costs.stage_bytes(0, 4), costs.stage_bytes(4, 5), costs.stage_bytes(5, 12)]


def test_costs_of_a_profile() -> None:
    profile = Profile(layers=(LayerProfile("a", 5), LayerProfile("b", 6, 2)))
    assert stage_costs(profile, RunShape()).stage_bytes(0, 2) == 7


def test_statistics_of_unequal_length_are_refused() -> None:
    with pytest.raises(CapslogError, match="2 M_i and 1 M_a"):
        AdditiveCosts.of_statistics([1, 2], [None])


@pytest.mark.parametrize("schedule", ["varuna", "1f1b", "gpipe"])
def test_only_one_live_graph_is_described(schedule: str) -> None:
    gap = MEMORY_MODELS["additive"].gap
    assert gap(RunShape(None, schedule)) is None
    assert f"schedule '{schedule}' without recomputation" in (gap(RunShape(None, schedule, False)) or "")
    assert "kept on the device" in (gap(RunShape(None, schedule, True, "device")) or "")
