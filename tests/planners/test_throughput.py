"""The fastest cut list within a memory cap and the front of peak and step time, compared with every cut list."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.planners.timed import Positional, chain, cut_lists, seconds_of, simulated
from tests.planning import asking
from tests.sweeps import some
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.memory.costs import NEVER, RangeCosts
from varuna_capslog.planners import throughput
from varuna_capslog.planners.seconds import LayerSeconds, Link, StepPlayer, step_player
from varuna_capslog.planners.throughput import Fastest, fastest_cuts, least_step, pareto_front, steady_cuts
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.schedules import (
    SCHEDULES,
    RunShape,
    StageGraph,
    StageSeconds,
    in_flight_limits,
    schedule_of,
    simulate,
)

LINKS = (
    None,
    Link(latency_seconds=0.3),
    Link(bandwidth=20.0, latency_seconds=0.01),
    Link(bandwidth=20.0, latency_seconds=0.01, copy_bandwidth=15.0),
    Link(bandwidth=20.0, copy_bandwidth=80.0),
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_player_of_many_lists_is_the_simulator(schedule: str, recompute: bool) -> None:
    rng = random.Random(1)
    for stages, microbatches in ((1, 3), (2, 1), (3, 5), (5, 8)):
        profile, link = chain(rng, 7), rng.choice(LINKS)
        lists = list(cut_lists(7, stages))
        speeds = [rng.choice([0.5, 1.0, 2.0]) for _ in range(stages)]
        player, seconds = step_player(RunShape(microbatches, schedule, recompute), stages), seconds_of(profile, link)
        played = player.step_seconds(*seconds.of_cuts(np.array(lists), speeds))
        for cuts, step in zip(lists, played.tolist(), strict=True):
            assert step == pytest.approx(simulated(profile, cuts, schedule, microbatches, recompute, link, speeds))
            assert player.seconds_of_one(seconds.of_cuts(np.array([cuts]), speeds)) == step


def instance(rng: random.Random, most_layers: int = 9) -> tuple[Profile, Positional, RunShape, int, Link | None]:
    layers = rng.randint(1, most_layers)
    stages = rng.randint(1, min(layers, 5))
    costs = Positional([rng.randint(1, 30) for _ in range(layers)], [rng.randint(0, 9) for _ in range(layers)])
    schedule, microbatches, recompute = rng.choice(SCHEDULES), rng.choice([1, 2, 5, 8]), rng.random() < 0.5
    run = RunShape(microbatches, schedule, recompute)
    return chain(rng, layers), costs, run, stages, rng.choice(LINKS)


def test_no_cut_list_that_fits_has_a_quicker_slowest_stage() -> None:
    """Nor, of those that are as quick, a smaller peak."""
    rng = random.Random(8)
    unfit = tied = 0
    for _ in range(150):
        layers = rng.randint(1, 9)
        stages = rng.randint(1, min(layers, 5))
        sizes = [rng.randint(1, 30) for _ in range(layers)]
        costs = AdditiveCosts.of_statistics(sizes, [rng.randint(1, 30) for _ in range(layers)])
        times = [rng.choice([1.0, 2.0, 5.0]) for _ in range(layers)]
        rows = zip(chain(rng, layers).layers, times, strict=True)
        profile = Profile(
            tuple(replace(layer, forward_seconds=seconds, backward_seconds=0.0) for layer, seconds in rows)
        )
        capacities = [rng.randint(20, 100) for _ in range(stages)] if rng.random() < 0.7 else None
        best = steady_cuts(costs, LayerSeconds.of_profile(profile), stages, capacities)
        keys = [
            (max(sum(times[a:b]) for a, b in pairwise([*cuts, layers])), max(costs.peaks(cuts)), cuts)
            for cuts in cut_lists(layers, stages)
            if capacities is None or all(np.array(costs.peaks(cuts)) <= capacities)
        ]
        if not keys:
            assert best is None
            unfit += 1
            continue
        slowest = min(keys)[0]
        assert best is not None
        assert max(sum(times[a:b]) for a, b in pairwise([*best, layers])) == pytest.approx(slowest)
        assert max(costs.peaks(best)) == min(key[1] for key in keys if key[0] <= slowest * (1 + 1e-9))
        tied += sum(key[0] <= slowest * (1 + 1e-9) for key in keys) > 1
    assert unfit > 20
    assert tied > 20


def best_by_trying_all(
    profile: Profile, costs: Positional, run: RunShape, lists: list[list[int]], link: Link | None, speeds: list[float]
) -> float:
    return min(
        simulated(profile, cuts, run.schedule, run.num_microbatches, run.recompute, link, speeds) for cuts in lists
    )


def test_no_cut_list_that_fits_is_faster() -> None:
    """Position-dependent memory, capacities and speeds per device, all schedules, slow links."""
    rng = random.Random(2)
    unfit = proven = 0
    for _ in range(150):
        profile, costs, run, stages, link = instance(rng)
        capacities = [rng.randint(20, 150) for _ in range(stages)] if rng.random() < 0.7 else None
        speeds = [rng.choice([0.5, 1.0, 2.0]) for _ in range(stages)]
        lists = list(cut_lists(profile.num_layers, stages))
        if capacities is not None:
            lists = [cuts for cuts in lists if all(np.array(costs.peaks(cuts)) <= capacities)]
        fastest = fastest_cuts(costs, seconds_of(profile, link), run, stages, capacities, speeds)
        if not lists:
            assert fastest is None
            unfit += 1
            continue
        assert fastest is not None
        assert list(fastest.cuts) in lists
        best = best_by_trying_all(profile, costs, run, lists, link, speeds)
        assert fastest.step_seconds == pytest.approx(best)
        assert fastest.peak_bytes == max(costs.peaks(fastest.cuts))
        proven += fastest.proven
    assert unfit > 10
    assert proven > 100


def test_the_bound_holds_where_the_beam_is_too_narrow_to_find_the_best() -> None:
    rng = random.Random(3)
    worse = 0
    for _ in range(120):
        profile, costs, run, stages, link = instance(rng, most_layers=10)
        fastest = fastest_cuts(costs, seconds_of(profile, link), run, stages, width=1)
        assert fastest is not None
        lists = list(cut_lists(profile.num_layers, stages))
        best = best_by_trying_all(profile, costs, run, lists, link, [1.0] * stages)
        assert fastest.bound_seconds <= best * (1 + 1e-9)
        assert fastest.step_seconds >= best * (1 - 1e-9)
        if fastest.proven:
            assert fastest.step_seconds == pytest.approx(best)
        worse += fastest.step_seconds > best * 1.0001
    assert worse > 0, "nothing was left out, so the bound was never needed"


@pytest.mark.parametrize("stages", some([2, 3, 4, 5, 6, 7], 3))
def test_what_the_bound_takes_from_the_lists_of_a_schedule(stages: int) -> None:
    """Of `varuna`: every choice of recomputing stages. Of `1f1b-star`: random limits."""
    rng = random.Random(stages)
    for count in (1, 2, 3, 5, 8, 13, 21, 32):
        graph, limits = StageGraph.line(stages, count), in_flight_limits("varuna", stages, count)
        without = schedule_of("varuna", graph, (False,) * stages)
        for again in itertools.product((False, True), repeat=stages):
            lists = schedule_of("varuna", graph, again)
            rows = ["".join(action.kind for action in row if action.kind in "FB") for row in lists]
            assert [row.index("B") for row in rows] == limits
            last = max((stage for stage in range(stages - 1) if again[stage]), default=None)
            if last is None:
                assert lists == without
            else:
                rounds = [min(limits[last], count - done) for done in range(0, count, limits[last])]
                assert rows[last] == "".join("F" * size + "B" * size for size in rounds)
        for _ in range(20):
            chosen = tuple(rng.randint(1, min(count, 3 * stages)) for _ in range(stages))
            rows = ["".join(action.kind for action in row) for row in schedule_of("1f1b-star", graph, False, chosen)]
            for stage, row in enumerate(rows):
                assert row.index("B") >= min(3 * (stages - 1 - stage) + 1, count, *chosen[: stage + 1])


@pytest.mark.parametrize("seed", some(range(8), 2))
@pytest.mark.parametrize(
    ("schedule", "lowest", "again"),
    [("1f1b", 2, False), ("1f1b-star", 512, False), ("varuna", 2, False), ("varuna", 512, True)],
)
def test_no_cut_list_is_below_the_bound_whatever_recomputes(
    seed: int, schedule: str, lowest: int, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputing takes no time here, but changes the order of the work under `varuna`. again: a stage recomputes."""
    rng, reached = random.Random(seed), 0
    monkeypatch.setattr(throughput, "_LOWEST", (lowest,))
    if again:
        monkeypatch.setattr(StepPlayer, "step_seconds", lambda player, forward, *others: np.full(len(forward), np.inf))
    for _ in range(20):
        stages, count = rng.randint(2, 4), rng.choice([3, 7, 12])
        size = stages + rng.randint(0, 2)
        forward, backward = ([rng.choice([0.0, 1.0, 2.0, rng.random()]) for _ in range(size)] for _ in range(2))
        transfer, handover = np.zeros((2, size + 1))
        transfer[1:-1] = [rng.choice([0.0, 0.1, rng.random()]) for _ in range(size - 1)]
        handover[1:-1] = [rng.choice([0.0, 0.0, 0.2]) for _ in range(size - 1)]
        sums = [np.concatenate([[0.0], np.cumsum(row)]) for row in (forward, backward, backward)]
        seconds = LayerSeconds(*sums, transfer, handover)
        fits = np.where(np.triu(np.ones((size, size + 1)), 1) > 0, 1, NEVER).astype(np.int64)
        run, nothing = RunShape(count, schedule), [np.zeros(fits.shape)] * stages
        bound, graph = least_step(RangeCosts(fits), seconds, run, nothing), StageGraph.line(stages, count)
        flags = [row for row in itertools.product((False, True), repeat=stages) if any(row[:-1]) or not again]
        most = [min(count, 3 * (stages - stage)) for stage in range(stages)]
        limits = [(), most, *([rng.randint(1, limit) for limit in most] for _ in range(10))]
        if schedule == "1f1b-star":
            lists = [schedule_of(schedule, graph, False, row) for row in limits]
        else:
            lists = [schedule_of(schedule, graph, row) for row in flags]
        cuts = np.array(list(cut_lists(size, stages)))
        best = min(
            simulate(
                actions,
                StageSeconds(f, b, [0.0] * stages, transfer=[0.0, *across], handover=[0.0, *handed]),
            ).step_seconds
            for f, b, _, across, handed in zip(*(part.tolist() for part in seconds.of_cuts(cuts)), strict=True)
            for actions in lists
        )
        assert bound <= best * (1 + 1e-9)
        reached += bound >= best * (1 - 1e-9)
    assert reached > 2, "the bound is often the shortest step"


