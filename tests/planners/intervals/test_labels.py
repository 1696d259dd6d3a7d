"""Which of many points no other one is below, beside a comparison of all with all."""

from __future__ import annotations

import numpy as np
import pytest

from varuna_capslog.memory.segments import Sums
from varuna_capslog.planners.intervals.labels import Kin, Labels, fewer, undominated


@pytest.mark.parametrize("seed", range(6))
def test_undominated_points_and_those_that_stand_for_the_others(seed: int) -> None:
    """Few values, so that many points are equal; more points than are compared at a time."""
    draw = np.random.default_rng(seed)
    for count in (1, 7, 60, 700):
        points = draw.integers(0, draw.integers(2, 40), (count, draw.integers(1, 5))).astype(np.float64)
        before = draw.integers(10, 60, (draw.integers(0, 4), points.shape[1])).astype(np.float64)
        found, stands = undominated(points, before)
        as_small = (points[None] <= points[:, None]).all(axis=2)  # [point, other]
        equal = as_small & as_small.T
        better = (as_small & ~equal) | (equal & np.tri(count, k=-1, dtype=bool))
        beaten = better.any(axis=1) | (before[None] <= points[:, None]).all(axis=2).any(axis=1)
        assert found.tolist() == np.flatnonzero(~beaten).tolist()
        there = np.concatenate([before, points[found]])
        assert (there[stands] <= points).all()
        assert stands[found].tolist() == list(range(len(before), len(there)))


def test_a_label_that_stands_for_another_one_has_its_lower_numbers_less_its_outputs() -> None:
    """What keeps its outputs adds less to the device with the next segment; its seconds and its host tier do not."""
    numbers, values = np.zeros(2, dtype=np.intp), np.array([[6.0, 10.0]] * 2)
    labels = Labels(*[numbers] * 6, again=values, sums=Sums(*[values] * len(Sums._fields)))
    kin = Kin(numbers, np.array([False, True]), np.array([0.0, 5.0]), numbers)
    found = fewer(labels, np.array([0, 0]), kin)
    assert len(found) == 1
    assert found.again.tolist() == found.sums.host.tolist() == found.sums.forward.tolist() == [[6.0], [6.0]]
    for column in (found.sums.waits, found.sums.held, found.sums.back, found.sums.again):
        assert column.tolist() == [[6.0], [5.0]]
