"""Every planner's answer to one question, side by side: peak, margin, simulated step time, search time.

`capslog compare` calls it. A planner that has no answer keeps its row, with the reason.
"""

from __future__ import annotations

__all__ = ["BY_NAME_ONLY", "Row", "compare"]

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import AUTO
from varuna_capslog.planners import EVERY_PLANNER, MADPIPE, with_microbatches
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.placed.periodic import two_versions_note
from varuna_capslog.planning.playing import SAME, even_share_seconds
from varuna_capslog.planning.ranks import folded
from varuna_capslog.planning.search import plan
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.planning.verdict import judge_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import DEFAULT_RUN, RunShape

BY_NAME_ONLY = ("mcap-bo",)
"""Planners that search for most of a minute, and are therefore asked only where `names` has them."""


@dataclass(frozen=True)
class Row:
    """One planner's answer.

    plan: None where the planner has none.
    peak_bytes, margin_bytes: of the largest stage, and the least that a stage leaves of its device (below 0: does not
        fit); None where the memory model or the capacity is missing.
    step_seconds, bubble_fraction: simulated; None where the profile has no seconds.
    search_seconds: measured here.
    bound_seconds, proven: no plan of the planner's search space is faster than the bound, and the plan is that fast;
        for planners that say none the work of the step, shared out evenly. None where the step is not known.
    reason: why something is missing, a sentence; of `madpipe` also what it promises as printed; None where there is
        nothing to say.
    """

    planner: str
    plan: Plan | None = None
    peak_bytes: int | None = None
    margin_bytes: int | None = None
    step_seconds: float | None = None
    bubble_fraction: float | None = None
    search_seconds: float | None = None
    bound_seconds: float | None = None
    proven: bool | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For programs; the plan as its cut list and whether it fits."""
        value = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name != "plan"}
        plan = {} if self.plan is None else self.plan.to_json()
        return value | {name: plan.get(name) for name in ("cuts", "fits", "stage_bytes")}


def compare(
    profile: Profile,
    devices: int,
    *,
    names: Sequence[str] | None = None,
    run: RunShape = DEFAULT_RUN,
    memory: str = AUTO,
    capacity: int | Sequence[int] | None = None,
    link: Link | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> list[Row]:
    """Asks every planner of `EVERY_PLANNER`, or those of `names`, in that order. Those of `BY_NAME_ONLY` have a row
    without a plan where `names` is None.

    run: of one pipeline; where its number of microbatches is not known, `DEFAULT_MICROBATCHES_PER_STAGE` per device.
    memory, capacity, link: as in `search.plan`.
    progress: called with (planners done, all planners, the one that is asked now) before each planner.

    Raises CapslogError for unknown names and for what is wrong with the question itself: more devices than layers, or
    capacities that do not match them.
    """
    chosen = list(EVERY_PLANNER) if names is None else list(names)
    fields.refuse_unknown(chosen, EVERY_PLANNER, "planner")
    run = with_microbatches(run, devices)

    def ask(name: str) -> Plan:
        return folded(profile, plan(profile, devices, name, memory, capacity, run, link), memory, run.settled())

    ask("varuna")  # raises what every planner would
    left_out = BY_NAME_ONLY if names is None else ()
    asked = [name for name in chosen if name not in left_out]
    rows = {
        name: Row(name, reason=f"not asked, since it searches for up to a minute; --planners {name} asks it")
        for name in left_out
    }
    for number, name in enumerate(asked):
        progress(number, len(asked), name)
        rows[name] = _row(profile, name, ask, run, link)
        if name == MADPIPE and rows[name].plan is not None:
            said = filter(None, (rows[name].reason, two_versions_note(profile, devices, capacity, link)))
            rows[name] = dataclasses.replace(rows[name], reason="; ".join(said) or None)
    return [rows[name] for name in chosen]


def _row(profile: Profile, name: str, ask: Callable[[str], Plan], run: RunShape, link: Link | None) -> Row:
    try:
        found = ask(name)
    except CapslogError as error:
        return Row(name, reason=str(error))
    reason = "; ".join(found.notes) or None
    step = bubble = None
    try:
        simulated = simulate_plan(profile, found, recompute=run.recompute, run=run.settled(), link=link)
        step, bubble = simulated.step_seconds, simulated.bubble_fraction
    except CapslogError as error:
        reason = "; ".join(filter(None, (reason, str(error))))
    bound, proven = _bound(profile, found, run, step)
    verdict = judge_plan(found, profile)
    margin = None if verdict is None else min(verdict.margins)
    return Row(name, found, found.peak_bytes, margin, step, bubble, found.search_seconds, bound, proven, reason)


def _bound(profile: Profile, plan: Plan, run: RunShape, step: float | None) -> tuple[float | None, bool | None]:
    """The planner's own bound, and whether the plan is proven; else that of any stages on as many devices."""
    if step is None or plan.bound_seconds is not None:
        return plan.bound_seconds, plan.proven
    bound = even_share_seconds(profile, run.num_microbatches or 1, plan.num_ranks)
    return bound, step <= bound * (1 + SAME)