def uneven() -> Profile:
    """Return six layers: the first two are slow and small, the last four fast and large."""
    rows = [(4.0, 1), (4.0, 1), (1.0, 10), (1.0, 10), (1.0, 10), (1.0, 10)]
    layers = [
        LayerProfile(f"l{i}", size, size if i else None, forward_seconds=time, backward_seconds=2 * time)
        for i, (time, size) in enumerate(rows)
    ]
    return Profile(tuple(layers), conditions={"microbatch_size": 1})


def test_time_and_memory_pull_the_cut_to_different_sides() -> None:
    profile = uneven()
    assert asking.plan(profile, 2, "exact", run=RunShape(8)).cuts == (0, 4)
    fast = asking.plan(profile, 2, "throughput", run=RunShape(8))
    assert fast.cuts == (0, 1)
    assert fast.peak_bytes == 41
    assert fast.planner == "throughput"
    assert asking.plan(profile, 2, "throughput", run=RunShape(8), capacity=40).cuts == (0, 2)
    assert asking.plan(profile, 2, "throughput", run=RunShape(8), capacity=22).cuts == (0, 4)


def test_does_not_fit_is_answered_with_the_smallest_peak_and_the_shortfall() -> None:
    plan = asking.plan(uneven(), 2, "throughput", run=RunShape(8), capacity=20)
    assert plan.fits is False
    assert plan.cuts == asking.plan(uneven(), 2, "exact").cuts
    assert plan.shortfall is not None
    assert plan.shortfall.bytes == 2


