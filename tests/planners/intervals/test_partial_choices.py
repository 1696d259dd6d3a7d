"""Undominated points, compared with a comparison of all pairs."""

from __future__ import annotations

import numpy as np
import pytest

from varuna_capslog.memory.segments import Sums
from varuna_capslog.planners.intervals.partial_choices import WHOLE, Dominance, PartialChoices, fewer, undominated


@pytest.mark.parametrize("seed", range(6))
def test_undominated_points_and_those_that_stand_for_the_others(seed: int) -> None:
    """Few values, so that many points are equal; more points than one comparison takes; points of several classes."""
    draw = np.random.default_rng(seed)
    for count in (1, 7, 60, 700):
        points = draw.integers(0, draw.integers(2, 40), (count, draw.integers(1, 5))).astype(np.float64)
        family, phase = draw.integers(0, 2, count), draw.integers(0, 3, count)
        kin = Dominance(family, draw.random(count) < 0.5, 5.0 * draw.integers(0, 3, count), phase)
        stands = undominated(points, *kin.classes)
        may = (family[:, None] == family) & (kin.keeps <= kin.keeps[:, None])
        may &= (kin.outputs == 0) | (kin.outputs == kin.outputs[:, None])
        may &= (phase == 0) | (phase == phase[:, None])
        as_small = may & (points[None] <= points[:, None]).all(axis=2)  # [point, other]
        equal = as_small & as_small.T
        beaten = ((as_small & ~equal) | (equal & np.tri(count, k=-1, dtype=bool))).any(axis=1)
        assert (stands == np.arange(count)).tolist() == (~beaten).tolist()
        assert not beaten[stands].any()
        assert as_small[np.arange(count), stands].all()


def test_a_label_that_stands_for_another_one_has_its_lower_numbers_less_its_outputs() -> None:
    """Keeping its outputs, a label adds fewer device bytes with the next segment, but equal seconds and host bytes."""
    names, numbers = Sums._fields, np.zeros(2, dtype=np.intp)
    values = np.array([[[6.0, 10.0]] * 2] * (1 + len(names)))
    labels = PartialChoices(np.zeros((len(WHOLE), 2), dtype=np.intp), values, names)
    kin = Dominance(numbers, np.array([False, True]), np.array([0.0, 5.0]), numbers)
    kept = fewer(labels, np.array([0, 0]), kin)
    assert len(kept) == 1
    assert kept.again.tolist() == kept.sums.host.tolist() == kept.sums.forward.tolist() == [[6.0], [6.0]]
    for column in (kept.sums.waits, kept.sums.held, kept.sums.back, kept.sums.again):
        assert column.tolist() == [[6.0], [5.0]]
