"""The planner `budget` beside every cut list with every choice of memory intervals, played and folded."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.memory.machine import Model, profile_of
from tests.planners.intervals.stages import UNIT, all_choices
from tests.planning.asking import plan
from varuna_capslog.memory import AUTO, resolve
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.planners.budget import BudgetSearch, budget_stages, kept_cuts
from varuna_capslog.planners.budget import _in_flight as in_flight_of
from varuna_capslog.planners.layerwise import Intervals, Layerwise
from varuna_capslog.planners.seconds import Link, step_player
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, StageGraph, backwards_at_once, make_schedule, schedule_of


def timed(draw: random.Random, size: int) -> Profile:
    profile = profile_of(Model.random(draw, size, even=True, scale=20_000), "cuda")
    layers = [
        replace(one, forward_seconds=draw.randrange(1, 40) * UNIT, backward_seconds=draw.randrange(1, 40) * UNIT)
        for one in profile.layers
    ]
    return replace(profile, layers=tuple(layers), source="measured")


def choices(first: int, end: int, kinds: Sequence[str]) -> list[Intervals]:
    return [some for some in all_choices(first, end) if all(one.kind in kinds for one in some)]


def all_cuts(size: int, devices: int) -> Iterator[tuple[int, ...]]:
    return ((0, *rest) for rest in itertools.combinations(range(1, size), devices - 1))


def step_of(
    profile: Profile, cuts: Sequence[int], memory: Sequence[Intervals], run: RunShape, link: Link | None = None
) -> float:
    bounds = [*cuts, profile.num_layers]
    stages = [PlanStage(((bounds[rank], bounds[rank + 1]),), (rank,), memory=own) for rank, own in enumerate(memory)]
    found = simulate_plan(
        profile, Plan(profile.num_layers, tuple(stages), Units(run.microbatches, 1, 1), run.schedule), link=link
    )
    return found.step_seconds


def as_backwards(profile: Profile, cuts: Sequence[int], memory: Sequence[Intervals], run: RunShape) -> float:
    """The step where what runs again is a part of the backwards; the last stage keeps its last segment."""
    again = [
        sum(profile.layers[at].forward_seconds or 0 for one in own for at in range(one.first, one.end))
        for own in (*memory[:-1], [one for one in memory[-1] if one.end < profile.num_layers])
    ]
    bounds = itertools.pairwise((*cuts, profile.num_layers))
    forward, backward = (
        np.array([sum(getattr(one, f"{name}_seconds") for one in profile.layers[first:end]) for first, end in bounds])
        for name, bounds in zip(("forward", "backward"), itertools.tee(bounds), strict=True)
    )
    links = np.zeros((1, len(cuts) - 1))
    backward = backward + again
    return float(
        step_player(run, len(cuts)).step_seconds(forward[None], backward[None], backward[None], links, links)[0]
    )


@pytest.mark.parametrize("seed", range(25))
def test_no_choice_that_fits_is_faster(seed: int) -> None:
    """For limits from what the smallest choice takes to what keeping everything takes. Of stages with more microbatches
    than they have in flight the search knows the bytes exactly, but for messages.
    """
    draw = random.Random(seed)
    size, devices = draw.choice([(3, 2), (4, 2), (4, 3), (5, 2)])
    profile, run = timed(draw, size), RunShape(draw.randrange(5, 7), "1f1b", num_blocks=1)
    free, kept = Layerwise.of_profile(profile, run, devices), replace(run, recompute=False)
    options = {
        (stage, first, end): [(own, free.peak(stage, first, end, own)) for own in choices(first, end, ("recompute",))]
        for cuts in all_cuts(size, devices)
        for stage, (first, end) in enumerate(itertools.pairwise((*cuts, size)))
    }
    sizes = sorted({most for some in options.values() for _, most in some})
    for usable in (sizes[0] - 1, *draw.sample(sizes, 3), sizes[-1]):
        best = None
        for cuts in all_cuts(size, devices):
            places = enumerate(itertools.pairwise((*cuts, size)))
            fitting = [
                [own for own, most in options[stage, first, end] if most <= usable] for stage, (first, end) in places
            ]
            for memory in itertools.product(*fitting):
                step = as_backwards(profile, cuts, memory, kept)
                best = step if best is None else min(best, step)
        found = budget_stages(Layerwise.of_profile(profile, run, devices, [usable] * devices))
        if best is None:
            assert any(one.lack for one in found)
            continue
        assert not any(one.lack for one in found)
        cuts, memory = [one.first for one in found], [one.intervals for one in found]
        assert as_backwards(profile, cuts, memory, kept) == pytest.approx(best, rel=1e-9)
        assert step_of(profile, cuts, memory, run) <= best * (1 + 1e-9), "an R may run while its rank waits"


def test_offloading_where_copies_have_a_price() -> None:
    """Without one nothing is offloaded; with a high bandwidth it costs nothing, with a low one recomputing is less."""
    profile, run = timed(random.Random(3), 4), RunShape(4, "1f1b", num_blocks=1)
    kept = Layerwise.of_profile(profile, run, 2)
    usable = [kept.peak(0, 0, 1, ()) - 1, kept.peak(1, 1, 4, ())]

    def kinds(link: Link | None) -> tuple[float, set[str]]:
        found = budget_stages(Layerwise.of_profile(profile, run, 2, usable, link))
        assert not any(one.lack for one in found)
        step = step_of(profile, [one.first for one in found], [one.intervals for one in found], run, link)
        return step, {own.kind for one in found for own in one.intervals}

    without, fast, slow = kinds(None), kinds(Link(host_bandwidth=1e15)), kinds(Link(host_bandwidth=1.0))
    assert not any("offload" in kind for kind in without[1] | slow[1])
    assert fast[0] <= without[0] == slow[0]


def test_the_plan_is_judged_by_its_ranks_and_keeps_within_the_budget() -> None:
    draw, run = random.Random(8), RunShape(6, "1f1b", microbatch_size=1, num_blocks=1)
    profile = timed(draw, 6)
    last = None
    for part in range(4, 21):
        most = max(one.bytes or 0 for one in plan(profile, 3, "budget", run=run).ranks)
        found = plan(profile, 3, "budget", capacity=most * part // 20, run=run)
        assert found.memory_model == RANKS
        if not found.fits:
            assert found.shortfall is not None
            assert last is None, "a larger budget fits as well"
            continue
        assert all((one.bytes or 0) <= most * part // 20 for one in found.ranks)
        step = simulate_plan(profile, found).step_seconds
        assert last is None or step <= last * (1 + 1e-9), "more memory never makes the step longer"
        last = step
    assert last is not None


@pytest.mark.parametrize("seed", range(6))
def test_a_long_chain_is_cut_at_some_places_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine layers as if they were many: what is found fits, is no faster than with all places, and keeps to them."""
    profile, run = timed(random.Random(seed), 9), RunShape(4, "1f1b")
    free = plan(profile, 2, "budget", run=run)
    assert free.peak_bytes is not None
    usable = [int(0.6 * free.peak_bytes)] * 2
    full = Layerwise.of_profile(profile, run, 2, usable)
    every = BudgetSearch(full)
    assert every.borders is None
    monkeypatch.setattr("varuna_capslog.planners.budget.PLACES", 4)
    search = BudgetSearch(full)
    assert search.borders is not None
    assert {0, 9} < search.borders
    assert len(search.borders) <= 5
    found, best = search.stages(full), every.stages(full)
    assert found is not None
    assert best is not None
    assert {border for one in found for border in (one.first, one.end)} <= search.borders
    used = {border for one in found for part in one.intervals for border in (part.first, part.end)}
    assert used <= search.borders
    if not any(one.lack for one in found):
        assert not any(one.lack for one in best)
    assert search.bound_seconds(full) <= every.bound_seconds(full) * (1 + 1e-9)
    outside = next(cut for cut in range(1, 9) if cut not in search.borders)
    assert search.cheapest(full, 0, 0, outside, 1e12) is None
    assert every.cheapest(full, 0, 0, outside, 1e12) is not None


