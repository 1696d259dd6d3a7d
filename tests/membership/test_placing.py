"""Placement of layers and copies on whatever devices are left, held to trying every number of replicas and stages and
every cut list.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from tests.planners.instances import exhaustive, peaks
from tests.planners.timed import chain
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config, section
from varuna_capslog.config.settings import Elastic
from varuna_capslog.membership.generation import MemberLayout
from varuna_capslog.membership.layout_candidates import LayoutCandidates
from varuna_capslog.membership.placing import Placer, describe_reserves, state_bytes
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.redundancy import Reserve, reserves
from varuna_capslog.planners.seconds import Link, step_player
from varuna_capslog.planning.simulation import UPDATE_RATE, simulate_plan
from varuna_capslog.plans.parts import PlanRank, PlanStage, Units
from varuna_capslog.plans.plan import Plan, pipelines_of
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.schedules import RunShape

GIB = 1 << 30
FAST, SLOW = Link(), Link(bandwidth=40.0, latency_seconds=0.01)


def seats_of(capacities: Sequence[int], hosts: Sequence[str] | None = None) -> list[Seat]:
    names = hosts or [f"h{number}" for number in range(len(capacities))]
    return [Seat(f"m{number}", names[number], size) for number, size in enumerate(capacities)]


def steps_of(
    num_microbatches: int,
    num_blocks: int = 1,
    microbatch_size: int | None = None,
    schedule: str = "varuna",
    recompute: bool = True,
) -> RunShape:
    return RunShape(num_microbatches, schedule, recompute, "host", microbatch_size, num_blocks)


def placer_of(profile: Profile | None, steps: RunShape, **options: object) -> Placer:
    """reserved: snapshots and copies are kept on the devices."""
    sizes = options.pop("layer_bytes", None) or [30] * (profile.num_layers if profile else 1)
    reserved = options.pop("reserved", False)
    kept = {name: options.pop(name) for name in ("redundancy", "min_devices") if name in options}
    elastic = Elastic.model_validate({"redundancy": 1 if reserved else 0, **kept})
    chosen = {"link": FAST, "beside": sizes if reserved else None, **options}
    return Placer(LayoutCandidates(profile, sizes, steps, **chosen), elastic)  # type: ignore[arg-type]


def plain(layers: int, seconds: bool = True, **fields: object) -> Profile:
    """A chain of equal layers: 100 bytes each, one second forward and two backward."""
    times = {"forward_seconds": 1.0, "backward_seconds": 2.0} if seconds else {}
    rows = [
        LayerProfile(f"l{n}", 100, added_bytes=100 if n else None, parameter_bytes=10, **times) for n in range(layers)
    ]
    return Profile(tuple(rows), conditions={"microbatch_size": 1, **fields})


def shape_of(layout: MemberLayout | str, seats: Sequence[Seat]) -> tuple[tuple[int, ...], int, int]:
    """Cuts, devices of one pipeline and number of pipelines; what each member owns is what the plan says."""
    assert isinstance(layout, MemberLayout), layout
    assert layout.plan is not None
    alike = pipelines_of(layout.plan)
    assert alike is not None
    assert layout == MemberLayout.of_plan(layout.plan, [seat.member for seat in seats], layout.copied, layout.problem)
    return alike[0], len(alike[0]), alike[1]


# -- the search


def by_trying_all(
    profile: Profile, steps: RunShape, capacities: Sequence[int], link: Link, most: int
) -> tuple[tuple[int, ...], int, int] | None:
    """Return the fastest of all shapes, each with its cut list of smallest peak. All cut lists are enumerated; the
    simulator gives their step times.
    """
    isolated = [layer.isolated_bytes for layer in profile.layers]
    added = [layer.added_bytes or 0 for layer in profile.layers]
    weights = [layer.parameter_bytes or 0 for layer in profile.layers]
    num_layers, blocks = profile.num_layers, steps.num_blocks
    best: tuple[tuple[int, int, int], tuple[tuple[int, ...], int, int]] | None = None
    for replicas in (r for r in range(1, most + 1) if blocks % r == 0):
        share = blocks // replicas
        waiting = min(share, 2) - 1 if replicas == 1 else share - 1

        def held(cuts: Sequence[int], waiting: int = waiting) -> list[int]:
            bounds = [*cuts, num_layers]
            gradient_bytes = [waiting * sum(weights[a:b]) for a, b in pairwise(bounds)]
            return [
                peak + gradients
                for peak, gradients in zip(peaks(isolated, added, list(cuts)), gradient_bytes, strict=True)
            ]

        for stages in range(1, min(len(capacities) // replicas, num_layers) + 1):
            limits = [
                min(size or 1 << 40 for size in capacities[d : replicas * stages : stages]) for d in range(stages)
            ]
            fitting = [
                cuts
                for cuts in exhaustive(LayoutCandidates(profile, [1] * num_layers, steps)._costs[1], stages)
                if all(used <= limit for used, limit in zip(held(cuts), limits, strict=True))
            ]
            if len(set(limits)) == 1:  # then the planner looks for the smallest peak, whether or not it fits
                cut_lists = exhaustive(LayoutCandidates(profile, [1] * num_layers, steps)._costs[1], stages)
                smallest = min(cut_lists, key=lambda cuts: (sorted(held(cuts), reverse=True), cuts))
                fitting = [smallest] if smallest in fitting else []
            if not fitting:
                continue
            cuts = min(fitting, key=lambda cuts: (sorted(held(cuts), reverse=True), cuts))
            plan = Plan.of_cuts(num_layers, tuple(cuts), schedule=steps.schedule)
            count = steps.num_microbatches // replicas
            step = simulate_plan(profile, plan, num_microbatches=count, recompute=steps.recompute, link=link)
            largest = max(sum(weights[a:b]) for a, b in pairwise([*cuts, num_layers]))
            exchange = (blocks - share) * link.seconds(largest) if replicas > 1 and largest else 0.0
            ticks = round((step.step_seconds + exchange) * 1e9)
            key = (ticks, -replicas * stages, replicas)
            if best is None or key < best[0]:
                best = (key, (tuple(cuts), stages, replicas))
    return None if best is None else best[1]


def test_the_quickest_of_all_replicas_stages_and_cuts_that_fit_is_placed() -> None:
    rng = random.Random(5)
    shapes, waits = set(), 0
    for _ in range(120):
        profile = chain(rng, rng.randint(1, 6))
        if rng.random() < 0.5:
            profile = dataclasses.replace(profile, conditions={"microbatch_size": 1, UPDATE_RATE: rng.choice([0, 0.3])})
        blocks = rng.choice([1, 2, 4, 6])
        steps = steps_of(blocks * rng.choice([1, 2]), blocks, 1, rng.choice(["gpipe", "1f1b", "varuna"]))
        size = rng.choice([0, 30, 40, 60])
        capacities = [size] * rng.randint(1, 7)
        if rng.random() < 0.5:
            capacities = [rng.choice([0, 30, 45, 80]) for _ in capacities]
        link, most = rng.choice([FAST, SLOW]), rng.choice([1, 2, 6])
        placer = placer_of(profile, steps, memory="additive", link=link, max_replicas=most)
        seats = seats_of(capacities)
        expected = by_trying_all(profile, steps, capacities, link, most)
        layout = placer(seats)
        if expected is None:
            waits += 1
            assert isinstance(layout, str)
            assert "does not fit" in layout
            continue
        assert shape_of(layout, seats) == expected
        shapes.add(expected[1:])
    assert waits >= 5
    assert len(shapes) >= 10


def test_no_cut_list_is_faster_than_the_bound() -> None:
    rng = random.Random(2)
    tight = 0
    for _ in range(60):
        profile = chain(rng, rng.randint(1, 6))
        steps = steps_of(rng.choice([1, 2, 5, 8]), 1, 1, rng.choice(["gpipe", "1f1b", "varuna"]), rng.random() < 0.5)
        memory = "additive" if steps.recompute or steps.schedule == "varuna" else "auto"
        candidates = LayoutCandidates(
            profile, [1] * profile.num_layers, steps, memory=memory, link=rng.choice([FAST, SLOW])
        )
        for stages in range(1, profile.num_layers + 1):
            bound = candidates.bound_ticks(1, stages)
            lists = exhaustive(candidates._costs[1], stages)
            least = min(candidates._step_ticks(1, tuple(cuts)) or 0 for cuts in lists)
            assert bound <= least
            tight += bound > 0.9 * least
    assert tight > 30


def test_no_cut_list_that_fits_unequal_devices_is_faster_than_their_bound() -> None:
    rng = random.Random(4)
    tight = impossible = 0
    for _ in range(80):
        profile = chain(rng, rng.randint(2, 6))
        candidates = LayoutCandidates(
            profile, [1] * profile.num_layers, steps_of(rng.choice([1, 4, 9]), 1, 1), memory="additive"
        )
        for stages in range(2, profile.num_layers + 1):
            usable = [rng.randint(10, 50) for _ in range(stages)]
            lists = [candidates.of_cuts(1, tuple(cuts)) for cuts in exhaustive(candidates._costs[1], stages)]
            steps = [candidate.step_ticks or 0 for candidate in lists if candidate.fits(usable)]
            bound = candidates._limited_bound(1, stages, usable)
            assert (bound is None) == (not steps)
            if bound is None:
                impossible += 1
            else:
                assert bound <= min(steps)
                tight += bound > 0.9 * min(steps)
    assert tight > 30
    assert impossible > 30


def test_every_stage_but_the_last_repeats_at_least_all_forwards_but_one() -> None:
    """Check the assumption of the lower bound on the step."""
    for schedule, stages, microbatches in itertools.product(("gpipe", "1f1b", "varuna"), range(1, 9), (1, 2, 3, 7, 12)):
        forwards = step_player(RunShape(microbatches, schedule), stages).forwards
        assert all(count >= 2 * microbatches - 1 for count in forwards[:-1])
        assert forwards[-1] >= microbatches


def test_of_devices_of_unlike_speeds_the_quickest_cuts_are_proposed() -> None:
    """Compared with every cut list of every shape, simulated at the speeds of the devices."""
    rng = random.Random(11)
    for _ in range(25):
        profile = chain(rng, rng.randint(2, 6))
        blocks = rng.choice([1, 2])
        steps = steps_of(4 * blocks, blocks, 1, rng.choice(["gpipe", "1f1b"]), recompute=False)
        placer = placer_of(profile, steps, planner="throughput")
        seats = [seat._replace(speed=rng.choice([0.25, 0.5, 1.0])) for seat in seats_of([0] * rng.randint(2, 4))]
        if len({seat.speed for seat in seats}) == 1:
            assert placer.propose(seats) is None, "every member finds it by itself"
            continue
        proposed = placer.propose(seats)
        assert proposed is not None
        assert [rank.speed for rank in proposed.ranks] == [seat.speed for seat in seats[: proposed.num_ranks]]

        def step_of(plan: Plan, seats: Sequence[Seat] = seats, profile: Profile = profile) -> float:
            ranks = tuple(PlanRank(speed=seat.speed) for seat in seats[: plan.num_ranks])
            return simulate_plan(profile, dataclasses.replace(plan, ranks=ranks), recompute=False).step_seconds

        step_seconds = [
            step_of(placer.pipelines(cuts, replicas))
            for replicas in range(1, blocks + 1)
            for stages in range(1, min(len(seats) // replicas, profile.num_layers) + 1)
            for cuts in ([0, *inner] for inner in itertools.combinations(range(1, profile.num_layers), stages - 1))
        ]
        assert step_of(proposed) == pytest.approx(min(step_seconds), rel=1e-6)


def test_the_step_is_the_simulators_with_several_pipelines_exchange_and_update() -> None:
    profile = chain(random.Random(3), 5)
    profile = dataclasses.replace(profile, conditions={"microbatch_size": 1, UPDATE_RATE: 0.2})
    candidates = LayoutCandidates(profile, [1] * 5, steps_of(8, 2), link=SLOW)
    cuts = (0, 2, 4)
    spans = [tuple(span) for span in pairwise([*cuts, 5])]
    placed = tuple(
        PlanStage((span,), (3 * replica + number,), (replica,), memory=None)
        for replica in range(2)
        for number, span in enumerate(spans)
    )
    plan = Plan(5, placed, schedule="varuna")
    played = simulate_plan(profile, plan, num_microbatches=4, recompute=True, link=SLOW)
    assert candidates._step_ticks(2, cuts) == round(played.step_seconds * 1e9)


def test_answers_do_not_depend_on_what_was_asked_before() -> None:
    profile = chain(random.Random(11), 9)
    questions = [[60] * n for n in range(1, 13)] + [[80, 60, 0] * n for n in range(1, 4)]
    steps = steps_of(12, 6, 1)
    fresh = [placer_of(profile, steps, memory="additive")(seats_of(caps)) for caps in questions]
    for seed in range(3):
        placer = placer_of(profile, steps, memory="additive")
        if seed:
            placer.candidates.prepare(12)
        order = list(range(len(questions)))
        random.Random(seed).shuffle(order)
        assert all(placer(seats_of(questions[number])) == fresh[number] for number in order + order)


# -- any number of devices


@pytest.mark.parametrize("replicas", [1, 3])
def test_any_number_of_devices_gets_whole_pipelines_on_the_first_ranks(replicas: int) -> None:
    layers = 5
    placer = placer_of(plain(layers), steps_of(12, 6, 1), max_replicas=replicas)
    for count in range(1, layers * replicas + 3):
        seats = seats_of([0] * count)
        layout = placer(seats)
        cuts, devices, pipelines = shape_of(layout, seats)
        assert isinstance(layout, MemberLayout)
        assert pipelines <= replicas
        assert devices * pipelines <= count
        ends = [*cuts[1:], layers]
        for rank, seat in enumerate(seats):
            owned = layout.owned.get(seat.member, ())
            expected = () if rank >= devices * pipelines else range(cuts[rank % devices], ends[rank % devices])
            assert owned == tuple(expected)
    assert (devices, pipelines) == (layers, replicas)


def test_without_seconds_one_pipeline_of_as_many_stages_as_possible() -> None:
    for profile in (plain(4, seconds=False), None):
        placer = placer_of(profile, steps_of(8, 8), layer_bytes=[100, 1, 1, 1])
        for count, stages in ((1, 1), (3, 3), (4, 4), (6, 4)):
            seats = seats_of([0] * count)
            assert shape_of(placer(seats), seats)[1:] == (stages, 1)


def test_without_a_profile_the_layers_bytes_are_cut_and_no_capacity_is_compared() -> None:
    placer = placer_of(None, steps_of(8), layer_bytes=[50, 1, 1, 1, 45])
    seats = seats_of([1, 1])
    assert shape_of(placer(seats), seats)[0] == (0, 1)


@pytest.mark.parametrize(
    ("profile", "steps", "options", "message"),
    [
        (plain(3), steps_of(4), {"layer_bytes": [1, 1]}, "profile has 3 layers, the chain 2"),
        (plain(3), steps_of(4), {"planner": "mcap-bo"}, "is not asked anew after a membership change"),
        (plain(3), steps_of(4), {"planner": "best"}, "planner"),
        (plain(3), steps_of(4), {"memory": "best"}, "memory model"),
    ],
)
def test_what_cannot_be_placed_with_is_refused_at_once(profile, steps, options, message) -> None:
    with pytest.raises(CapslogError, match=message):
        placer_of(profile, steps, **options)


def test_blocks_that_do_not_divide_the_microbatches_are_refused() -> None:
    with pytest.raises(CapslogError, match="3 accumulation blocks do not divide the 8 microbatches"):
        steps_of(8, 3)


def test_the_throughput_planner_is_asked_where_it_is_configured() -> None:
    """The first layer takes longest and little memory: cuts by memory and by time differ."""
    rows = [
        LayerProfile(f"l{n}", 10 if n == 0 else 100, 100 if n else None, forward_seconds=3.0 if n == 0 else 1.0,
                     backward_seconds=2.0) for n in range(5)
    ]  # fmt: skip
    profile, seats = Profile(tuple(rows)), seats_of([0, 0])
    by_time = placer_of(profile, steps_of(16), planner="throughput")
    by_bytes = placer_of(profile, steps_of(16), planner="exact")
    assert shape_of(by_bytes(seats), seats)[0] == (0, 3)
    assert shape_of(by_time(seats), seats)[0] == (0, 2)


# -- memory


def test_what_does_not_fit_says_where_how_much_and_how_many_devices_would_do() -> None:
    placer = placer_of(plain(6), steps_of(6, 1, 1), memory="additive")
    answer = placer(seats_of([200, 200]))
    assert answer == (
        "the job does not fit 2 device(s): layers 0 to 2 need 300 B of the 200 B of m0 on h0, 100 B too much; "
        "waiting for 1 more of 200 B"
    )
    assert isinstance(placer(seats_of([200, 200, 200])), MemberLayout)
    assert "of more than 50 B, since no number of these holds the layers" in str(placer(seats_of([50] * 6)))


def test_the_number_of_devices_that_is_waited_for_is_enough_and_no_more() -> None:
    rng = random.Random(8)
    tried = 0
    for _ in range(40):
        profile = chain(rng, rng.randint(3, 8))
        placer = placer_of(profile, steps_of(4, 1, 1), memory="additive")
        size = rng.randint(15, 60)
        answers = [placer(seats_of([size] * count)) for count in range(1, profile.num_layers + 1)]
        for count, answer in enumerate(answers, start=1):
            if isinstance(answer, str) and " more of " in answer:
                tried += 1
                more = int(answer.split("waiting for ")[1].split()[0])
                assert isinstance(answers[count + more - 1], MemberLayout)
                assert all(isinstance(earlier, str) for earlier in answers[: count + more - 1])
    assert tried > 20


def test_headroom_counts() -> None:
    tight = {"headroom": {"fixed_bytes": 50, "fragmentation": 1.5}}
    assert isinstance(placer_of(plain(4), steps_of(4))(seats_of([200, 200])), MemberLayout)
    assert "need 350 B of the 200 B" in str(placer_of(plain(4, **tight), steps_of(4))(seats_of([200, 200])))
    assert isinstance(placer_of(plain(4, **tight), steps_of(4))(seats_of([350, 350])), MemberLayout)


def test_gradients_that_wait_for_other_pipelines_count() -> None:
    """Four blocks on two pipelines: each keeps the gradients of a second one until the exchange, 20 bytes here."""
    seats = seats_of([200, 200])
    two = placer_of(plain(2), steps_of(4, 2, 1), memory="additive")
    assert shape_of(two(seats), seats)[1:] == (1, 2)
    four = placer_of(plain(2), steps_of(4, 4, 1), memory="additive")
    assert shape_of(four(seats), seats)[1:] == (2, 1)
    counted = placer_of(plain(2, accumulation_blocks=2), steps_of(4, 4, 1), memory="additive")
    assert shape_of(counted(seats), seats)[1:] == (1, 2)


def test_a_run_that_the_memory_model_does_not_describe_is_compared_with_no_capacity() -> None:
    placer = placer_of(plain(4), steps_of(4, 1, 1, "gpipe", recompute=False), memory="additive")
    assert isinstance(placer(seats_of([1])), MemberLayout)
    larger_microbatches = placer_of(plain(4), steps_of(4, 1, microbatch_size=2), memory="additive")
    assert isinstance(larger_microbatches(seats_of([1])), MemberLayout)


def test_fewer_devices_than_the_run_asks_for_are_waited_for() -> None:
    placer = placer_of(plain(4), steps_of(4), min_devices=3)
    assert placer(seats_of([0])) == "1 device(s) are left, but elastic.min_devices is 3; waiting for 2 more"
    assert isinstance(placer(seats_of([0] * 3)), MemberLayout)
    assert placer_of(plain(4), steps_of(4))([]) == "no device is left; waiting for one"


# -- copies


@pytest.mark.parametrize("redundancy", [0, 1, 2])
def test_any_losses_of_hosts_up_to_the_redundancy_leave_every_layer_held(redundancy: int) -> None:
    rng = random.Random(redundancy)
    held = 0
    for _ in range(40):
        profile = chain(rng, rng.randint(2, 7))
        placer = placer_of(profile, steps_of(6, 6, 1), memory="additive", redundancy=redundancy)
        hosts = [f"h{rng.randrange(5)}" for _ in range(rng.randint(1, 9))]
        layout = placer(seats_of([0] * len(hosts), hosts))
        assert isinstance(layout, MemberLayout)
        names = sorted(set(hosts))
        if len(names) <= redundancy:
            assert layout.problem is not None
            assert f"redundancy {redundancy}" in layout.problem
            continue
        held += 1
        for lost in itertools.combinations(names, redundancy):
            survivors = {f"m{number}" for number, host in enumerate(hosts) if host not in lost}
            assert layout.covers(frozenset(survivors))
    assert held > 15


def test_on_one_host_copies_protect_against_the_loss_of_a_worker() -> None:
    placer = placer_of(plain(6), steps_of(8), redundancy=1)
    layout = placer(seats_of([0] * 4, ["here"] * 4))
    assert isinstance(layout, MemberLayout)
    for lost in range(4):
        assert layout.covers(frozenset(f"m{number}" for number in range(4) if number != lost))
    assert layout.problem is not None
    assert "add 1 host(s)" in layout.problem


def test_idle_members_keep_copies() -> None:
    placer = placer_of(plain(2), steps_of(4), redundancy=1)
    layout = placer(seats_of([0] * 3))
    assert isinstance(layout, MemberLayout)
    assert "m2" not in layout.owned
    assert layout.copied["m2"] == (0, 1)


def test_reserves_on_the_device_count_against_its_capacity() -> None:
    """A stage of 2 layers takes 200 B, its snapshot 60 B, copies of 2 others 2 x 60 B and 20 B for their gradients."""
    seats = seats_of([400] * 2)
    device = placer_of(plain(4), steps_of(4, 1, 1), memory="additive", reserved=True)
    layout = device(seats)
    assert isinstance(layout, MemberLayout)
    assert sorted(layout.copied) == ["m0", "m1"]
    reserved = reserves(layout, device.sync, device.layer_bytes, device.gradient_bytes)
    assert {sum(reserve) for reserve in reserved.values()} == {200}
    lacking = device(seats_of([399] * 2))
    assert isinstance(lacking, MemberLayout)
    assert "finds no room for copies" in str(lacking.problem)
    assert not lacking.covers(frozenset(["m0"]))
    assert "260 B of the 259 B" in str(device(seats_of([259] * 2)))
    without = placer_of(plain(4), steps_of(4, 1, 1), memory="additive")
    assert isinstance(without(seats_of([200] * 2)), MemberLayout)


def test_a_slower_placement_is_taken_where_only_its_copies_find_room() -> None:
    """A single pipeline of three unequal stages is fastest, but no device has room for a copy of the large middle
    layer's state; two pipelines hold everything twice.
    """
    rows = [
        LayerProfile(f"l{n}", 100, 0 if n else None, parameter_bytes=10, forward_seconds=1.0, backward_seconds=2.0)
        for n in range(3)
    ]
    options = {"memory": "additive", "layer_bytes": [10, 300, 10], "reserved": True}
    slow_exchange = Link(bandwidth=10.0)
    profile = Profile(tuple(dataclasses.replace(row, boundary_bytes=0) for row in rows))
    placer = placer_of(profile, steps_of(6, 2, 1), link=slow_exchange, **options)
    roomy, tight = seats_of([2000] * 3), seats_of([500] * 3)
    assert shape_of(placer(roomy), roomy)[1:] == (3, 1)
    # a stage of one layer takes 100 B beside its snapshot; a copy of the middle layer's state 2 x 300 B and 100 B
    layout = placer(tight)
    assert isinstance(layout, MemberLayout)
    assert shape_of(layout, tight)[1:] == (1, 2)
    assert layout.problem is None
    single = placer_of(profile, steps_of(6, 2, 1), link=slow_exchange, max_replicas=1, **options)
    layout = single(tight)
    assert isinstance(layout, MemberLayout)
    assert "finds no room for copies of layers 1" in str(layout.problem)


def test_snapshots_are_part_of_the_stage_that_is_cut() -> None:
    """Layer 0 has a large state: with its snapshot beside it, the even cut is another."""
    sizes = [300, 30, 30, 30]
    without = placer_of(plain(4), steps_of(4, 1, 1), memory="additive", layer_bytes=sizes)
    reserved = placer_of(plain(4), steps_of(4, 1, 1), memory="additive", layer_bytes=sizes, reserved=True)
    seats = seats_of([0, 0])
    assert shape_of(without(seats), seats)[0] == (0, 2)
    assert shape_of(reserved(seats), seats)[0] == (0, 1)


# -- from a config, and for people


def test_the_runs_own_plan_is_taken_where_as_many_devices_are_there_and_it_fits() -> None:
    values = {"workload": "a:b", "train": {"minibatch_size": 8}, "pipeline": {"devices": 2, "memory": "additive"}}
    config = section(Config, values, "")
    placer = Placer.of_config(config, plain(6), [30] * 6, plan=Plan.of_cuts(6, (0, 4)))
    for capacity, cuts in ((0, (0, 4)), (520, (0, 4)), (519, (0, 3))):  # four layers of 100 B, and their snapshots
        seats = seats_of([capacity] * 2)
        assert shape_of(placer(seats), seats)[0] == cuts
    seats = seats_of([0] * 3)
    assert shape_of(placer(seats), seats)[0] == (0, 2, 4)
    cuts = (0, 2, 3, 4, 5, 6)  # three stages on each of two devices: six devices would not run this plan
    spans = tuple(PlanStage((span,), (n % 2,)) for n, span in enumerate(pairwise([*cuts, 7])))
    seven_layers = Placer.of_config(config, plain(7), [30] * 7, plan=Plan(7, spans))
    seats = seats_of([0] * 6)
    assert shape_of(seven_layers(seats), seats)[0] == (0, 1, 2, 3, 4, 5)


RECTANGLES = Plan(
    6,
    (
        PlanStage(((0, 2),), (2,), memory=None, bytes=200),
        PlanStage(((2, 5),), (0,), (0, 1, 3), memory=None, bytes=330),
        PlanStage(((2, 5),), (1,), (2,), memory=None, bytes=310),
        PlanStage(((5, 6),), (2,), memory=None, bytes=100),
    ),
    Units(8, 1, 4),
    "varuna",
)
"""Both ends on the third device, the middle on the first two."""


def of_rectangles(plan: Plan = RECTANGLES, **elastic: object) -> Placer:
    values = {
        "workload": "a:b",
        "train": {"minibatch_size": 8, "accumulation_blocks": 4},
        "pipeline": {"devices": 3, "memory": "additive"},
        "elastic": {"enabled": True, **elastic},
    }
    return Placer.of_config(section(Config, values, ""), plain(6), [30] * 6, plan=plan)


def test_the_runs_own_plan_may_be_of_any_rectangles() -> None:
    """It is taken where three devices are there and what it says of each rank fits with the snapshots beside it: 300 B
    and 3 x 30 B on the third, 330 B and 3 x 30 B on the first. The middle is there twice; the ends get a copy.
    """
    for capacities, taken in (((0, 0, 0), True), ((420, 400, 390), True), ((419, 420, 420), False)):
        layout = of_rectangles()(seats_of(capacities))
        assert isinstance(layout, MemberLayout)
        assert (layout.plan == RECTANGLES) == taken
        if taken:
            assert layout.owned == {"m0": (2, 3, 4), "m1": (2, 3, 4), "m2": (0, 1, 5)}
    free = of_rectangles()(seats_of([0] * 3))
    assert isinstance(free, MemberLayout)
    for lost in range(3):
        assert free.covers({"m0", "m1", "m2"} - {f"m{lost}"})
    assert shape_of(of_rectangles()(seats_of([0] * 2)), seats_of([0] * 2))[1:] in ((2, 1), (1, 2))


CROSSED = Plan(
    6,
    (
        PlanStage(((0, 2),), (0,), memory=None),
        PlanStage(((2, 3), (4, 5)), (1,), memory=None),
        PlanStage(((3, 4), (5, 6)), (2,), memory=None),
    ),
    Units(8, 1, 4),
    "varuna",
    routes="direct",
)


@pytest.mark.parametrize(
    ("edges", "keeper"),
    [([(0, 1), (1, 5), (2, 4), (3, 5), (4, 5)], "m1"), ([(0, 1), (1, 4), (2, 4), (3, 5), (4, 5)], "m2")],
    ids=["the first stage feeds the third", "the first stage feeds the second"],
)
def test_under_direct_routes_those_are_neighbours_between_which_tensors_travel(
    edges: list[tuple[int, int]], keeper: str
) -> None:
    """The copy of the first stage goes to the device that takes nothing from it, the second or the third of them."""
    config = {"workload": "a:b", "train": {"minibatch_size": 8, "accumulation_blocks": 4}, "pipeline": {"devices": 3}}
    placer = Placer.of_config(section(Config, config, ""), plain(6), [30] * 6, plan=CROSSED, edges=edges)
    layout = placer(seats_of([0] * 3))
    assert isinstance(layout, MemberLayout)
    assert layout.plan == CROSSED
    assert layout.owned == {"m0": (0, 1), "m1": (2, 4), "m2": (3, 5)}
    assert [member for member, kept in layout.copied.items() if 0 in kept] == [keeper]
    for lost in layout.owned:
        assert layout.covers(layout.owned.keys() - {lost})


@pytest.mark.parametrize("schedule", ["1f1b-star", "1f1b"])
def test_what_follows_a_change_has_the_limits_that_keep_its_period(schedule: str) -> None:
    """They are in the plan, as those of the run's first plan are. By hand, for four layers on three devices: the last
    stage has two of them and sets the period of 6 s. From the begin of a forward of the second stage to the end of its
    backward it takes 1 + 6 + 2 s, of the first one 1 + 9 + 2 s. `1f1b` would have three in flight there.
    """
    placer = placer_of(plain(4), steps_of(8, schedule=schedule, recompute=False), layer_bytes=[30] * 4)
    layout = placer(seats_of([0] * 3))
    assert isinstance(layout, MemberLayout)
    assert layout.plan is not None
    assert layout.owned == {"m0": (0,), "m1": (1,), "m2": (2, 3)}
    told = [stage.in_flight for stage in layout.plan.stages]
    assert told == ([2, 2, 1] if schedule == "1f1b-star" else [None] * 3)


def test_bytes_of_a_plans_ranks_count_before_those_of_its_stages() -> None:
    ranks = tuple(PlanRank(size) for size in (330, 310, 350))
    plan = dataclasses.replace(RECTANGLES, ranks=ranks)
    for capacity, taken in ((440, True), (439, False)):
        layout = of_rectangles(plan)(seats_of([0, 0, capacity]))
        assert isinstance(layout, MemberLayout)
        assert (layout.plan == plan) == taken
    unknown = dataclasses.replace(
        RECTANGLES, stages=tuple(dataclasses.replace(stage, bytes=None) for stage in RECTANGLES.stages)
    )
    layout = of_rectangles(unknown)(seats_of([1] * 3))
    assert isinstance(layout, MemberLayout)
    assert layout.plan == unknown


def test_a_plan_that_the_generation_carries_is_taken_as_it_is_and_only_checked() -> None:
    carried = Plan(
        6, (PlanStage(((0, 6),), (1,), (0, 2, 3)), PlanStage(((0, 6),), (3,), (1,))), Units(8, 1, 4), "varuna"
    )
    layout = of_rectangles()(seats_of([0] * 4), carried)
    assert isinstance(layout, MemberLayout)
    assert layout.plan == carried
    assert layout.owned == {"m1": tuple(range(6)), "m3": tuple(range(6))}
    assert layout.copied == {}
    assert "elastic.min_devices is 5" in str(of_rectangles(min_devices=5)(seats_of([0] * 4), carried))
    larger_step = dataclasses.replace(carried, units=Units(16, 1, 4))
    with pytest.raises(CapslogError, match=r"has units.per_step 16, but this run has 8; the store belongs to another"):
        of_rectangles()(seats_of([0] * 4), larger_step)


def test_a_config_gives_the_placer_its_run() -> None:
    config = section(
        Config,
        {
            "workload": "a:b",
            "train": {"minibatch_size": 8, "accumulation_blocks": 4},
            "pipeline": {"planner": "exact", "bandwidth": "8Gbit", "latency": "250ms"},
            "elastic": {"enabled": True, "redundancy": 2, "protection": "async", "min_devices": 2},
        },
        "",
    )
    rows = [dataclasses.replace(layer, boundary_bytes=10) for layer in plain(4).layers]
    placer = Placer.of_config(config, dataclasses.replace(plain(4), layers=tuple(rows)), [30] * 4)
    assert placer.candidates.link == Link(1e9, 0.25)
    assert (placer.elastic.redundancy, placer.sync, placer.elastic.min_devices) == (2, False, 2)
    seats = seats_of([0] * 4)
    assert shape_of(placer(seats), seats)[1:] == (1, 4)


def test_state_and_gradients_as_a_profile_tells_them() -> None:
    def layer(name: str, static: int | None) -> LayerProfile:
        return LayerProfile(name, 1, None if name == "a" else 1, static_bytes=static, parameter_bytes=100)

    trained, frozen, partly = layer("a", 400), layer("b", 100), layer("c", 250)
    assert state_bytes(Profile((trained, frozen, partly))) == ([300, 100, 200], [100, 0, 50])
    assert state_bytes(Profile((trained, layer("b", None)))) is None
    # weights of 16 bits beside masters of 100, gradients as large as these, and moments of 16 bits
    conditions = {"weight_copies": 0.5, "optimizer_copies": 1.0}
    assert state_bytes(Profile((layer("a", 350),), conditions=conditions)) == ([250], [100])


def test_reserves_in_words() -> None:
    words = describe_reserves({"a": Reserve(GIB, 2 * GIB, GIB), "b": Reserve(GIB, 0, 0)})
    assert words == (
        "protection takes up to 4 GiB of a rank's memory on the device beside training (1 GiB for its own layers "
        "at the last boundary, 2 GiB for copies of others', 1 GiB for their gradients), 5 GiB over 2 rank(s)"
    )
    assert "copies" not in describe_reserves({"a": Reserve(GIB, 0, 0)})


def test_bounds_are_finite_numbers() -> None:
    candidates = LayoutCandidates(plain(5), [1] * 5, steps_of(4, 2))
    assert all(np.isfinite(candidates.bound_ticks(r, s)) for r in (1, 2) for s in range(1, 6))
