"""The planner `budget`, compared with every cut list and every choice of memory intervals, simulated and folded."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.memory.machine import Model, profile_of
from tests.planners.intervals.stages import UNIT, all_choices, random_profile
from tests.planning.asking import plan
from tests.sweeps import some
from varuna_capslog.memory import AUTO, resolve
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners.budget import BudgetSearch, budget_stages, kept_cuts, stages_bound
from varuna_capslog.planners.budget import _floors as floors_of
from varuna_capslog.planners.budget import _in_flight as in_flight_of
from varuna_capslog.planners.intervals import Handling, stage_bytes
from varuna_capslog.planners.layerwise import Intervals, Layerwise
from varuna_capslog.planners.seconds import Link, step_player
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.plans.parts import INTERVAL_KINDS, PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, StageGraph, backwards_at_once, make_schedule, schedule_of


def timed(draw: random.Random, size: int) -> Profile:
    return timed_profile(draw, Model.random(draw, size, even=True, scale=20_000))


def timed_profile(draw: random.Random, model: Model) -> Profile:
    profile = profile_of(model, "cuda")
    layers = [
        replace(layer, forward_seconds=draw.randrange(1, 40) * UNIT, backward_seconds=draw.randrange(1, 40) * UNIT)
        for layer in profile.layers
    ]
    return replace(profile, layers=tuple(layers), source="measured")


def choices(first: int, end: int, kinds: Sequence[str]) -> list[Intervals]:
    return [intervals for intervals in all_choices(first, end) if all(interval.kind in kinds for interval in intervals)]


def all_cuts(size: int, devices: int) -> Iterator[tuple[int, ...]]:
    return ((0, *inner_cuts) for inner_cuts in itertools.combinations(range(1, size), devices - 1))


def step_of(
    profile: Profile, cuts: Sequence[int], memory: Sequence[Intervals], run: RunShape, link: Link | None = None
) -> float:
    bounds = [*cuts, profile.num_layers]
    stages = [
        PlanStage(((bounds[rank], bounds[rank + 1]),), (rank,), memory=intervals)
        for rank, intervals in enumerate(memory)
    ]
    simulation = simulate_plan(
        profile, Plan(profile.num_layers, tuple(stages), Units(run.microbatches, 1, 1), run.schedule), link=link
    )
    return simulation.step_seconds


def as_backwards(profile: Profile, cuts: Sequence[int], memory: Sequence[Intervals], run: RunShape) -> float:
    """Return the step seconds with reruns counted in the backwards; the last stage keeps its last segment."""
    again = [
        sum(
            profile.layers[at].forward_seconds or 0
            for interval in intervals
            for at in range(interval.first, interval.end)
        )
        for intervals in (*memory[:-1], [interval for interval in memory[-1] if interval.end < profile.num_layers])
    ]
    bounds = itertools.pairwise((*cuts, profile.num_layers))
    forward, backward = (
        np.array(
            [sum(getattr(layer, f"{name}_seconds") for layer in profile.layers[first:end]) for first, end in bounds]
        )
        for name, bounds in zip(("forward", "backward"), itertools.tee(bounds), strict=True)
    )
    links = np.zeros((1, len(cuts) - 1))
    backward = backward + again
    return float(
        step_player(run, len(cuts)).step_seconds(forward[None], backward[None], backward[None], links, links)[0]
    )


@pytest.mark.parametrize("schedule", ["1f1b", "varuna", "gpipe", "zb-h1"])
def test_no_plan_is_played_faster_than_its_bound(schedule: str) -> None:
    """Plans above the best step by this bound are not played."""
    draw, parts = random.Random(len(schedule)), list[float]()
    for _ in range(40):
        profile = timed(draw, draw.randrange(3, 7))
        halves = [(layer.backward_seconds or 0) / 2 for layer in profile.layers]
        pairs = zip(profile.layers, halves, strict=True)
        rows = [replace(layer, input_seconds=half, weight_seconds=half) for layer, half in pairs]
        profile, devices = replace(profile, layers=tuple(rows)), draw.randrange(1, 4)
        run = RunShape(draw.randrange(1, 9), schedule, num_blocks=1)
        cuts = [0, *sorted(draw.sample(range(1, profile.num_layers), devices - 1))]
        bounds = list(itertools.pairwise((*cuts, profile.num_layers)))
        memory = [draw.choice(choices(*bound, ("recompute",))) for bound in bounds]
        chain = Layerwise.of_profile(profile, run, devices)
        stages = [chain.choice(*bound, intervals) for bound, intervals in zip(bounds, memory, strict=True)]
        step = step_of(profile, cuts, memory, run, Link())
        parts.append(stages_bound(chain, stages) / step)
    assert max(parts) <= 1 + 1e-9
    assert sum(part > 0.9 for part in parts) > 10


@pytest.mark.parametrize("seed", some(range(25), 9))
def test_no_choice_that_fits_is_faster(seed: int) -> None:
    """Limits go from the bytes of the smallest choice to those of keeping everything. If a stage has more microbatches
    than it has in flight, the search knows its bytes exactly, except for messages.
    """
    draw = random.Random(seed)
    size, devices = draw.choice([(3, 2), (4, 2), (4, 3), (5, 2)])
    profile, run = timed(draw, size), RunShape(draw.randrange(5, 7), "1f1b", num_blocks=1)
    free, kept = Layerwise.of_profile(profile, run, devices), replace(run, recompute=False)
    options = {
        (stage, first, end): [
            (intervals, free.peak(stage, first, end, intervals)) for intervals in choices(first, end, ("recompute",))
        ]
        for cuts in all_cuts(size, devices)
        for stage, (first, end) in enumerate(itertools.pairwise((*cuts, size)))
    }
    sizes = sorted({most for stage_options in options.values() for _, most in stage_options})
    for usable in (sizes[0] - 1, *draw.sample(sizes, 3), sizes[-1]):
        best = None
        for cuts in all_cuts(size, devices):
            places = enumerate(itertools.pairwise((*cuts, size)))
            fitting = [
                [intervals for intervals, most in options[stage, first, end] if most <= usable]
                for stage, (first, end) in places
            ]
            for memory in itertools.product(*fitting):
                step = as_backwards(profile, cuts, memory, kept)
                best = step if best is None else min(best, step)
        stages = budget_stages(Layerwise.of_profile(profile, run, devices, [usable] * devices))
        if best is None:
            assert any(stage.lack for stage in stages)
            continue
        assert not any(stage.lack for stage in stages)
        cuts, memory = [stage.first for stage in stages], [stage.intervals for stage in stages]
        assert as_backwards(profile, cuts, memory, kept) == pytest.approx(best, rel=1e-9)
        assert step_of(profile, cuts, memory, run) <= best * (1 + 1e-9), "an R may run while its rank waits"


def test_offloading_where_copies_have_a_price() -> None:
    """Nothing is offloaded without a host bandwidth. High bandwidths make copies free; at low ones reruns cost less."""
    profile, run = timed(random.Random(3), 4), RunShape(4, "1f1b", num_blocks=1)
    kept = Layerwise.of_profile(profile, run, 2)
    usable = [kept.peak(0, 0, 1, ()) - 1, kept.peak(1, 1, 4, ())]

    def kinds(link: Link | None) -> tuple[float, set[str]]:
        stages = budget_stages(Layerwise.of_profile(profile, run, 2, usable, link))
        assert not any(stage.lack for stage in stages)
        step = step_of(profile, [stage.first for stage in stages], [stage.intervals for stage in stages], run, link)
        return step, {interval.kind for stage in stages for interval in stage.intervals}

    without, fast, slow = kinds(None), kinds(Link(host_bandwidth=1e15)), kinds(Link(host_bandwidth=1.0))
    assert not any("offload" in kind for kind in without[1] | slow[1])
    assert fast[0] <= without[0] == slow[0]


def test_the_plan_is_judged_by_its_ranks_and_keeps_within_the_budget() -> None:
    draw, run = random.Random(8), RunShape(6, "1f1b", microbatch_size=1, num_blocks=1)
    profile = timed(draw, 6)
    last = None
    for part in range(4, 21):
        most = max(rank.bytes or 0 for rank in plan(profile, 3, "budget", run=run).ranks)
        budget_plan = plan(profile, 3, "budget", capacity=most * part // 20, run=run)
        assert budget_plan.memory_model == RANKS
        if not budget_plan.fits:
            assert budget_plan.shortfall is not None
            assert last is None, "a larger budget fits as well"
            continue
        assert all((rank.bytes or 0) <= most * part // 20 for rank in budget_plan.ranks)
        step = simulate_plan(profile, budget_plan).step_seconds
        assert last is None or step <= last * (1 + 1e-9), "more memory never makes the step longer"
        last = step
    assert last is not None


@pytest.mark.parametrize("seed", some(range(6), 3))
def test_a_long_chain_is_cut_at_some_borders_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MOST_BORDERS is set to 4 for nine layers: stages use only these cuts, and are no faster than with all cuts."""
    profile, run = timed(random.Random(seed), 9), RunShape(4, "1f1b")
    free = plan(profile, 2, "budget", run=run)
    assert free.peak_bytes is not None
    usable = [int(0.6 * free.peak_bytes)] * 2
    full = Layerwise.of_profile(profile, run, 2, usable)
    full_search = BudgetSearch(full)
    assert full_search.borders is None
    monkeypatch.setattr("varuna_capslog.planners.budget.MOST_BORDERS", 4)
    search = BudgetSearch(full)
    assert search.borders is not None
    assert {0, 9} < search.borders
    assert len(search.borders) <= 5
    stages, best = search.stages(full), full_search.stages(full)
    assert stages is not None
    assert best is not None
    assert {border for stage in stages for border in (stage.first, stage.end)} <= search.borders
    used = {border for stage in stages for interval in stage.intervals for border in (interval.first, interval.end)}
    assert used <= search.borders
    if not any(stage.lack for stage in stages):
        assert not any(stage.lack for stage in best)
    assert search.bound_seconds(full) <= full_search.bound_seconds(full) * (1 + 1e-9)
    outside = next(cut for cut in range(1, 9) if cut not in search.borders)
    assert search.cheapest(full, 0, 0, outside, 1e12) is None
    assert full_search.cheapest(full, 0, 0, outside, 1e12) is not None


