"""Joint plans of pipelines, stages and shares, compared with every composition, order, cut list and share."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.planners.timed import chain, cut_lists, simulated
from tests.planning import asking
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.fleet import compose, least_seconds
from varuna_capslog.planners.joint import Device, JointPlan, best_fleet, best_fleet_of_run
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planners.seconds import Link as Blocking
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.schedules import RunShape

LINKS = (None, Link(100.0, 0.01), Link(None, 0.2), Blocking(100.0, 0.01, copy_bandwidth=60.0))


def fleet_of(*arguments: Any, **options: Any) -> JointPlan:
    """Return `best_fleet` of the arguments; the fleet must fit."""
    fleet = best_fleet(*arguments, **options)
    assert isinstance(fleet, JointPlan)
    return fleet


def equal_layers(count: int, size: int = 10, seconds: float = 1.0, microbatch_size: int = 1) -> Profile:
    layers = [
        LayerProfile(
            f"l{i}",
            size,
            size if i else None,
            parameter_bytes=0,
            boundary_bytes=1,
            forward_seconds=seconds,
            backward_seconds=2 * seconds,
        )
        for i in range(count)
    ]
    return Profile(tuple(layers), model="equal", conditions={"microbatch_size": microbatch_size})


def compositions(ranks: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield every partition of the ranks into groups."""
    if not ranks:
        yield []
        return
    for groups in compositions(ranks[1:]):
        yield [[ranks[0]], *groups]
        for place in range(len(groups)):
            yield [*groups[:place], [ranks[0], *groups[place]], *groups[place + 1 :]]


def best_by_trying_all(
    profile: Profile, devices: list[Device], microbatches: int, blocks: int, schedule: str, link: Link | None
) -> float:
    """Return the shortest step seconds of any fleet, inf if none fits."""
    parameters = profile.column("parameter_bytes")
    isolated, added = profile.column("isolated_bytes"), profile.column("added_bytes")

    @functools.cache
    def one_pipeline(kinds: tuple[tuple[int, float], ...], share: int) -> float:
        copies = min(share, 2) - 1 if share == blocks else share - 1
        best = float("inf")
        for order in set(itertools.permutations(kinds)):
            for cuts in cut_lists(profile.num_layers, len(order)):
                ends = [*cuts[1:], profile.num_layers]
                held = [sum(parameters[first:end]) for first, end in zip(cuts, ends, strict=True)]
                peaks = [isolated[first] + sum(added[first + 1 : end]) for first, end in zip(cuts, ends, strict=True)]
                if any(
                    peak + copies * weights > capacity
                    for peak, weights, (capacity, _) in zip(peaks, held, order, strict=True)
                ):
                    continue
                speeds = [speed for _, speed in order]
                count = share * microbatches // blocks
                step = simulated(profile, cuts, schedule, count, True, link, speeds)
                if share < blocks and link is not None and link.bandwidth is not None:
                    step += (blocks - share) * max(held) / link.bandwidth
                best = min(best, step)
        return best

    best = float("inf")
    ranks = range(len(devices))
    for used in itertools.chain.from_iterable(itertools.combinations(ranks, n) for n in range(1, len(devices) + 1)):
        for groups in compositions(used):
            if len(groups) > blocks or max(map(len, groups)) > profile.num_layers:
                continue
            for inner in itertools.combinations(range(1, blocks), len(groups) - 1):
                shares = np.diff([0, *inner, blocks]).tolist()
                steps = [
                    one_pipeline(tuple(sorted((devices[r].capacity or 10**9, devices[r].speed) for r in group)), share)
                    for group, share in zip(groups, shares, strict=True)
                ]
                best = min(best, max(steps))
    return best


