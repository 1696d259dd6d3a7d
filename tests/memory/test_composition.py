"""Stages composed of single and pair runs, compared with stages run step by step."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from tests.memory.chains import SHORT, profile_of, random_chain, run_stage
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import MEMORY_MODELS, NEVER, composition
from varuna_capslog.memory.composition import compose, observed
from varuna_capslog.schedules import RunShape


def test_every_range_equals_a_run_of_it() -> None:
    rng = random.Random("composition")
    for _ in range(60):
        layers, boundaries = random_chain(rng, rng.randrange(1, 9))
        size = len(layers)
        profile = profile_of(layers, boundaries)
        parts = compose(*observed(profile, "composition", "recompute"))
        costs = composition.stage_costs(profile, RunShape())
        additive = MEMORY_MODELS["additive"].stage_costs(profile, RunShape())
        for first in range(size):
            for end in range(first + 1, size + 1):
                peak, static, saved = run_stage(layers, boundaries, first, end)
                assert costs.stage_bytes(first, end) == peak, (layers, first, end)
                assert (parts.static[first, end], parts.saved[first, end]) == (static, saved)
                assert additive.stage_bytes(first, end) == peak or end - first > 2
        assert np.all(costs.matrix()[np.tri(size, size + 1, dtype=bool)] == NEVER)


def test_the_sum_of_maxima_is_above_the_maximum_of_sums() -> None:
    """CAPSlog's model adds bytes that are never held at one time: its error on a stage with two wide layers."""
    layers, _ = random_chain(random.Random(0), 6)
    wide = [dataclasses.replace(layer, saved_in_front=10, saved_behind=10, forward=0, backward=0) for layer in layers]
    wide[1] = dataclasses.replace(wide[1], backward=100)
    wide[3] = dataclasses.replace(wide[3], backward=100)
    profile = profile_of([dataclasses.replace(layer, static=0) for layer in wide], [0] * 7)
    exact = composition.stage_costs(profile, RunShape()).stage_bytes(0, 6)
    assert exact == 10 * 4 + 100
    assert MEMORY_MODELS["additive"].stage_costs(profile, RunShape()).stage_bytes(0, 6) > exact + 50


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda row: None if row.layers == (1, 3) else row, r"an observation of layers \[1, 3\]"),
        (lambda row: dataclasses.replace(row, saved_bytes=None), r"saved_bytes of the observation of layers \[0, 1\]"),
        (lambda row: None, "observations, the runs of every layer"),
    ],
)
def test_what_a_profile_lacks_is_named(spoil, message) -> None:
    profile = profile_of(*random_chain(random.Random(1), 3))
    rows = tuple(row for row in map(spoil, profile.observations) if row is not None)
    with pytest.raises(CapslogError, match=f"memory model 'composition' needs {message}"):
        composition.stage_costs(dataclasses.replace(profile, observations=rows), RunShape())


def test_rows_of_the_wanted_condition_are_taken_where_there_are_several() -> None:
    profile = profile_of(*random_chain(random.Random(2), 3))
    others = [
        dataclasses.replace(row, memory_action="none", peak_bytes=row.peak_bytes + 7) for row in profile.observations
    ]
    both = dataclasses.replace(profile, observations=(*others, *profile.observations[1:], profile.observations[0]))
    assert {row.memory_action for row in observed(both, "m", "recompute")[1]} == {"recompute"}
    assert {row.memory_action for row in observed(both, "m", "none")[1]} == {"none"}
    # An incomplete set is ignored.
    lacking = dataclasses.replace(profile, observations=(*others, *profile.observations[1:]))
    assert {row.memory_action for row in observed(lacking, "m", "recompute")[1]} == {"none"}


def test_bytes_beyond_the_search_are_refused() -> None:
    profile = profile_of(*random_chain(random.Random(3), 2))
    rows = tuple(dataclasses.replace(row, peak_bytes=1 << 59) for row in profile.observations)
    with pytest.raises(CapslogError, match="1 EiB"):
        composition.stage_costs(dataclasses.replace(profile, observations=rows), RunShape())


def test_describes_one_live_graph_only() -> None:
    gap = MEMORY_MODELS["composition"].gap
    assert gap(RunShape()) is None
    assert "memory model 'composition' describes" in (gap(RunShape(None, "1f1b", False)) or "")


def test_a_short_profile_feeds_additive_alone() -> None:
    assert MEMORY_MODELS["additive"].stage_costs(SHORT, RunShape()).stage_bytes(0, 3) == 8
    for name in ("composition", "gpipe", "1f1b", "varuna"):
        with pytest.raises(CapslogError, match=f"memory model '{name}' needs observations"):
            MEMORY_MODELS[name].stage_costs(SHORT, RunShape(4, name))
