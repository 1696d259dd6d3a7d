"""Notes on a pipeline that idles more than half of its step: how much, and changes that would help, each simulated.

`tables` writes them below a plan. No new plan is made, so the notes do not consider the memory that a change takes.
"""

from __future__ import annotations

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.playing import play
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.reports.wording import plural
from varuna_capslog.schedules import RunShape

__all__ = ["idle_notes"]

_MUCH = 0.5
"""Share of the devices' time in a step above which a note is made."""
_MOST_CALLS = 2_000
"""Most calls of all stages in a step that is simulated, which takes at most a second; larger steps get no note."""


def idle_notes(plan: Plan, profile: Profile) -> list[str]:
    """Return a sentence where devices idle more than half of the simulated step; else nothing."""
    if plan.num_microbatches is None or not profile.timed or plan.purpose != "training":
        return []
    if plan.num_microbatches * len(plan.stages) > _MOST_CALLS:
        return []
    try:
        share = _idle(plan, profile, plan.step_seconds)
        if share <= _MUCH:
            return []
        helps = [] if plan.cuts is None or plan.actions is not None else _what_helps(plan, profile)
    except CapslogError:  # the profile lacks columns that the simulation needs
        return []
    return [f"devices idle {100 * share:.0f} % of the step{'; ' if helps else ''}{', '.join(helps)}"]


def _what_helps(plan: Plan, profile: Profile) -> list[str]:
    """Return the fewest microbatches, and the most devices (each with equally many neighbouring stages of the plan),
    that idle at most half of the step. Microbatches are only doubled, and devices only halved.
    """
    assert plan.num_microbatches is not None
    assert plan.cuts is not None
    helps, count, cuts = [], 2 * plan.num_microbatches, plan.cuts[::2]
    # with more than eight for each device they wait for a stage that is too long
    while count <= 8 * len(plan.cuts) and count * len(plan.cuts) <= _MOST_CALLS:
        if (share := _idle(plan, profile, count=count)) <= _MUCH:
            helps.append(f"{100 * share:.0f} % with {count} microbatches per step")
            break
        count *= 2
    while True:
        fewer = Plan.of_cuts(plan.num_layers, cuts, schedule=plan.schedule, num_microbatches=plan.num_microbatches)
        if (share := _idle(fewer, profile, recompute=plan.recomputes)) <= _MUCH:
            helps.append(f"{100 * share:.0f} % on {plural(len(cuts), 'device')}")
            break
        if len(cuts) == 1:
            break
        cuts = cuts[::2]
    return helps


def _idle(
    plan: Plan,
    profile: Profile,
    step_seconds: float | None = None,
    count: int | None = None,
    recompute: bool | None = None,
) -> float:
    """Return the share of all ranks' time until the update in which they do not compute.

    step_seconds: of the step, where they are known more exactly than without links. count: microbatches, if not the
    plan's. recompute: whether stages recompute whose memory the plan leaves open; None: as in the profile.
    """
    run = RunShape.of_conditions(profile.conditions)
    played = play(profile, plan, None, count, recompute, run, Link())
    seconds = max(played.step_seconds, step_seconds or 0.0) - (played.update or 0.0)
    busy = played.busy_seconds.values()
    return 1 - sum(busy) / (len(busy) * seconds) if seconds > 0 else 0.0