def check(profile: Profile, devices: list[Device], fleet: JointPlan, blocks: int) -> None:
    """Check a fleet: each device is in one stage or idle, blocks are whole, stages fit, and the plan is valid."""
    plan = fleet.plan
    assert Plan.from_json(plan.to_json()) == plan
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    assert sorted([*ranks, *fleet.idle]) == list(range(len(devices)))
    assert plan.units.blocks == blocks
    for pipeline, (path, served) in zip(fleet.pipelines, plan.paths().items(), strict=True):
        assert len(served) == pipeline.blocks > 0
        assert served == list(range(served[0], served[-1] + 1))
        stages = [plan.stages[number] for number in path]
        assert tuple(stage.ranks[0] for stage in stages) == pipeline.devices
        assert tuple(stage.layers[0][0] for stage in stages) == pipeline.cuts
        for stage, rank in zip(stages, pipeline.devices, strict=True):
            capacity = devices[rank].capacity
            assert capacity is None or (stage.bytes or 0) <= capacity
    assert fleet.step_seconds == max(pipeline.step_seconds for pipeline in fleet.pipelines)


def test_no_fleet_is_more_than_one_percent_faster_and_none_beats_the_bound() -> None:
    rng = random.Random(1)
    unfit, worse, mixed = 0, 0, 0
    for _ in range(60):
        profile = chain(rng, rng.randint(2, 5))
        kinds = [Device(rng.choice([None, 20, 25, 35, 50]), rng.choice([1.0, 0.5, 0.7])) for _ in range(2)]
        devices = [rng.choice(kinds) for _ in range(rng.randint(1, 4))]
        blocks = rng.choice([1, 2, 3])
        microbatches = blocks * rng.choice([1, 2])
        schedule, link = rng.choice(["varuna", "1f1b"]), rng.choice(LINKS)
        fleet = best_fleet(profile, devices, microbatches, blocks, RunShape(schedule=schedule), link=link)
        best = best_by_trying_all(profile, devices, microbatches, blocks, schedule, link)
        if not isinstance(fleet, JointPlan):
            assert best == float("inf")
            unfit += 1
            continue
        check(profile, devices, fleet, blocks)
        assert fleet.bound_seconds is not None
        assert fleet.bound_seconds <= best * (1 + 1e-9)
        assert best * (1 - 1e-9) <= fleet.step_seconds <= best * 1.01
        worse += fleet.step_seconds > best * (1 + 1e-9)
        mixed += len({len(pipeline.devices) for pipeline in fleet.pipelines}) > 1
    assert unfit >= 3
    assert mixed >= 3
    assert worse == 0


def test_both_orders_of_two_devices_are_tried() -> None:
    """The order with the better bound is not always the one with the shorter step."""
    rng = random.Random(2)
    for _ in range(60):
        profile = chain(rng, 5)
        devices = [Device(50, 1.0), Device(50, 0.5)]
        fleet = fleet_of(profile, devices, 3, 1)
        assert fleet.step_seconds == pytest.approx(
            best_by_trying_all(profile, devices, 3, 1, "varuna", None), rel=0.005
        )


def test_seven_is_three_and_four() -> None:
    """Seven devices, five of the twelve layers fit each: neither 7 nor 3 + 3 devices are as fast as 3 + 4."""
    profile = equal_layers(12)
    fleet = fleet_of(profile, [Device(50)] * 7, 14)
    check(profile, [Device(50)] * 7, fleet, 14)
    assert sorted(len(pipeline.devices) for pipeline in fleet.pipelines) == [3, 4]
    assert fleet.idle == ()
    shares = {len(pipeline.devices): pipeline.blocks for pipeline in fleet.pipelines}
    assert shares == {3: 6, 4: 8}


@pytest.mark.parametrize("number", range(2, 14))
def test_any_number_of_devices_is_used_whole(number: int) -> None:
    profile = equal_layers(12)
    fleet = fleet_of(profile, [Device(80)] * number, 24)
    check(profile, [Device(80)] * number, fleet, 24)
    assert fleet.idle == ()
    fewer = best_fleet(profile, [Device(80)] * (number - 1), 24)
    assert not isinstance(fewer, JointPlan) or fleet.step_seconds <= fewer.step_seconds * 1.005


