"""Measured rows of layers that are computed in another way, beside a profile of the model that has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.start.attending import workload
from varuna_capslog.profiles.record import Observation, Profile
from varuna_capslog.profiles.variants import alternatives_of, under
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.measure import profile_workload
from varuna_capslog.variants import registry
from varuna_capslog.variants.registry import known_variants

CONDITIONS = RunConditions(microbatch_size=1, recompute=False)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only attention, so that there are few runs."""
    known = known_variants()
    monkeypatch.setattr(registry, "_registered", {name: known[name] for name in ("eager", "sdpa")})


def bytes_of(profile: Profile) -> dict[tuple[int, int], tuple[Any, ...]]:
    def of_row(row: Observation) -> tuple[Any, ...]:
        assert row.action_bytes is not None
        return row.peak_bytes, row.static_bytes, row.saved_bytes, row.action_bytes

    return {row.layers: of_row(row) for row in profile.observations}


@pytest.mark.usefixtures("few")
def test_rows_are_those_of_the_model_whose_layers_are_computed_so() -> None:
    counted: list[int] = []
    profile = profile_workload(
        workload(None), CONDITIONS, progress=lambda done, total, text: counted.append(total), variants="close"
    )
    assert alternatives_of(profile) == {1: ("sdpa",), 2: ("sdpa",)}
    assert list(profile.conditions["variants"]) == ["sdpa"]
    # 7 plain runs; of the others, block.0 and block.1 alone are one
    others = [row for row in profile.observations if row.variant is not None]
    assert (set(counted), len(others)) == ({13}, 7)
    assert all((row.forward_seconds or 0) > 0 and (row.backward_seconds or 0) > 0 for row in others)
    for chosen in ({}, {2: "sdpa"}):
        model = copy.copy(workload(None))
        model.variants, model.numerics = {f"#{layer}": name for layer, name in chosen.items()}, "close"
        alone = profile_workload(model, CONDITIONS)
        assert bytes_of(under(profile, chosen)) == bytes_of(alone)
        assert "variants" not in alone.conditions
    single = {row.variant: row for row in profile.observations if row.layers == (1, 2)}
    # two maps of 256 x 256 for each of two heads, of four bytes
    assert (single[None].saved_bytes or 0) - (single["sdpa"].saved_bytes or 0) > 2 * 2**16 * 4
