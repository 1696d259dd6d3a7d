"""The schedule of a chaos run: a pure function of its arguments that hits only existing members."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from tests.rig.schedule import KINDS, NETWORK, POINTS, schedule, weights_of
from varuna_capslog.base.errors import CapslogError


def drawn(seed, count, weights=None, mean=0.5):
    return list(itertools.islice(schedule(seed, weights or weights_of(None, True), mean), count))


def test_the_same_seed_gives_the_same_faults_and_another_one_others():
    assert drawn(7, 200) == drawn(7, 200)
    assert drawn(7, 200) != drawn(8, 200)


def test_all_classes_come_in_about_their_shares_and_in_their_bounds():
    weights = weights_of(None, True)
    faults = drawn(1, 8000)
    counts, total = Counter(fault.kind for fault in faults), sum(weights.values())
    assert set(counts) == set(KINDS) | set(NETWORK)
    for kind, count in counts.items():
        assert count == pytest.approx(8000 * weights[kind] / total, rel=0.25)
    assert all(0 <= fault.delay <= 0.2 and fault.lasts > 0 for fault in faults)
    assert {fault.count for fault in faults if fault.kind == "bulk"} == {2, 3}
    assert {fault.count for fault in faults if fault.kind != "bulk"} == {1}
    for kind, points in POINTS.items():
        assert {fault.point for fault in faults if fault.kind == kind} == set(points)
    mean = sum(fault.after for fault in faults) / len(faults)
    assert math.isclose(mean, 0.5, rel_tol=0.05)


def test_victims_are_different_ones_and_never_more_than_there_are():
    for fault in drawn(3, 100):
        for candidates, count in itertools.product(range(1, 6), range(1, 4)):
            victims = fault.pick(candidates, count)
            assert len(victims) == len(set(victims)) == min(candidates, count)
            assert all(0 <= index < candidates for index in victims)


def test_classes_are_chosen_by_name_and_share():
    assert weights_of("kill=3,notice", False) == {"kill": 3.0, "notice": 1.0}
    assert weights_of(None, False).get("cut") is None
    assert {fault.kind for fault in drawn(0, 50, weights_of("store,kill=0", False))} == {"store"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kil", "kil"),
        ("cut", "network"),
        ("kill=many", "many"),
        ("kill=-1", "-1"),
        ("kill=nan", "nan"),
        ("kill=0,notice=0", "share 0"),
    ],
)
def test_wrong_classes_are_named(text, message):
    with pytest.raises(CapslogError, match=message):
        weights_of(text, False)
