"""The runs of the three profilers, beside the criteria C1 to C3 and the paper's counts."""

from __future__ import annotations

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.profiles.runs import (
    capslog_partitionings,
    mcap_partitionings,
    stage_runs,
)


def test_every_layer_alone_and_every_pair() -> None:
    assert stage_runs(3) == [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3)]
    assert stage_runs(1) == [(0, 1)]


@pytest.mark.parametrize(
    ("num_layers", "capslog", "mcap", "mcap_formula", "packed"),
    [(25, 8, 25, 18, 7), (42, 15, 42, 35, 11), (48, 16, 48, 41, 12)],
)
def test_counts_of_the_paper(num_layers: int, capslog: int, mcap: int, mcap_formula: int, packed: int) -> None:
    assert len(capslog_partitionings(num_layers, 8)) == capslog
    launches = mcap_partitionings(num_layers, 8)
    assert len(launches) == mcap
    assert sum(len(launch.layers_per_gpu) == 8 for launch in launches) == mcap_formula
    assert -(-len(stage_runs(num_layers)) // 8) == packed


def test_partitionings_of_the_paper_s_example() -> None:
    """Sec. III-A: [1, ..., L-(G-1)], then [Z, 1, ..., R] with Z = X + (G-2); pairs that begin at 0 and at 1."""
    lists = [launch.layers_per_gpu for launch in capslog_partitionings(12, 4)]
    assert lists[:5] == [(1, 1, 1, 9), (3, 1, 1, 7), (5, 1, 1, 5), (7, 1, 1, 3), (9, 1, 1, 1)]
    assert lists[5:8] == [(2, 2, 2, 6), (6, 2, 2, 2), (1, 2, 2, 7)]
    assert lists[8:] == [(5, 2, 2, 3), (9, 2, 1)]


@pytest.mark.parametrize("gpus", [3, 4, 5, 8, 11])
def test_criteria_hold_for_every_layer(gpus: int) -> None:
    for num_layers in range(1, 40):
        trimmed = capslog_partitionings(num_layers, gpus)
        runs = [run for launch in trimmed for run in launch.runs]
        assert sorted(runs) == sorted(set(runs)), "no run twice"
        assert set(runs) == set(stage_runs(num_layers))
        mcap = mcap_partitionings(num_layers, gpus)
        measured = {run for launch in mcap for run in launch.runs}
        for layer in range(num_layers):
            assert (layer, layer + 1) in measured  # C1
            # C2 and C3: the layers before it, without and with it.
            assert layer == 0 or any(
                (first, layer) in measured and (first, layer + 1) in measured for first in range(layer)
            )
        for launch in trimmed + mcap:
            assert sum(launch.layers_per_gpu) == num_layers
            assert min(launch.layers_per_gpu) >= 1
            assert len(launch.layers_per_gpu) <= gpus


@pytest.mark.parametrize("gpus", [1, 2])
def test_too_few_gpus_are_refused(gpus: int) -> None:
    for make in (capslog_partitionings, mcap_partitionings):
        with pytest.raises(CapslogError, match="use at least 3"):
            make(5, gpus)
