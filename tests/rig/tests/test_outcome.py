"""The line that a chaos run adds to a file of results."""

from __future__ import annotations

import json

import pytest

from tests.rig.outcome import ChaosOptions, ChaosOutcome
from tests.rig.tally import Hit
from varuna_capslog.base.version import __version__


@pytest.mark.parametrize(("breaches", "outcome"), [([], "passed"), (["loss differs"], "failed")])
def test_a_line_of_results_says_what_was_done_and_how_it_ended(breaches, outcome):
    hits = [Hit(0, "kill", 1.0, recovered=0.5, gap=0.25), Hit(1, "store", 2.0)]
    options = ChaosOptions(seed=7, hosts=3, workers=1, network="relay", mean_seconds=0.1)
    done = ChaosOutcome(options, breaches, hits, 5, 6, 100, 9, 1, 2, 12.34, [2, 3], 1, "sync", packets={"lost": 3})
    line = json.loads(json.dumps(done.to_json()))
    versions = line.pop("versions")
    assert versions["varuna_capslog"] == __version__
    assert set(versions) == {"varuna_capslog", "commit", "torch", "python", "system"}
    assert line.pop("date").endswith("Z")
    assert [row["kind"] for row in line.pop("classes")] == ["kill", "store"]
    assert line.pop("causes") == {"right": 0, "wrong": []}
    assert line == {
        "format": "varuna-capslog/chaos/1", "seed": 7, "outcome": outcome, "breaches": breaches,
        "hosts": 3, "workers": 1, "network": "relay", "store": "tcp", "plans": False, "mean_seconds": 0.1,
        "faults": 2, "joins": 5, "generations": 6, "layouts": [2, 3], "steps": 100, "steps_made_again": 9,
        "links": {"delay_seconds": 0.0, "loss": 0.0, "bytes_per_second": 0}, "packets": {"lost": 3}, "store_losses": 1,
        "regresses": 2, "redundancy": 1, "protection": "sync", "seconds": 12.3,
    }  # fmt: skip