def test_a_slow_device_gets_fewer_layers_or_microbatches() -> None:
    fleet = fleet_of(equal_layers(8, size=1), [Device(100, 1.0), Device(100, 0.25)], 10)
    assert {pipeline.devices: pipeline.blocks for pipeline in fleet.pipelines} == {(0,): 8, (1,): 2}
    one_pipeline = fleet_of(equal_layers(8, size=1), [Device(7, 1.0), Device(7, 0.25)], 10)
    (pipeline,) = one_pipeline.pipelines
    layers = np.diff([*pipeline.cuts, 8])
    slow = pipeline.devices.index(1)
    assert layers[slow] < layers[1 - slow]


def test_a_larger_memory_takes_the_stage_that_needs_it() -> None:
    layers = [
        LayerProfile(f"l{i}", size, size if i else None, forward_seconds=1.0, backward_seconds=1.0)
        for i, size in enumerate([5, 5, 40])
    ]
    devices = [Device(40), Device(10)]
    (pipeline,) = fleet_of(Profile(tuple(layers)), devices, 4).pipelines
    assert pipeline.devices == (1, 0)
    assert pipeline.cuts == (0, 2)


def test_waiting_blocks_count_as_memory() -> None:
    """A pipeline among others keeps the gradients of each of its blocks until the exchange."""
    rows = [LayerProfile("a", 10, parameter_bytes=3, forward_seconds=1.0, backward_seconds=1.0)]
    profile = Profile(tuple(rows))
    two = fleet_of(profile, [Device(13)] * 2, 4)
    assert [pipeline.blocks for pipeline in two.pipelines] == [2, 2]
    assert two.plan.peak_bytes == 13
    # runs of such a profile contain the gradients of a second block, which used to be counted again
    profiled = Profile(tuple(rows), conditions={"accumulation_blocks": 4})
    assert fleet_of(profiled, [Device(13)] * 2, 4).plan.peak_bytes == 10
    single = fleet_of(profile, [Device(12)] * 2, 4)
    assert (single.blocks, [pipeline.blocks for pipeline in single.pipelines]) == (2, [1, 1])
    refused = solve(Problem.of(profile, 2, 12, RunShape(4, num_blocks=4)), "joint")
    assert refused.fits is False
    assert refused.shortfall is not None
    assert refused.shortfall.bytes == 1
    assert "until all 4 accumulation blocks are added" in refused.notes[0]


def test_the_best_microbatch_size_is_chosen() -> None:
    """Size 2 takes less than twice as long as size 1, but does not fit the small device."""
    small, large = equal_layers(4, 10, 1.0, 1), equal_layers(4, 25, 1.5, 2)
    assert fleet_of([small, large], [Device(200)] * 2, 8).plan.microbatch_size == 2
    assert fleet_of([small, large], [Device(40)] * 2, 8).plan.microbatch_size == 1


def test_does_not_fit_names_the_shortfall() -> None:
    plan = solve(Problem.of(equal_layers(4), 6, 9, RunShape(8)), "joint")
    assert (plan.planner, plan.bound_seconds, plan.num_ranks) == ("joint", None, 4)
    assert plan.fits is False
    assert plan.shortfall is not None
    assert plan.shortfall.bytes == 1
    assert "no number of devices would do" in plan.notes[0]


def test_many_kinds_of_devices_are_taken_for_fewer() -> None:
    rng = random.Random(2)
    devices = [Device(rng.randint(60, 100), rng.uniform(0.5, 1)) for _ in range(14)]
    fleet = fleet_of(equal_layers(12), devices, 16)
    check(equal_layers(12), devices, fleet, 16)
    assert fleet.bound_seconds is None, "weaker kinds were planned for, so it would be no bound"
    assert fleet.idle == ()


def test_a_large_fleet_of_two_kinds() -> None:
    profile = equal_layers(12)
    devices = [Device(40), Device(60, 0.6)] * 64
    fleet = fleet_of(profile, devices, 256, 64)
    check(profile, devices, fleet, 64)
    assert fleet.bound_seconds is not None
    assert len(fleet.idle) <= 2
    assert fleet.step_seconds <= 1.3 * fleet.bound_seconds


