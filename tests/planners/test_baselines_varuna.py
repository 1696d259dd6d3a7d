"""Varuna's split: equal counts of cut points."""

from __future__ import annotations

import pytest

from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.planners.baselines import varuna_cuts


@pytest.mark.parametrize(
    ("num_layers", "devices", "sizes"),
    [
        (25, 8, [3, 3, 3, 3, 3, 3, 3, 4]),
        (42, 8, [5, 5, 5, 5, 5, 5, 5, 7]),
        (48, 8, [6] * 8),
        (7, 4, [1, 1, 1, 4]),
        (3, 3, [1, 1, 1]),
        (5, 1, [5]),
    ],
)
def test_last_stage_takes_the_rest(num_layers: int, devices: int, sizes: list[int]) -> None:
    costs = AdditiveCosts.of_statistics([1] * num_layers, [None] + [1] * (num_layers - 1))
    cuts = varuna_cuts(costs, devices)
    assert [end - first for first, end in zip(cuts, [*cuts[1:], num_layers], strict=True)] == sizes
