"""Variants, cuts and memory intervals chosen together, beside every choice of all three."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.memory.machine import Model, profile_of
from tests.planners.intervals.stages import UNIT
from tests.planners.test_budget import all_cuts, choices, step_of
from tests.planning.asking import judged_layerwise_plan
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.layerwise import Layerwise
from varuna_capslog.planning import variant_search
from varuna_capslog.planning.variant_search import choose_variants
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Observation, Profile, layers_of_runs
from varuna_capslog.profiles.runs import PLAIN, alternatives_of, text_of, under, variant_pairs
from varuna_capslog.schedules import RunShape

INSIDE = ("inner", "hidden", "tail", "noted")
"""Lists of a model that a variant of a layer may change: nothing that its neighbours see."""


def random_variants(draw: random.Random, size: int, counts: Sequence[int], names: str = "") -> Profile:
    """Profile of a random model with counts[k] variants of layer k; their bytes come from tests.memory.machine.

    names: prefix of the layers' names; default: "layer".
    """
    plain = Model.random(draw, size, even=True, scale=20_000)
    variants = {at: tuple(f"v{number}" for number in range(count)) for at, count in enumerate(counts) if count}
    inside = {
        (at, name): {
            part: getattr(plain, part)[at] if name == PLAIN else draw.randrange(200) * 20_000 for part in INSIDE
        }
        for at in range(size)
        for name in (PLAIN, *variants.get(at, ()))
    }
    seconds = {key: [draw.randrange(1, 40) * UNIT for _ in range(2)] for key in inside}

    def rows_of(chosen: Mapping[int, str]) -> dict[tuple[int, int], Observation]:
        parts: dict[str, Any] = {
            part: [inside[at, chosen.get(at, PLAIN)][part] for at in range(size)] for part in INSIDE
        }
        observations = {}
        for row in profile_of(replace(plain, **parts), "cuda").observations:
            times = [seconds[at, chosen.get(at, PLAIN)] for at in range(*row.layers)]
            forward, backward = (sum(column) for column in zip(*times, strict=True))
            observations[row.layers] = replace(row, forward_seconds=forward, backward_seconds=backward)
        return observations

    base, rows = profile_of(plain, "cuda"), rows_of({})
    more = []
    for first, pair in variant_pairs(variants, size):
        chosen = {first + place: name for place, name in enumerate(pair) if name != PLAIN}
        more.append(replace(rows_of(chosen)[first, first + len(pair)], variant=text_of(pair)))
    called = [f"{names or 'layer'}.{at}" for at in range(size)]
    layers = layers_of_runs(called, list(rows.values()))
    return replace(base, layers=layers, observations=(*rows.values(), *more), source="measured")


def plan_of(profile: Profile, devices: int, run: RunShape, usable: int) -> Plan:
    return judged_layerwise_plan(profile, devices, "budget", "auto", usable, run)


def least_step(profile: Profile, devices: int, run: RunShape, usable: int) -> float:
    """Return the shortest step of all cut lists and all choices of intervals that fit; infinite if none does."""
    free, best = Layerwise.of_profile(profile, run, devices), float("inf")
    for cuts in all_cuts(profile.num_layers, devices):
        stages = list(enumerate(itertools.pairwise((*cuts, profile.num_layers))))
        memories = [
            [
                intervals
                for intervals in choices(first, end, ("recompute",))
                if free.peak(stage, first, end, intervals) <= usable
            ]
            for stage, (first, end) in stages
        ]
        best = min([best, *(step_of(profile, cuts, memory, run) for memory in itertools.product(*memories))])
    return best


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_of_variants_cuts_and_intervals_is_better(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice([3, 3, 4])
    counts = [draw.choice([0, 1, 2]) for _ in range(size - 1)]
    profile = random_variants(draw, size, [*counts, 0])
    run = RunShape(draw.randrange(4, 6), "1f1b", num_blocks=1, recompute=False)
    combinations = [
        {at: name for at, name in enumerate(names) if name != PLAIN}
        for names in itertools.product(*((PLAIN, *alternatives_of(profile).get(at, ())) for at in range(size)))
    ]
    plain = Layerwise.of_profile(under(profile, {}), run, 2)
    kept = max(plain.peak(stage, *ends, ()) for stage, ends in enumerate([(0, 1), (1, size)]))
    for usable in (int(kept * part) for part in (0.4, 0.7)):
        expected = min(least_step(under(profile, chosen), 2, run, usable) for chosen in combinations)
        choice = choose_variants(
            profile, 2, run.microbatches, lambda variant_profile, limit=usable: plan_of(variant_profile, 2, run, limit)
        )
        assert choice.every
        step = choice.plan.step_seconds if choice.plan.fits else float("inf")
        assert step == pytest.approx(expected, rel=1e-12) or (step is not None and step < expected)
        again = plan_of(under(profile, choice.chosen), 2, run, usable)
        assert (again.fits, again.step_seconds) == (choice.plan.fits, choice.plan.step_seconds)


def test_a_choice_that_is_little_faster_is_not_ruled_out() -> None:
    """On one device a step is the sum of all calls, which is the bound itself."""
    run, near = RunShape(4, "1f1b", num_blocks=1), 0
    for seed in range(3):
        profile = random_variants(random.Random(seed), 3, [1, 1, 0])
        names = itertools.product(*((PLAIN, *alternatives_of(profile).get(at, ())) for at in range(3)))
        plans = [
            plan_of(under(profile, {at: name for at, name in enumerate(combination) if name != PLAIN}), 1, run, 1 << 40)
            for combination in names
        ]
        steps = [plan.step_seconds or 0.0 for plan in plans]
        choice = choose_variants(profile, 1, 4, lambda variant_profile: plan_of(variant_profile, 1, run, 1 << 40))
        assert choice.plan.step_seconds == min(steps)
        near += 0.7 * steps[0] < min(steps) < steps[0]
    assert near


def test_of_equal_plans_the_one_with_fewest_variants() -> None:
    profile = random_variants(random.Random(1), 3, [0, 0, 0])
    twins = [replace(row, variant="twin") for row in profile.observations if row.layers == (0, 1)]
    pair = next(row for row in profile.observations if row.layers == (0, 2))
    profile = replace(profile, observations=(*profile.observations, *twins, replace(pair, variant="twin,plain")))
    run = RunShape(4, "1f1b", num_blocks=1)
    assert (
        choose_variants(profile, 2, 4, lambda variant_profile: plan_of(variant_profile, 2, run, 1 << 40)).chosen == {}
    )


def test_many_layers_of_a_family_get_one_variant_each_by_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search that is not exhaustive finds no worse plan than the layers as configured, and often the best one."""
    monkeypatch.setattr(variant_search, "EVERY_CHOICE", 1)
    monkeypatch.setattr(variant_search, "MOST_WEIGHED", 8)
    equal = 0
    for seed in range(4):
        draw = random.Random(seed)
        profile, run = random_variants(draw, 4, [2, 2, 2, 0], "block"), RunShape(4, "1f1b", num_blocks=1)
        plain = plan_of(under(profile, {}), 2, run, 1 << 40)
        choice = choose_variants(
            profile, 2, 4, lambda variant_profile, run=run: plan_of(variant_profile, 2, run, 1 << 40)
        )
        assert (choice.every, choice.weighed <= 9) == (False, True)
        assert choice.plan.step_seconds <= plain.step_seconds  # type: ignore[operator]
        monkeypatch.setattr(variant_search, "EVERY_CHOICE", 256)
        best = choose_variants(
            profile, 2, 4, lambda variant_profile, run=run: plan_of(variant_profile, 2, run, 1 << 40)
        )
        monkeypatch.setattr(variant_search, "EVERY_CHOICE", 1)
        assert best.plan.step_seconds <= choice.plan.step_seconds  # type: ignore[operator]
        equal += best.plan.step_seconds == choice.plan.step_seconds
    assert equal >= 1