def test_a_large_fleet_is_close_to_its_relaxation() -> None:
    """The integer program for 1,000 devices gives a valid fleet, close to the fractional relaxation."""
    rng = np.random.default_rng(3)
    sizes = np.array([(a, b) for a in range(8) for b in range(8) if a + b], dtype=np.int64)
    speed = sizes @ np.array([1.0, 0.6]) * rng.uniform(0.8, 1.0, len(sizes))
    times = np.arange(1, 13)[:, None] * 10 / speed + 5
    for blocks in (90, 300, 700):  # 90 pipelines at most, so that they must be long to use the devices
        counts = [501, 499]
        fleet, least = compose(sizes, counts, blocks, times), least_seconds(sizes, counts, blocks, times)
        assert fleet is not None
        assert least is not None
        used = sum(count * sizes[number] for number, _, count in fleet.pipelines)
        assert (used <= counts).all()
        assert used.sum() >= 990
        assert sum(gain * count for _, gain, count in fleet.pipelines) >= blocks
        assert sum(count for *_, count in fleet.pipelines) <= blocks
        assert all(times[gain - 1, number] <= fleet.seconds for number, gain, _ in fleet.pipelines)
        assert least <= fleet.seconds <= 1.02 * least


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minibatch_size": 7, "profiles": equal_layers(4, microbatch_size=2)}, "not a whole number of microbatches"),
        ({"blocks": 3}, "3 accumulation blocks do not divide the 8 microbatches"),
        ({"devices": []}, "at least one profile and one device"),
        ({"run": RunShape(schedule="1f1b", recompute=False)}, "needs peaks"),
        ({"profiles": Profile((LayerProfile("a", 1),))}, "no forward_seconds"),
    ],
)
def test_mistakes_are_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"profiles": equal_layers(4), "devices": [Device()], "minibatch_size": 8}
    with pytest.raises(CapslogError, match=message):
        fleet_of(**{**arguments, **change})  # type: ignore[arg-type]
    with pytest.raises(CapslogError, match="speed is 0"):
        Device(speed=0)


def test_one_device_is_a_plan_of_one_stage() -> None:
    fleet = fleet_of(equal_layers(4), [Device(40)], 8)
    (pipeline,) = fleet.pipelines
    assert (pipeline.cuts, pipeline.blocks, fleet.step_seconds) == ((0,), 8, 4 * 3.0 * 8)
    assert asking.plan(equal_layers(4), 1, capacity=40).fits


def test_what_lies_beside_training_counts_against_the_capacities_and_is_no_part_of_the_plans_bytes() -> None:
    """The fleet is the same as if every layer held so many more bytes."""
    dice = random.Random(12)
    fitting = 0
    for _ in range(40):
        profile = chain(dice, dice.randint(2, 6))
        beside = [dice.randint(0, 12) for _ in profile.layers]
        heavier = [
            dataclasses.replace(
                layer,
                isolated_bytes=layer.isolated_bytes + more,
                added_bytes=None if layer.added_bytes is None else layer.added_bytes + more,
            )
            for layer, more in zip(profile.layers, beside, strict=True)
        ]
        devices = [Device(dice.choice([None, 40, 60, 90])) for _ in range(dice.randint(1, 6))]
        run = RunShape(8, num_blocks=dice.choice([1, 2, 4]), microbatch_size=1)
        fleet = best_fleet_of_run(profile, devices, run, "additive", beside=beside)
        same = best_fleet(
            dataclasses.replace(profile, layers=tuple(heavier)), devices, 8, run.num_blocks, run, "additive"
        )
        assert isinstance(fleet, JointPlan) == isinstance(same, JointPlan)
        if not isinstance(fleet, JointPlan) or not isinstance(same, JointPlan):
            continue
        fitting += 1
        assert (fleet.step_seconds, fleet.pipelines) == (same.step_seconds, same.pipelines)
        for ours, theirs in zip(fleet.plan.stages, same.plan.stages, strict=True):
            (first, end), size = ours.layers[0], theirs.bytes
            assert size is not None
            assert (ours.layers, ours.ranks, ours.blocks) == (theirs.layers, theirs.ranks, theirs.blocks)
            assert ours.bytes == size - sum(beside[first:end])
    assert fitting > 15