def test_what_every_list_of_a_schedule_that_always_recomputes_has_in_common() -> None:
    """For any choice of recomputing stages, at least as many calls are in flight as without recomputation, and at most
    the last call runs its backward at once. The bound of `BudgetSearch` relies on it.
    """
    for stages, count in itertools.product(range(1, 5), (1, 2, 3, 4, 5, 7, 9, 16)):
        graph, kept_rows = StageGraph.line(stages, count), make_schedule("varuna", stages, count, recompute=False)
        for again in itertools.product((False, True), repeat=stages):
            for stage, row in enumerate(schedule_of("varuna", graph, again)):
                assert in_flight_of(row)[0] >= in_flight_of(kept_rows[stage])[0]
                at_once = {call for _, call in backwards_at_once(row)}
                assert len(at_once) == count if stage == stages - 1 else at_once <= {count - 1}


@pytest.mark.parametrize("seed", range(3))
def test_the_cuts_of_stages_that_keep_everything_are_played_in_the_order_of_their_schedule(seed: int) -> None:
    """Cuts under varuna used to be the fastest ones under 1F1B. If messages take as long as layers, varuna's steps are
    up to 16 % shorter with cuts for its own schedule.
    """
    draw = random.Random(seed)
    profile, run = timed(draw, 6), RunShape(6, "varuna", num_blocks=1)
    link = Link(bandwidth=2.0 * max(layer.boundary_bytes or 0 for layer in profile.layers) / UNIT / 20)
    chain = Layerwise.of_profile(profile, run, 3, None, link)
    costs = resolve(AUTO, profile, replace(run, schedule="1f1b", recompute=False))[1]
    steps = {cuts: step_of(profile, cuts, [()] * 3, run, link) for cuts in all_cuts(6, 3)}
    assert steps[tuple(kept_cuts(chain, costs))] == min(steps.values())