def test_what_every_list_of_a_schedule_that_always_recomputes_has_in_common() -> None:
    """Whichever stages recompute: as many calls in flight as where none does, and at most the last call is at once. The
    bound of `BudgetSearch` counts on it.
    """
    for stages, count in itertools.product(range(1, 5), (1, 2, 3, 4, 5, 7, 9, 16)):
        graph, known = StageGraph.line(stages, count), make_schedule("varuna", stages, count, recompute=False)
        for again in itertools.product((False, True), repeat=stages):
            for stage, row in enumerate(schedule_of("varuna", graph, again)):
                assert in_flight_of(row)[0] >= in_flight_of(known[stage])[0]
                at_once = {call for _, call in backwards_at_once(row)}
                assert len(at_once) == count if stage == stages - 1 else at_once <= {count - 1}


@pytest.mark.parametrize("seed", range(3))
def test_the_cuts_of_stages_that_keep_everything_are_played_in_the_order_of_their_schedule(seed: int) -> None:
    """The story: cuts under varuna were those that are fastest under 1F1B; where messages take as long as layers, its
    steps are up to 16 % shorter with cuts of its own.
    """
    draw = random.Random(seed)
    profile, run = timed(draw, 6), RunShape(6, "varuna", num_blocks=1)
    link = Link(bandwidth=2.0 * max(one.boundary_bytes or 0 for one in profile.layers) / UNIT / 20)
    chain = Layerwise.of_profile(profile, run, 3, None, link)
    costs = resolve(AUTO, profile, replace(run, schedule="1f1b", recompute=False))[1]
    steps = {cuts: step_of(profile, cuts, [()] * 3, run, link) for cuts in all_cuts(6, 3)}
    assert steps[tuple(kept_cuts(chain, costs))] == min(steps.values())
