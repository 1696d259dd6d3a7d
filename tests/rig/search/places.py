"""A planner for the rig: layers dealt out evenly in rank order, with copies, and jobs that use it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.rig.drawn_plans import draw_plan
from varuna_capslog.membership.changes import Job, State
from varuna_capslog.membership.generation import Generation, Member, MemberLayout
from varuna_capslog.membership.messages import CompareAndSet
from varuna_capslog.membership.placing import Choice
from varuna_capslog.membership.recovery import Place, Seat
from varuna_capslog.membership.redundancy import place_copies
from varuna_capslog.membership.small_motion import among, bare, follows_a_loss, give_stage, kept_copies, ways_to_give
from varuna_capslog.plans.parts import Units
from varuna_capslog.plans.plan import Plan, plan_of_pipelines
from varuna_capslog.schedules import Edge

__all__ = ["even_places", "make_job", "with_drawn_plan", "with_pipeline", "with_small_motion"]

_UNITS = Units(4, 1, 4)


def even_places(num_layers: int, redundancy: int, fewest: int = 1, replicas: int = 1) -> Place:
    """Return a planner for the rig: layers in even parts in rank order, copies by `place_copies`. A plan that a
    generation carries is used unchanged.

    Args:
        fewest: with fewer members the run waits.
        replicas: largest number of pipelines; fewer where members are lacking.
    """

    def place(seats: Sequence[Seat], plan: Plan | None = None) -> MemberLayout | str:
        if len(seats) < fewest:
            return f"{len(seats)} device(s); {fewest} are needed"
        hosts = {seat.member: seat.host for seat in seats}
        if plan is not None:
            choice = Choice.of_plan(plan, [0] * num_layers, edges=_edges(num_layers))
            placed, links = choice.of_members([seat.member for seat in seats])
            idle = [seat.member for seat in seats if all(seat.member != name for way in placed for name, _ in way)]
            copies = place_copies(placed, hosts, redundancy, [1] * num_layers, idle, links=links)
            return MemberLayout.of_plan(plan, [seat.member for seat in seats], copies.kept, copies.problem)
        pipelines = min(replicas, max(1, len(seats) // fewest))
        owned: dict[Member, tuple[int, ...]] = {}
        rows: list[list[tuple[Member, Sequence[int]]]] = []
        size = len(seats) // pipelines
        for number in range(pipelines):
            part = seats[number * size : (number + 1) * size]
            stages = min(len(part), num_layers)
            cuts = [stage * num_layers // stages for stage in range(stages)] + [num_layers]
            row = [(part[stage].member, tuple(range(cuts[stage], cuts[stage + 1]))) for stage in range(stages)]
            owned.update(row)
            rows.append(list(row))
        spare = [seat.member for seat in seats if seat.member not in owned]
        copies = place_copies(rows, hosts, redundancy, [1] * num_layers, spare)
        return MemberLayout(num_layers, owned, copies.kept, copies.problem)

    return place


def with_drawn_plan(effect: CompareAndSet, num_layers: int, dice: random.Random) -> CompareAndSet:
    """Return the effect of a founder that draws the members' plan, which no other member could compute."""
    record = effect.record
    if not record.members:
        return effect
    edges = _edges(num_layers) if dice.random() < 0.5 else None
    plan = draw_plan(dice, num_layers, _UNITS, len(record.members), edges=edges)
    return replace(effect, record=replace(record, plan=plan))


def with_pipeline(record: Generation, num_layers: int) -> Generation:
    """The record with a plan of one stage for each member, as far as there are layers."""
    stages = min(len(record.members), num_layers)
    cuts = [stage * num_layers // stages for stage in range(stages)]
    return replace(record, plan=plan_of_pipelines(num_layers, cuts, 1, _UNITS))


def with_small_motion(effect: CompareAndSet, state: State, dice: random.Random) -> CompareAndSet:
    """Draw, for a founder after a loss, the members that take over the lost stages; all keep their other stages and
    their copies. Return the effect unchanged where the change is not a loss alone.
    """
    record, before, members = effect.record, state.roles.layout, state.record.members
    survivors = list(record.members)
    possible = survivors and follows_a_loss(state, record)
    if not possible or before is None or before.plan is None or not before.covers(survivors):
        return effect
    plan, places = bare(before.plan), {members.index(member): place for place, member in enumerate(survivors)}
    while plan is not None and (gone := [n for n, stage in enumerate(plan.stages) if stage.rank not in places]):
        ways = list(ways_to_give(plan, gone[0], list(places)))
        plan = next(
            (candidate for way in dice.sample(ways, len(ways)) if (candidate := give_stage(plan, gone[0], way))), None
        )
    if plan is None:
        return effect
    plan = among(plan, places)
    copies = kept_copies(before, MemberLayout.of_plan(plan, survivors, {}).owned, survivors)
    return replace(effect, record=replace(record, plan=plan, copies=copies))


def _edges(num_layers: int) -> list[Edge]:
    """Two branches that the last layer joins."""
    last, half = num_layers - 1, num_layers // 2
    return [(layer, last if layer == half - 1 else layer + 1) for layer in range(last)]


def make_job(
    num_layers: int, redundancy: int = 1, sync: bool = True, shadows: bool = False, fewest: int = 1, replicas: int = 1
) -> Job:
    """A job for the rig: layers of one byte, placed by `even_places`."""
    return Job((1,) * num_layers, even_places(num_layers, redundancy, fewest, replicas), sync, shadows)
