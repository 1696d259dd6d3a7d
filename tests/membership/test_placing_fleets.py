"""Joint plans at a change: any number of devices is used, as in the plan of a start, within the same limits."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from tests.planners.timed import chain
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Elastic
from varuna_capslog.membership.generation import MemberLayout
from varuna_capslog.membership.layout_candidates import LayoutCandidates
from varuna_capslog.membership.placing import Fleets, Placer
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.planners import JOINT
from varuna_capslog.planners.joint import Device, JointPlan, best_fleet
from varuna_capslog.planners.seconds import Link
from varuna_capslog.plans.plan import Plan, pipelines_of
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.schedules import RunShape


def seats_of(capacities: Sequence[int]) -> list[Seat]:
    return [Seat(f"m{number}", f"h{number}", size) for number, size in enumerate(capacities)]


def plain(layers: int, seconds: bool = True) -> Profile:
    """Equal layers: 100 bytes each with 10 of parameters, one second forward and two backward."""
    times = {"forward_seconds": 1.0, "backward_seconds": 2.0} if seconds else {}
    rows = [
        LayerProfile(f"l{n}", 100, added_bytes=100 if n else None, parameter_bytes=10, boundary_bytes=0, **times)
        for n in range(layers)
    ]
    return Profile(tuple(rows), conditions={"microbatch_size": 1})


def placer_of(
    profile: Profile, microbatches: int, blocks: int, planner: str = JOINT, reserved: int = 0, redundancy: int = 0
) -> Placer:
    """reserved: bytes of each layer's state, whose snapshots are kept on the device."""
    sizes, run = [reserved or 30] * profile.num_layers, RunShape(microbatches, num_blocks=blocks, microbatch_size=1)
    beside = sizes if reserved else None
    candidates = LayoutCandidates(profile, sizes, run, planner, "additive", beside=beside)
    return Placer(candidates, Elastic.model_validate({"redundancy": redundancy}))


def plan_of(layout: MemberLayout | str) -> Plan:
    assert isinstance(layout, MemberLayout), layout
    assert layout.plan is not None
    return layout.plan


def test_no_device_is_idle_where_blocks_and_layers_are_enough() -> None:
    """Six layers in four blocks: 3, 5, 6 and 7 devices all work, where equal pipelines leave some out."""
    placer, equal = placer_of(plain(6), 16, 4), placer_of(plain(6), 16, 4, "throughput")
    idle_before = {}
    for count in range(1, 13):
        seats = seats_of([0] * count)
        plan = plan_of(placer(seats))
        alike = plan_of(equal(seats))
        assert set(plan.placement()) == set(range(count)), count
        assert plan.planner == "joint"
        idle_before[count] = count - len(set(alike.placement()))
    assert idle_before[7] > 0
    assert len({len(path) for path in plan_of(placer(seats_of([0] * 7))).paths()}) > 1, "pipelines of unequal length"


def test_it_is_the_plan_that_a_start_with_these_devices_would_have() -> None:
    dice = random.Random(4)
    for _ in range(25):
        profile = chain(dice, dice.randint(2, 6))
        blocks = dice.choice([1, 2, 4])
        placer = placer_of(profile, 8, blocks)
        capacities = [dice.choice([0, 60, 90]) for _ in range(dice.randint(1, 7))]
        expected = best_fleet(
            profile, [Device(size or None) for size in capacities], 8, blocks, RunShape(8), "additive"
        )
        layout = placer(seats_of(capacities))
        if not isinstance(expected, JointPlan):
            assert isinstance(layout, str) or plan_of(layout).planner is None
            continue
        assert plan_of(layout).stages == expected.plan.stages


def test_the_founder_proposes_it_and_the_others_come_to_the_same_layout() -> None:
    placer, follower = placer_of(plain(6), 16, 4, redundancy=1), placer_of(plain(6), 16, 4, redundancy=1)
    for count in (1, 3, 5, 7):
        seats = seats_of([0] * count)
        proposed = placer.propose(seats)
        assert proposed is not None
        carried = Plan.from_json(json.loads(json.dumps(proposed.to_json())))
        assert follower(seats, carried) == placer(seats)
    assert placer_of(plain(6), 16, 4, "exact").propose(seats_of([0] * 3)) is None
    assert placer.propose([]) is None


def test_snapshots_count_against_the_capacities() -> None:
    """Three devices, two layers in two blocks: a pipeline of one stage holds 200 B and 2 x 50 B beside it."""
    for capacity, lengths in ((300, [1, 2]), (299, [2])):
        placer = placer_of(plain(2), 4, 2, reserved=50)
        plan = plan_of(placer(seats_of([capacity] * 3)))
        assert sorted(len(path) for path in plan.paths()) == lengths
        assert plan.peak_bytes in (100, 110, 200)  # without snapshots and copies


def test_equal_pipelines_are_taken_where_only_their_copies_find_room() -> None:
    """A single pipeline of three stages is fastest, since the exchange is slow. With little memory no device has room
    for a copy of the large middle layer; two pipelines of a single stage hold everything twice.
    """
    profile, sizes = plain(3), [10, 300, 10]
    run, link = RunShape(6, num_blocks=2, microbatch_size=1), Link(bandwidth=10.0)
    candidates = LayoutCandidates(profile, sizes, run, JOINT, "additive", beside=sizes, link=link)
    placer = Placer(candidates, Elastic.model_validate({"redundancy": 1}))
    roomy, tight = placer(seats_of([2000] * 3)), placer(seats_of([700] * 3))
    assert plan_of(roomy).planner == "joint"
    assert [len(path) for path in plan_of(roomy).paths()] == [3]
    assert isinstance(tight, MemberLayout)
    assert tight.problem is None
    assert pipelines_of(plan_of(tight)) is not None
    for lost in range(3):
        assert tight.covers({"m0", "m1", "m2"} - {f"m{lost}"})


@pytest.mark.parametrize("profile", [plain(4, seconds=False), None], ids=["no seconds", "no profile"])
def test_without_seconds_equal_pipelines_stand_in(profile: Profile | None) -> None:
    sizes = [30] * 4
    candidates = LayoutCandidates(profile, sizes, RunShape(8, num_blocks=4, microbatch_size=1), JOINT)
    assert Fleets.of(candidates) is None
    placer = Placer(candidates, Elastic())
    seats = seats_of([0] * 3)
    assert pipelines_of(plan_of(placer(seats))) is not None
    assert placer.propose(seats) is None


def test_where_one_pipeline_is_all_that_can_run_joint_is_refused() -> None:
    """Joint plans are refused where at most one pipeline can run, as on Varuna."""
    with pytest.raises(CapslogError, match="among pipelines, but at most 1 can run here; choose throughput"):
        LayoutCandidates(plain(4), [30] * 4, RunShape(8, microbatch_size=1), JOINT, max_replicas=1)
