"""The numbers of a chaos run by fault class, computed by hand."""

from __future__ import annotations

import pytest

from tests.rig.tally import Hit, by_class, causes_found, quantile


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 3.0), (0.9, 5.0), (1.0, 5.0)])
def test_a_quantile_is_one_of_the_values(share, value):
    assert quantile([5.0, 1.0, 3.0, 2.0, 4.0], share) == value


def test_classes_are_counted_apart_and_faults_without_recovery_have_no_times():
    hits = [
        Hit(0, "kill", 0.0, recovered=1.0, gap=2.0),
        Hit(1, "kill", 0.0, recovered=3.0),
        Hit(2, "kill", 0.0),
        Hit(3, "bulk", 0.0),
    ]
    assert by_class(hits) == [
        {"kind": "bulk", "count": 1, "recovered": 0},
        {
            "kind": "kill",
            "count": 3,
            "recovered": 2,
            "recovered_seconds": {"p50": 2.0, "p90": 3.0, "max": 3.0},
            "gap_seconds": {"p50": 2.0, "p90": 2.0, "max": 2.0},
        },
    ]


def lost(member, time, cause):
    return {"kind": "lost", "member": member, "time": time, "cause": cause, "host": "h"}


def test_of_the_victims_that_were_lost_the_causes_are_compared():
    hits = [
        Hit(0, "kill", 1.0, causes={"a": "killed"}),
        Hit(1, "pause", 2.0, causes={"b": "hung", "e": "hung"}),
        Hit(2, "cut", 3.0, causes={"c": "network", "d": "network"}),
        Hit(3, "kill", 9.0, causes={"e": "killed"}),
    ]
    events = [
        lost("a", 7201.5, "killed"),  # by a host whose clock has jumped
        lost("c", 3.5, "network"),
        lost("d", 3.5, "killed"),
        {"kind": "morph", "time": 4.0},
        lost("e", 9.5, "killed"),
        lost("z", 9.6, "memory"),
    ]
    lost_at = {"a": 1.5, "c": 3.5, "d": 3.5, "e": 9.5, "z": 9.6}
    assert causes_found(hits, events, lost_at) == (3, ["d (cut): network, found killed"])