def test_a_slow_link_moves_the_cut_to_where_little_crosses() -> None:
    layers = [
        LayerProfile(f"l{i}", 1, 1 if i else None, boundary_bytes=crossing, forward_seconds=1.0, backward_seconds=2.0)
        for i, crossing in enumerate([1, 100, 100, 100, 1])
    ]
    profile = Profile(tuple(layers))
    assert asking.plan(profile, 2, "throughput", run=RunShape(4)).cuts in ((0, 2), (0, 3))
    assert asking.plan(profile, 2, "throughput", run=RunShape(4), link=Link(5.0)).cuts == (0, 1)


def test_equally_fast_lists_are_told_apart_by_their_peak() -> None:
    seconds = LayerSeconds(np.array([0.0, 1, 1, 2]), np.array([0.0, 2, 2, 4]), np.zeros(4), np.zeros(4), np.zeros(4))
    costs = AdditiveCosts.of_statistics([5, 7, 6], [0, 7, 6])  # layer 1 takes no time
    assert fastest_cuts(costs, seconds, RunShape(4, "1f1b", False), 2) == Fastest((0, 2), 15.0, 15.0, 12)


def test_more_microbatches_make_an_even_split_worth_more() -> None:
    """A single microbatch visits stage after stage, so all cuts are equally fast. Many fill the pipeline."""
    profile = chain(random.Random(5), 8)
    costs = AdditiveCosts.of_statistics([1] * 8, [0] + [0] * 7)
    single, many = (fastest_cuts(costs, seconds_of(profile), RunShape(count, "1f1b", False), 3) for count in (1, 64))
    assert single is not None
    assert many is not None
    total_seconds = sum(profile.column("forward_seconds")) + sum(profile.column("backward_seconds"))
    assert single.step_seconds == pytest.approx(total_seconds)
    assert many.step_seconds < 0.7 * 64 * total_seconds