def test_a_run_that_the_profile_lacks_is_named() -> None:
    profile = random_variants(random.Random(0), 3, [1, 1, 0])
    rows = [row for row in profile.observations if row.variant != "v0,v0"]
    with pytest.raises(CapslogError, match=r"no run of layers \[0, 2\] as v0, v0; estimate it again"):
        under(replace(profile, observations=tuple(rows)), {0: "v0", 1: "v0"})


def test_no_choice_is_left_out_before_one_fits() -> None:
    """Only the slowest choice fits, so every other one is planned before it."""
    profile, planned_seconds = random_variants(random.Random(0), 3, [2, 2, 0]), list[float]()

    def seconds(variant_profile: Profile) -> float:
        return sum((layer.forward_seconds or 0) + (layer.backward_seconds or 0) for layer in variant_profile.layers)

    names = itertools.product(*((PLAIN, *alternatives_of(profile).get(at, ())) for at in range(3)))
    variant_profiles = [
        under(profile, {at: name for at, name in enumerate(combination) if name != PLAIN}) for combination in names
    ]
    longest = max(map(seconds, variant_profiles))

    def only_longest(variant_profile: Profile) -> Plan:
        planned_seconds.append(seconds(variant_profile))
        return replace(
            Plan.of_cuts(3, (0, 1)), fits=seconds(variant_profile) == longest, step_seconds=4 * seconds(variant_profile)
        )

    choice = choose_variants(profile, 2, 4, only_longest)
    assert (choice.plan.fits, choice.weighed, planned_seconds[-1]) == (True, len(variant_profiles), longest)


def test_what_neighbours_spare_each_other_is_a_part_of_their_seconds() -> None:
    """A layout that costs a layer alone more than it gains: two such neighbours convert nothing between them."""
    profile = random_variants(random.Random(2), 3, [1, 1, 0])
    plain = {row.layers: row for row in profile.observations if row.variant is None}
    spared, rows = 10 * UNIT, []
    for row in profile.observations:
        like, size = plain[row.layers], row.layers[1] - row.layers[0]
        changes = (row.variant or "").split(",").count("v0")
        # alone a unit slower in either direction; any pair takes a unit less than its layers alone
        more = (changes - (size == 2)) * UNIT
        forward = (like.forward_seconds or 0.0) + size * spared + more - (spared if changes == 2 else 0.0)
        rows.append(replace(row, forward_seconds=forward, backward_seconds=(like.backward_seconds or 0.0) + more))
    joined = replace(profile, observations=tuple(rows), conditions={**profile.conditions, "joined_variants": ["v0"]})
    run = RunShape(4, "1f1b", num_blocks=1)

    def total(variant_profile: Profile) -> float:
        return sum((layer.forward_seconds or 0) + (layer.backward_seconds or 0) for layer in variant_profile.layers)

    expected = {(): 0.0, (0,): 2.0, (1,): 2.0, (0, 1): 4.0 - 10.0}
    for chosen, units in expected.items():
        gain = total(under(joined, dict.fromkeys(chosen, "v0"))) - total(under(joined, {}))
        assert gain == pytest.approx(units * UNIT, abs=1e-12)
    choice = choose_variants(joined, 1, 4, lambda variant_profile: plan_of(variant_profile, 1, run, 1 << 40))
    assert choice.chosen == {0: "v0", 1: "v0"}
    apart = replace(joined, conditions=profile.conditions)
    assert choose_variants(apart, 1, 4, lambda variant_profile: plan_of(variant_profile, 1, run, 1 << 40)).chosen == {}
