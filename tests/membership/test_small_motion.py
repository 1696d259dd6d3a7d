"""Small motions after a loss: random fleets, against exhaustive search and against layouts counted by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Mapping, Sequence

import pytest

from tests.membership.test_layout_candidates_budgeted import kept_peak, most_of
from tests.membership.test_layout_candidates_budgeted import placer_of as budget_placer
from tests.membership.test_placing import placer_of, plain, seats_of, steps_of
from tests.planners.test_budget import timed
from varuna_capslog.membership.changes import State
from varuna_capslog.membership.generation import Generation, MemberLayout, Stamp
from varuna_capslog.membership.messages import Contribution
from varuna_capslog.membership.placing import Placer
from varuna_capslog.membership.recovery import Decision, Seat, decide
from varuna_capslog.membership.small_motion import (
    Loss,
    SmallMotion,
    Weighed,
    among,
    bare,
    expected_loss,
    follows_a_loss,
    give_stage,
    kept_copies,
    share_of_sole_holders,
    traffic_of,
    ways_to_give,
)
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan


@pytest.mark.parametrize(
    ("members", "leaving", "at", "alone"),
    [
        (("m0", "m2"), (), Stamp(3, 4), True),
        (("m1",), (), Stamp(3, 4), True),
        (("m0", "m1", "m2"), (), Stamp(3, 4), False),  # nobody is lost
        (("m2", "m0"), (), Stamp(3, 4), False),  # in another order
        (("m0", "m2", "m3"), (), Stamp(3, 4), False),  # and a member joins
        (("m0",), ("m2",), Stamp(3, 4), False),  # and a member leaves
        (("m0", "m2"), (), Stamp(3, 3), False),  # no step of it was applied: copies may be on their way
    ],
)
def test_stages_are_handed_out_where_losses_are_all_that_changed_and_all_copies_are_there(
    members: tuple[str, ...], leaving: tuple[str, ...], at: Stamp, alone: bool
) -> None:
    state = State("m0", "h", record=Generation(4, ("m0", "m1", "m2")), at=at)
    assert follows_a_loss(state, Generation(5, members, leaving)) is alone


def layout_of(placer: Placer, seats: Sequence[Seat]) -> MemberLayout:
    layout = placer(seats, placer.propose(seats))
    assert isinstance(layout, MemberLayout), layout
    return layout


def loss_of(placer: Placer, seats: Sequence[Seat], gone: Sequence[int], **more: float) -> Loss:
    """Return the loss of the members at the ranks `gone`."""
    survivors = [seat for rank, seat in enumerate(seats) if rank not in gone]
    members = tuple(seat.member for seat in seats)
    return Loss(layout_of(placer, seats), members, survivors, placer.propose(survivors), **more)


def holders(layout: MemberLayout, members: Sequence[str]) -> list[set[str]]:
    return [{member for member in members if layer in layout.holds(member)} for layer in range(layout.num_layers)]


def after(loss: Loss, choice: Weighed | None) -> MemberLayout:
    """The layout that a record with this choice leads to."""
    assert choice is not None
    assert choice.plan is not None, choice.event_fields
    assert choice.copies is not None
    return MemberLayout.of_plan(choice.plan, loss.remaining, choice.copies)


def drawn(dice: random.Random, seconds: bool = True) -> tuple[Placer, list[Seat], list[int]]:
    """A run, its members, and up to as many of them lost as copies protect from."""
    redundancy = dice.choice((1, 1, 2))
    count = dice.randint(redundancy + 2, 7)
    layers = dice.randint(count, 2 * count)
    placer = placer_of(
        plain(layers, seconds),
        steps_of(4, dice.choice((1, 2))),
        layer_bytes=[dice.randint(1, 50) for _ in range(layers)],
        planner=dice.choice(("exact", "throughput")),
        redundancy=redundancy,
    )
    return placer, seats_of([0] * count), dice.sample(range(count), dice.randint(1, redundancy))


def test_whoever_is_lost_every_layer_is_owned_as_often_as_before_and_nobody_gives_up_what_it_holds() -> None:
    dice, motions = random.Random(1), 0
    for _ in range(60):
        placer, seats, gone = drawn(dice)
        loss = loss_of(placer, seats, gone, rate=dice.choice((1.0, 100.0, 1e9)))
        choice = SmallMotion(placer, "always").weigh(loss)
        assert choice is not None
        if choice.plan is None:  # a member that would hold a layer twice, for the same blocks
            continue
        motions += 1
        layout = after(loss, choice)
        blocks = placer.candidates.run.num_blocks
        for layer in range(layout.num_layers):
            serving = [stage.blocks or range(blocks) for stage in choice.plan.stages if layer in stage.numbers]
            assert sorted(itertools.chain(*serving)) == list(range(blocks))
        for member in loss.remaining:
            assert set(loss.before.holds(member)) <= set(layout.holds(member))
        assert set(loss.before.owned.get(loss.remaining[0], ())) <= set(layout.owned.get(loss.remaining[0], ()))
        # members keep the layers that they had, so redundancy shrinks by the losses that occurred and no more
        for before, now in zip(holders(loss.before, loss.remaining), holders(layout, loss.remaining), strict=True):
            assert before <= now
        new = layout_of(placer, loss.seats)
        sizes = placer.layer_bytes
        costs = choice.event_fields["small_motion"]
        assert costs["copied_bytes"] == 0
        assert costs["moved_bytes"] == sum(
            sizes[layer]
            for member in loss.remaining
            for layer in layout.owned.get(member, ())
            if layer not in loss.before.holds(member)
        )
        # the next change restores all copies that a generation of these members has
        follow = traffic_of(layout, new, loss.remaining, sizes)
        lacking = {
            (member, layer) for member in loss.remaining for layer in {*new.holds(member)} - {*layout.holds(member)}
        }
        assert {(move.target, move.layer) for move in (*follow.moves, *follow.copies)} == lacking
    assert motions > 50


def assignments(loss: Loss, sizes: Sequence[int]) -> int:
    """Return the fewest bytes that move where each lost layer may go to any member. All assignments are tried."""
    owned = {layer for member in loss.remaining for layer in loss.before.owned.get(member, ())}
    lost = [layer for layer in range(loss.before.num_layers) if layer not in owned]
    return min(
        (
            sum(
                sizes[layer]
                for layer, target in zip(lost, targets, strict=True)
                if layer not in loss.before.holds(target)
            )
            for targets in itertools.product(loss.remaining, repeat=len(lost))
        ),
        default=0,
    )


def test_without_seconds_no_way_to_hand_out_the_lost_layers_moves_fewer_bytes() -> None:
    dice, compared = random.Random(2), 0
    for _ in range(80):
        placer, seats, gone = drawn(dice, seconds=False)
        loss = loss_of(placer, seats, gone[:1])
        choice = SmallMotion(placer, "always").weigh(loss)
        assert choice is not None
        if choice.plan is not None and len(loss.before.owned.get(seats[gone[0]].member, ())) <= 4:
            assert choice.event_fields["small_motion"]["moved_bytes"] == assignments(loss, placer.layer_bytes)
            compared += 1
    assert compared > 60


def test_no_rank_holds_more_than_its_device_has() -> None:
    """Peaks come from the fold of every rank, plus its snapshot and the copies that it keeps."""
    draw, planned, refused = random.Random(5), 0, 0
    profile = timed(draw, 6)
    placer, largest = budget_placer(profile, 30_000, redundancy=1), kept_peak(profile, 30_000)
    for part in (0.6, 0.75, 0.9, 1.1):
        seats = [Seat(f"m{rank}", f"h{rank}", int(part * largest)) for rank in range(3)]
        loss = loss_of(placer, seats, [1])
        choice = SmallMotion(placer, "always").weigh(loss)
        if choice is None:  # no plan for the remaining members
            continue
        if choice.plan is None:
            assert choice.event_fields["chosen"] == "new cuts"
            assert "room" in choice.event_fields["why"]
            refused += 1
            continue
        planned += 1
        held = most_of(profile, choice.plan, after(loss, choice), placer, loss.seats)
        assert all(size <= seat.capacity for size, seat in zip(held, loss.seats, strict=False))
    assert planned
    assert refused


def test_the_choice_follows_the_seconds_that_each_way_loses() -> None:
    """Slow links favour a small motion, fast ones new cuts. The expected loss is reported for both."""
    placer = placer_of(plain(12), steps_of(8), layer_bytes=[1000] * 12, planner="throughput", redundancy=1)
    seats, chosen = seats_of([0] * 4), []
    for rate in (1.0, 10.0, 100.0, 1e4, 1e6):
        choice = SmallMotion(placer).weigh(loss_of(placer, seats, [1], rate=rate, step_seconds=1.0))
        assert choice is not None
        chosen.append(choice.plan is not None)
        if "small_motion" in choice.event_fields:
            lost = [choice.event_fields[way]["lost_seconds"] for way in ("small_motion", "new_cuts")]
            assert (lost[0] < lost[1]) == chosen[-1]
            assert choice.event_fields["chosen"] == ("small motion" if chosen[-1] else "new cuts")
    assert chosen[0]
    assert not chosen[-1]
    assert chosen == sorted(chosen, reverse=True)
    assert SmallMotion(placer, "never").weigh(loss_of(placer, seats, [1], rate=1.0)) is None


def test_a_run_far_from_its_last_checkpoint_does_not_stay_with_single_holders_for_long() -> None:
    """Losses often come in close succession; a second one would cost all training since the checkpoint."""
    placer = placer_of(plain(12), steps_of(8), layer_bytes=[1000] * 12, planner="throughput", redundancy=1)
    seats, lost = seats_of([0] * 4), []
    for back in (0.0, 1e5):
        loss = loss_of(placer, seats, [1], rate=10.0, step_seconds=1.0, back_seconds=back)
        choice = SmallMotion(placer).weigh(loss)
        assert choice is not None
        lost.append((choice.plan is not None, choice.event_fields["small_motion"]["lost_seconds"]))
        copied = loss.before.copied
        alone = {owner for owner in loss.remaining if set(loss.before.owned.get(owner, ())) & set(copied.get("m1", ()))}
        alone |= {holder for holder in loss.remaining if set(copied.get(holder, ())) & set(loss.before.owned["m1"])}
        assert share_of_sole_holders(loss.before, loss.before, loss.remaining) == len(alone) / 3
    assert [small for small, _ in lost] == [True, False]
    assert lost[1][1] > lost[0][1] + 1000


def test_without_seconds_a_run_hands_out_only_where_it_is_told_to() -> None:
    placer = placer_of(plain(12, seconds=False), steps_of(8), layer_bytes=[10**9] * 12, redundancy=1)
    loss = loss_of(placer, seats_of([0] * 4), [1])
    choice = SmallMotion(placer).weigh(loss)
    assert choice is not None
    assert choice.plan is None
    assert "seconds" in choice.event_fields["why"]
    assert after(loss, SmallMotion(placer, "always").weigh(loss)).covers(loss.remaining)


def test_layers_that_nobody_holds_any_more_leave_nothing_to_choose() -> None:
    placer = placer_of(plain(12), steps_of(8), redundancy=0)
    assert SmallMotion(placer, "always").weigh(loss_of(placer, seats_of([0] * 4), [1], rate=1.0)) is None


@pytest.mark.parametrize("gap", [0.5, 3.0, 1e9])
def test_the_expected_loss_against_changes_that_are_drawn(gap: float) -> None:
    """A pause of 2 s, 5 s at 3/4 of the pace, a pause of 1 s; the next change comes after an exponential time and costs
    4 s where it comes before the second pause.
    """
    dice, count, total = random.Random(3), 40_000, 0.0
    for _ in range(count):
        until = dice.expovariate(1 / gap)
        total += min(until, 2.0) + 0.25 * min(max(0.0, until - 2.0), 5.0) + (1.0 if until > 7.0 else 4.0)
    assert math.isclose(expected_loss(2.0, 5.0, 0.75, 1.0, gap, 4.0), total / count, rel_tol=0.03)


# -- plans after a loss ------------------------------------------------------------------------------------------------


def stage(first: int, end: int, rank: int, blocks: tuple[int, ...] | None = None) -> PlanStage:
    return PlanStage(((first, end),), (rank,), blocks, memory=None)


def test_stages_that_a_rank_continues_are_joined_and_others_stand_beside_its_own() -> None:
    plan = bare(Plan(9, (stage(0, 3, 0), stage(3, 6, 1), stage(6, 9, 2)), Units(4, 1, 1), "1f1b"))
    assert plan is not None

    def shape(changed: Plan | None) -> list[tuple[tuple[tuple[int, int], ...], int]]:
        assert changed is not None
        return [(stage.layers, stage.rank) for stage in changed.stages]

    assert shape(give_stage(plan, 1, ((3, 6, 0),))) == [(((0, 6),), 0), (((6, 9),), 2)]
    assert shape(give_stage(plan, 1, ((3, 4, 0), (4, 6, 2)))) == [(((0, 4),), 0), (((4, 9),), 2)]
    assert shape(give_stage(plan, 1, ((3, 4, 2), (4, 6, 0)))) == [
        (((0, 3),), 0),
        (((3, 4),), 2),
        (((4, 6),), 0),
        (((6, 9),), 2),
    ]
    assert shape(give_stage(plan, 0, ((0, 3, 2),))) == [(((0, 3),), 2), (((3, 6),), 1), (((6, 9),), 2)]
    assert shape(among(plan, {0: 2, 1: 0, 2: 1}))[0][1] == 2
    assert len(list(ways_to_give(plan, 1, [0, 2]))) == 2 + 2 * 2


def test_a_replica_takes_over_the_blocks_of_a_lost_one() -> None:
    """The other pipeline has the layers: it serves their blocks as well, and nothing moves."""
    both = [stage(0, 2, 0, (0,)), stage(2, 4, 1, (0,)), stage(0, 2, 2, (1,)), stage(2, 4, 3, (1,))]
    plan = bare(Plan(4, tuple(both), Units(2, 1, 2), "1f1b"))
    assert plan is not None
    changed = give_stage(plan, 3, ((2, 4, 1),))
    assert changed is not None
    assert [(stage.rank, stage.blocks) for stage in changed.stages] == [(0, (0,)), (1, (0, 1)), (2, (1,))]
    assert give_stage(plan, 3, ((2, 3, 1), (3, 4, 0))) is None  # rank 1 holds layer 2 already


# -- the record --------------------------------------------------------------------------------------------------------


def decided(record: Generation, held: Mapping[str, Sequence[int]], placer: Placer) -> Decision:
    told = {
        member: Contribution(
            frozenset((layer, Stamp(3, 1)) for layer in layers), member, 0, Stamp(0, 0), (1, Stamp(3, 1))
        )
        for member, layers in held.items()
    }
    return decide(record, told, placer.layer_bytes, placer)


def test_the_record_carries_the_copies_and_all_members_take_them() -> None:
    placer = placer_of(plain(8), steps_of(4), redundancy=1)
    loss = loss_of(placer, seats_of([0] * 4), [2], rate=1.0)
    choice = SmallMotion(placer, "always").weigh(loss)
    assert choice is not None
    first = Generation(1, loss.members)
    record = first.successor(loss.remaining, (), Stamp(0, 0), reached=3)
    record = dataclasses.replace(record, plan=choice.plan, copies=choice.copies, motion=choice.event_fields)
    assert Generation.from_json(record.to_json()) == record
    outcome = decided(record, {member: loss.before.holds(member) for member in loss.remaining}, placer)
    assert outcome.layout == dataclasses.replace(after(loss, choice), problem=outcome.layout and outcome.layout.problem)
    assert outcome.layout is not None
    assert outcome.layout.problem is not None
    assert sum(move.bytes for move in outcome.moves) == choice.event_fields["small_motion"]["moved_bytes"]
    assert kept_copies(loss.before, outcome.layout.owned, loss.remaining) == choice.copies


@pytest.mark.parametrize("copies", [[1], {"m0": "x"}, {"m0": [-1]}])
def test_a_record_with_other_copies_is_refused(copies: object) -> None:
    value = Generation(1, ("m0",)).to_json() | {"copies": copies}
    with pytest.raises(Exception, match="copies"):
        Generation.from_json(value)