def test_what_the_profile_lacks_is_named() -> None:
    bare = Profile((LayerProfile("a", 1), LayerProfile("b", 1, 1)))
    with pytest.raises(CapslogError, match=r"no forward_seconds for layers\[0\] \(a\)"):
        asking.plan(bare, 2, "throughput")
    with pytest.raises(CapslogError, match="no boundary_bytes"):
        asking.plan(uneven(), 2, "throughput", link=Link(1e9))
    with pytest.raises(CapslogError, match="bandwidth is 0"):
        Link(0)


def test_forty_eight_layers_on_twenty_four_devices_are_bounded() -> None:
    """Too many layers for the beam: the result gives a bound on its distance from the best, and the bound holds."""
    profile = chain(random.Random(6), 48)
    costs = AdditiveCosts.of_statistics(profile.column("isolated_bytes"), profile.column("added_bytes"))
    fastest = fastest_cuts(costs, seconds_of(profile), RunShape(8), 24, [60] * 24)
    assert fastest is not None
    assert max(costs.peaks(fastest.cuts)) <= 60
    assert fastest.step_seconds == pytest.approx(simulated(profile, fastest.cuts, "varuna", 8, True))
    assert fastest.bound_seconds <= fastest.step_seconds <= 1.5 * fastest.bound_seconds


# -- the front of peak against step time


def front_by_trying_all(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the Pareto-optimal (peak, step) points; step times are compared with tolerance 1e-9."""
    kept: list[tuple[int, float]] = []
    for peak, step in sorted(points):
        if not kept or step < kept[-1][1] * (1 - 1e-9):
            kept.append((peak, step))
    return kept


def test_every_point_of_the_front_and_no_other() -> None:
    rng = random.Random(1)
    sizes = []
    for _ in range(60):
        layers = rng.randint(2, 9)
        stages = rng.randint(1, min(layers, 4))
        profile = chain(rng, layers)
        costs = Positional([rng.randint(1, 30) for _ in range(layers)], [rng.randint(0, 9) for _ in range(layers)])
        schedule, microbatches, recompute = rng.choice(SCHEDULES), rng.choice([2, 6]), rng.random() < 0.5
        run = RunShape(microbatches, schedule, recompute)
        link = rng.choice([None, Link(20.0, 0.01)])
        capacities = [rng.randint(60, 150) for _ in range(stages)] if rng.random() < 0.5 else None
        lists = [
            cuts
            for cuts in cut_lists(layers, stages)
            if capacities is None or all(np.array(costs.peaks(cuts)) <= capacities)
        ]
        expected = front_by_trying_all(
            [
                (
                    max(costs.peaks(cuts)),
                    simulated(profile, cuts, run.schedule, run.num_microbatches, run.recompute, link),
                )
                for cuts in lists
            ]
        )
        front = pareto_front(costs, seconds_of(profile, link), run, stages, capacities)
        assert [point.peak_bytes for point in front] == [peak for peak, _ in expected]
        assert [point.step_seconds for point in front] == pytest.approx([step for _, step in expected])
        sizes.append(len(front))
        if front:
            assert front[-1] == fastest_cuts(costs, seconds_of(profile, link), run, stages, capacities)
    assert max(sizes) >= 4
    assert min(sizes) == 0, "no instance that fits nothing was drawn"


def test_a_hasty_front_holds_nothing_that_another_point_beats() -> None:
    """A beam of one list may find a faster list under a smaller limit; the slower, larger one must then go."""
    rng = random.Random(4)
    dropped = 0
    for _ in range(40):
        profile = chain(rng, 12)
        costs = Positional([rng.randint(1, 30) for _ in range(12)], [0] * 12)
        run, link = RunShape(6), Link(20.0, 0.01)
        front = pareto_front(costs, seconds_of(profile, link), run, 5, width=1)
        peaks, steps = [point.peak_bytes for point in front], [point.step_seconds for point in front]
        assert peaks == sorted(set(peaks))
        assert steps == sorted(set(steps), reverse=True)
        largest = fastest_cuts(costs, seconds_of(profile, link), run, 5, width=1)
        assert largest is not None
        dropped += front[-1].step_seconds < largest.step_seconds
    assert dropped > 0, "no point was ever beaten"
