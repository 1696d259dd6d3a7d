"""Planners `budget` and `auto` at a change: proposed plans fit the devices, snapshots and copies included."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence

import pytest

from tests.planners.test_budget import timed
from tests.planning.asking import judged_layerwise_plan
from varuna_capslog.config.settings import Elastic
from varuna_capslog.membership.generation import MemberLayout
from varuna_capslog.membership.layout_candidates import Budgeted, LayoutCandidates, neighbours
from varuna_capslog.membership.placing import Placer
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.redundancy import reserves
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.playing import with_step_seconds
from varuna_capslog.planning.verdict import HostMemory, fold_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

RUN = RunShape(4, "auto", microbatch_size=1)


def seats_of(capacities: Sequence[int], host: str | None = None) -> list[Seat]:
    return [Seat(f"m{number}", host or f"h{number}", size) for number, size in enumerate(capacities)]


def placer_of(
    profile: Profile,
    state: int,
    redundancy: int = 0,
    planner: str = "budget",
    link: Link | None = None,
    run: RunShape = RUN,
) -> Placer:
    """Return a placer for layers of `state` bytes each. Snapshots of this state are kept on the device."""
    sizes = [state] * profile.num_layers
    candidates = LayoutCandidates(profile, sizes, run.settled(), planner, beside=sizes)
    budgeted = Budgeted.of(candidates, run, HostMemory(), link or Link())
    return Placer(candidates, Elastic.model_validate({"redundancy": redundancy}), budgeted=budgeted)


def most_of(profile: Profile, plan: Plan, layout: MemberLayout, placer: Placer, seats: Sequence[Seat]) -> list[int]:
    """Return the peak bytes of each rank by its own fold, plus its snapshot and its copies."""
    run = RunShape(4, plan.schedule or "varuna", microbatch_size=1)
    reserved = reserves(layout, True, placer.layer_bytes, placer.gradient_bytes)
    reserves_of_seats = [sum(reserved[seat.member]) if seat.member in reserved else 0 for seat in seats]
    folds = fold_plan(profile, plan, run)
    return [stage.peak_bytes + reserve_bytes for stage, reserve_bytes in zip(folds, reserves_of_seats, strict=False)]


def kept_peak(profile: Profile, state: int) -> int:
    """Return the peak bytes of a single device that keeps all activations, plus its snapshot."""
    plan = judged_layerwise_plan(profile, 1, "budget", "auto", None, RUN)
    assert plan.peak_bytes is not None
    return plan.peak_bytes + state * profile.num_layers


@pytest.mark.parametrize("seed", [1, 3])
def test_every_proposal_keeps_to_the_devices_with_snapshots_and_copies(seed: int) -> None:
    draw = random.Random(seed)
    profile, state = timed(draw, draw.randrange(4, 6)), draw.choice([30_000, 1_000_000])
    placer, peak = placer_of(profile, state, redundancy=1), kept_peak(profile, state)
    planned = treated = 0
    for part in (0.55, 0.8, 0.95):
        for count in (1, 2, 3):
            seats = seats_of([int(part * peak)] * count)
            plan = placer.propose(seats)
            if plan is None:
                continue
            planned += 1
            treated += any(stage.memory for stage in plan.stages)
            layout = placer(seats, Plan.from_json(json.loads(json.dumps(plan.to_json()))))
            assert isinstance(layout, MemberLayout)
            assert max(most_of(profile, plan, layout, placer, seats)) <= int(part * peak)
    assert planned >= 6
    assert treated


def test_fewer_devices_run_layers_again_where_cuts_alone_would_wait() -> None:
    """The smallest capacity with which one device trains lies below what its smallest plan without intervals takes."""
    profile = timed(random.Random(1), 5)
    placer, cut = placer_of(profile, 3_000), placer_of(profile, 3_000, planner="throughput")
    peak = kept_peak(profile, 3_000)
    capacity = next(size for size in range(peak, 0, -peak // 200) if isinstance(cut(seats_of([size])), str))
    plan = placer.propose(seats_of([capacity]))
    assert plan is not None
    assert any(stage.memory for stage in plan.stages)
    assert plan.fits
    roomy = placer.propose(seats_of([2 * peak]))
    assert roomy is not None
    assert roomy.step_seconds is not None
    assert plan.step_seconds is not None
    assert roomy.step_seconds <= plan.step_seconds
    assert placer.propose(seats_of([1000])) is None
    assert "does not fit 1 device(s)" in str(placer(seats_of([1000])))


def test_devices_become_as_many_pipelines_as_are_fastest_and_fit() -> None:
    """Replicas of one stage have no bubble, but each holds all layers; of three devices one or two are made."""
    profile, run = timed(random.Random(6), 5), RunShape(8, "1f1b", microbatch_size=1, num_blocks=4)
    placer = placer_of(profile, 2_000, run=run)
    peak = kept_peak(profile, 2_000)
    shapes: dict[tuple[int, float], tuple[int, bool]] = {}
    for count, part in itertools.product((2, 3, 4), (0.6, 0.85, 4.0)):
        seats = seats_of([int(part * peak)] * count)
        plan = placer.propose(seats)
        assert plan is not None
        layout = placer(seats, Plan.from_json(json.loads(json.dumps(plan.to_json()))))
        assert isinstance(layout, MemberLayout)
        assert max(most_of(profile, plan, layout, placer, seats)) <= seats[0].capacity
        replicas = sum(stage.first == 0 for stage in plan.stages)
        shapes[count, part] = replicas, any(stage.memory for stage in plan.stages)
        candidates = (
            [placer.budget_plan(seats, pipelines) for pipelines in placer.budgeted.replicas(count)]
            if placer.budgeted
            else []
        )
        steps = [candidate.step_seconds for candidate in candidates if candidate.fits]
        assert plan.step_seconds == min(step for step in steps if step is not None)
    assert shapes[2, 4.0] == (2, False)
    assert shapes[4, 4.0] == (4, False)
    assert shapes[3, 4.0][0] in (1, 2)
    assert len(set(shapes.values())) > 2


def test_numbers_of_pipelines_come_by_their_bounds_which_are_known_from_the_start() -> None:
    profile = timed(random.Random(6), 5)
    for blocks in (1, 4):
        placer = placer_of(profile, 2_000, run=RunShape(8, "1f1b", microbatch_size=1, num_blocks=blocks))
        budgeted = placer.budgeted
        assert budgeted is not None
        placer.prepare(4)
        prepared = dict(budgeted._least)
        assert bool(prepared) is (blocks > 1), "members of a run with one block find no bounds at their start"
        for devices in (2, 3, 4):
            replica_counts = budgeted.replicas(devices)
            assert sorted(replica_counts) == [count for count in (1, 2, 4) if count <= min(devices, blocks)]
            least = [budgeted.least_seconds(devices, count) for count in replica_counts]
            assert least == sorted(least)
        assert blocks == 1 or budgeted._least == prepared, "all that changes ask for was prepared"
    assert budgeted.replicas(4) != [1, 2, 4]


def test_what_leaves_for_the_host_is_part_of_a_proposal() -> None:
    """Activations are offloaded only where the bandwidth to the host tier is given."""
    profile = timed(random.Random(2), 6)
    seats = seats_of([int(0.55 * kept_peak(profile, 3_000))] * 3)
    placer, without = placer_of(profile, 3_000, link=Link(host_bandwidth=1e12)), placer_of(profile, 3_000)
    plan, stays = placer.propose(seats), without.propose(seats)
    assert plan is not None
    assert stays is not None
    assert any(stage.offloads for stage in plan.stages)
    assert not any(stage.offloads for stage in stays.stages)
    layout = placer(seats, Plan.from_json(json.loads(json.dumps(plan.to_json()))))
    assert isinstance(layout, MemberLayout)
    assert layout.plan == plan
    assert max(most_of(profile, plan, layout, placer, seats)) <= seats[0].capacity


def test_what_one_member_has_searched_another_need_not() -> None:
    """Plans made ahead are shared. Otherwise they would be lost with the first voter."""
    profile = timed(random.Random(2), 5)
    first, second = placer_of(profile, 2_000, 1), placer_of(profile, 2_000, 1)
    seats = seats_of([kept_peak(profile, 2_000)] * 3)
    searched = [json.loads(json.dumps(entries)) for entries in first.look_ahead(seats)]
    assert sum(map(len, searched)) >= 3
    for entries in searched:
        second.learn(entries)
    for count in (1, 2, 4):
        fewer = seats_of([seats[0].capacity] * count)
        assert second.propose(fewer) == first.propose(fewer)
    assert second.budgeted is not None
    assert not second.budgeted.taken()


def test_copies_get_room_where_layers_run_again_for_it() -> None:
    """Without copies a plan with a shorter step fits, but leaves no room for them."""
    profile, state = timed(random.Random(7), 5), 1_000_000
    protected, plain = placer_of(profile, state, redundancy=1), placer_of(profile, state)
    seats = seats_of([int(0.7 * kept_peak(profile, state))] * 3)
    roomy, tight = protected.budget_plan(seats), plain.budget_plan(seats)
    layout = protected(seats, tight)
    assert isinstance(layout, MemberLayout)
    assert "finds no room for copies" in str(layout.problem)
    layout = protected(seats, roomy)
    assert isinstance(layout, MemberLayout)
    assert layout.problem is None
    assert max(most_of(profile, roomy, layout, protected, seats)) <= seats[0].capacity
    assert roomy.step_seconds is not None
    assert tight.step_seconds is not None
    assert roomy.step_seconds > tight.step_seconds


def test_neighbours_are_one_less_one_more_and_ever_fewer() -> None:
    alike = [[seat.capacity for seat in seats] for seats in neighbours(seats_of([7] * 4))]
    assert alike == [[7] * 3, [7] * 5, [7] * 2, [7]]
    unlike = [[seat.capacity for seat in seats] for seats in neighbours(seats_of([7, 9, 9]), least=2)]
    assert unlike == [[9, 9], [7, 9], [7, 9, 9, 7]]
    together = list(neighbours(seats_of([7, 7], host="h")))
    assert [seat.host for seat in together[1]] == ["h"] * 3
    assert len({seat.host for seat in next(iter(list(neighbours(seats_of([7, 7])))[1:]))}) == 3


def test_budget_proposes_the_fastest_of_budget_joint_and_unequal_replicas_that_keep_to_the_devices() -> None:
    """All members run the plan that one proposes, and learn the plans that it has searched ahead."""
    run, ratios, forms = RunShape(8, "auto", microbatch_size=1, num_blocks=4), list[float](), set[bool]()
    for seed, count, part in ((1, 3, 0.9), (3, 2, 0.7), (3, 3, 2.0)):
        profile = timed(random.Random(seed), 5)
        placer, heirs = (placer_of(profile, 3_000, run=run) for _ in range(2))
        seats = seats_of([int(part * kept_peak(profile, 3_000))] * count)
        plan = placer.propose(seats)
        assert plan is not None
        assert plan.step_seconds is not None
        carried = Plan.from_json(json.loads(json.dumps(plan.to_json())))
        layout = heirs(seats, carried)
        assert isinstance(layout, MemberLayout)
        assert layout == placer(seats, plan)
        assert max(most_of(profile, plan, layout, placer, seats)) <= seats[0].capacity
        assert (plan.units.blocks, plan.units.per_step) == (4, 8)
        assert not any(stage.moments for stage in plan.stages), "a member that is lost would take them along"
        joint = placer_of(profile, 3_000, planner="joint", run=run).propose(seats)
        assert joint is not None
        step = with_step_seconds(profile, joint, run.settled()).step_seconds
        assert step is not None
        ratios.append(plan.step_seconds / step)
        forms.add(len({len(path) for path in plan.paths()}) == 1 and plan.actions is not None)
    for entry in placer.look_ahead(seats):
        heirs.learn(json.loads(json.dumps(entry)))
    plan = heirs.propose(seats[1:])
    assert plan is not None
    assert plan == placer.propose(seats[1:])
    assert heirs.budgeted is not None
    assert heirs.budgeted.taken() == [], "it was all known"
    assert max(ratios) <= 1 + 1e-9
    assert min(ratios) < 0.99
    assert forms == {True, False}, "replicas of single stages, too"


def test_another_planner_proposes_nothing_of_this() -> None:
    placer = placer_of(timed(random.Random(1), 3), 1_000, planner="exact")
    assert (placer.budgeted, placer.proposes) == (None, False)
    assert list(placer.look_ahead(seats_of([0, 0]))) == []
