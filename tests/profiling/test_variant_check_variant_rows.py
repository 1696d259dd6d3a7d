"""Measured rows of layers that are computed in another way, beside a profile of the model that contains them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from tests.start.attending import Attending, workload
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain
from varuna_capslog.profiles.record import Observation, Profile
from varuna_capslog.profiles.runs import alternatives_of, compile_seconds, under
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator, estimate_workload, estimated_profile
from varuna_capslog.profiling.measure import profile_workload
from varuna_capslog.profiling.variant_check import allowed_variants, with_variant_rows
from varuna_capslog.variants import registry
from varuna_capslog.variants.registry import known_variants
from varuna_capslog.variants.wrapped import compiled

CONDITIONS = RunConditions(microbatch_size=1, recompute=False)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register only the attention variants, so that there are few runs."""
    variants = known_variants()
    monkeypatch.setattr(registry, "_registered", {name: variants[name] for name in ("eager", "sdpa")})


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
    # 7 plain runs; for the variants, block.0 and block.1 alone share a run
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
    # two maps of 256 x 256 for each of two heads, four bytes per number
    assert (single[None].saved_bytes or 0) - (single["sdpa"].saved_bytes or 0) > 2 * 2**16 * 4


def test_some_variants_are_weighed_only_where_they_are_asked_for() -> None:
    defaults = [variant.name for variant in allowed_variants("close")]
    assert defaults == ["eager", "sdpa", "chunked", "channels-last", "chunked-loss"]
    variants = allowed_variants("close", ["compiled", "split-keys"])
    assert {variant.name for variant in variants} - {*defaults} == {"compiled", "split-keys"}
    with pytest.raises(CapslogError, match="names 'bfloat16', which promises results within 1e-2, but numerics=close"):
        allowed_variants("close", ["bfloat16"])
    # no estimate knows the cost of compiled layers
    few = [variant for variant in variants if variant.name in ("compiled", "sdpa")]
    estimator = StageEstimator(workload(None), CONDITIONS)
    assert alternatives_of(with_variant_rows(estimated_profile(estimator), estimator, few)) == dict.fromkeys(
        (1, 2), ("sdpa",)
    )


class Compiled(Attending):
    """Layers are marked as the variant `compiled` marks them, for a fast backend."""

    def build_chain(self) -> Chain:
        chain = super().build_chain()
        for layer in chain.layers:
            compiled(layer.module, "aot_eager")
        return chain


def test_compiled_layers_are_measured_with_what_compiling_takes() -> None:
    profile = profile_workload(Compiled(), CONDITIONS)
    assert all(row.compile_seconds for row in profile.observations)
    assert Profile.from_json(profile.to_json()) == profile
    rows = [replace(row, variant="compiled,plain", compile_seconds=2.0) for row in profile.observations[:2]]
    some = replace(profile, observations=(*profile.observations, *rows))
    assert compile_seconds(some, ["compiled", "sdpa"]) == 4
    assert compile_seconds(some, ["sdpa"]) == 0
    # estimates are of the layers as they are
    assert all(row.compile_seconds is None for row in estimate_workload(Compiled(), CONDITIONS).observations)