@pytest.mark.parametrize(("seed", "fits"), [(0, False), (1, True), (2, False)])
def test_stages_that_always_hold_too_much_are_not_searched_and_change_no_answer(seed: int, fits: bool) -> None:
    """Of a model that lacks memory all ranges of layers were searched, though most could be in no plan: four seconds of
    a plan of DeepSeek-V3.
    """
    draw, devices = random.Random(seed), 4
    model = Model.random(draw, 12, even=True, scale=20_000)
    profile = timed_profile(draw, replace(model, static=[20 * size for size in model.static]))

    def chain_of(usable: int) -> Layerwise:
        return Layerwise.of_profile(profile, RunShape(8, "1f1b"), devices, [usable] * devices)

    usable = 1
    if fits:
        chain = chain_of(10**12)
        least = BudgetSearch(chain_of(1)).stages(chain_of(1)) or []
        usable = max(chain.peak(stage, part.first, part.end, part.intervals) for stage, part in enumerate(least))
    chain = chain_of(usable)
    every = BudgetSearch(chain)
    stages = every.stages(chain)
    assert stages is not None
    assert (max(stage.lack for stage in stages) == 0) is fits
    light = BudgetSearch(chain, most_bytes=1.125 * (usable + max(stage.lack for stage in stages)))
    assert light.stages(chain) == stages
    whole = (0, profile.num_layers - devices + 1)
    assert every.cheapest(chain, 0, *whole, 10**12) is not None
    assert light.cheapest(chain, 0, *whole, 10**12) is None  # not searched
    assert BudgetSearch(chain, most_bytes=0.9 * (usable + max(stage.lack for stage in stages))).stages(chain) is None


@pytest.mark.parametrize("seed", some(range(60), 8))
def test_no_stage_takes_fewer_bytes_than_its_floor(seed: int) -> None:
    """Every choice of every range of layers, also of those that share tensors or are frozen."""
    draw = random.Random(seed)
    size, calls = draw.choice([3, 4, 5]), draw.choice([2, 3, 4])
    ranges = RangeBytes.of_ranks(random_profile(draw, size), True)
    floors = floors_of(ranges, RunShape(calls, "1f1b", microbatch_size=1))
    ways = {"recomputed": True}, {"recomputed": True, "later": True}, {"at_once": True}, {"later": False}
    for handling in (Handling(calls=calls, **way) for way in ways):
        offloads = not handling.at_once and handling.later >= handling.recomputed
        for first, end in itertools.combinations(range(size + 1), 2):
            some_choices = choices(first, end, INTERVAL_KINDS if offloads else ("recompute",))
            sizes = [stage_bytes(ranges, first, end, intervals, 1, handling) for intervals in some_choices]
            assert floors[first, end] <= min(sizes)


@pytest.mark.parametrize("seed", some(range(40), 6))
def test_no_cuts_lack_less_than_the_bound_of_a_search_that_leaves_out_long_stages(seed: int) -> None:
    """Where nothing fits, longer stages are not searched if none of them lacks less."""
    draw = random.Random(seed)
    size, devices, calls = draw.choice([4, 5]), draw.choice([2, 3]), draw.choice([2, 4, 6])
    profile = random_profile(draw, size) if draw.random() < 0.7 else timed(draw, size)
    link = Link(host_bandwidth=1e4) if draw.random() < 0.5 else None
    kinds = INTERVAL_KINDS if link else ("recompute",)
    run = RunShape(calls, draw.choice(["1f1b", "varuna", "gpipe"]), microbatch_size=1, num_blocks=draw.choice([1, 2]))
    chain = Layerwise.of_profile(profile, run, devices, [1] * devices, link)
    every = BudgetSearch(chain)
    least = np.full((devices, size, size + 1), np.inf)
    for stage, search in enumerate(every._options(chain).interval_searches):
        handling = search._handling
        for first, end in itertools.combinations(range(size + 1), 2):
            some_choices = choices(first, end, kinds if handling.later else ("recompute",))
            arguments = chain.in_flight[stage], handling
            sizes = [stage_bytes(search._ranges, first, end, intervals, *arguments) for intervals in some_choices]
            least[stage, first, end] = min(sizes)
    everywhere = min(
        max(least[stage, first, end] for stage, (first, end) in enumerate(itertools.pairwise((*cuts, size)))) - 1
        for cuts in all_cuts(size, devices)
    )
    assert every.least_lack(chain) == (everywhere, everywhere)
    lengths = sorted(chain.seconds(first, end) for first, end in itertools.combinations(range(size + 1), 2))
    bounds = [BudgetSearch(chain, longest).least_lack(chain) for longest in lengths[:: max(1, len(lengths) // 6)]]
    assert all(0 < bound <= everywhere <= lack for lack, bound in bounds)
