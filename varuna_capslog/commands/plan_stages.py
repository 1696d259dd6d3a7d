"""What `capslog plan` and `train` say of a plan's memory: what each stage keeps, runs again and offloads, what that
costs, and the picture of every rank's memory over one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands.shared import print_table

if TYPE_CHECKING:
    from varuna_capslog.planners.seconds import Link
    from varuna_capslog.planning.keeping import AgainstKeeping
    from varuna_capslog.planning.simulation import Simulation
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.schedules import RunShape

__all__ = ["draw_plan", "print_treatments", "usable_of_rows"]


def print_treatments(plan: Plan, run: RunShape, profile: Profile | None = None, link: Link | None = None) -> None:
    """Prints a row per stage unless all keep everything; with a profile that has seconds also what the step and each
    stage take longer than if they did, and with one that has the bytes of actions what goes to the host tier and back.

    run: of the whole plan; what stages do whose memory the plan leaves open. link: between ranks and to the host tier.
    """
    from varuna_capslog.planning.keeping import against_keeping, treatments
    from varuna_capslog.plans.parts import spans_of

    device = "cpu" if profile is None else str(profile.conditions.get("device", "cpu"))
    found = None if profile is None else against_keeping(profile, plan, run, link)
    rows = []
    for number, one in enumerate(treatments(plan, run, device)):
        away = [spans_of(one.offloaded)] if one.offloaded else []
        away += [f"inputs of {spans_of(one.inputs_offloaded)}"] if one.inputs_offloaded else []
        away += [f"moments of {spans_of(one.moments_away)}"] if one.moments_away else []
        away += [f"moments of {spans_of(one.moments_elsewhere)} (replica)"] if one.moments_elsewhere else []
        rows.append([str(number), spans_of(one.kept), spans_of(one.recomputed), ", ".join(away)])
        timed = found is not None and any(found.stage_seconds)
        rows[-1].append(_more(found.stage_seconds[number]) if found is not None and timed else "")
    if not any(again or away for _, _, again, away, _ in rows):
        return
    headings = ("stage", "kept", "recomputed", "offloaded", "against keeping all")
    title = "what becomes of the layers between forward and backward"
    print_table(title, headings, rows, left=(1, 2, 3), notes=[] if found is None else _notes(found))


def _notes(found: AgainstKeeping) -> list[str]:
    from varuna_capslog.base.units import format_bytes
    from varuna_capslog.reports.wording import duration, percent, plural

    step, keeping = found.step.step_seconds, found.keeping.step_seconds
    more = (
        "as long as" if found.seconds <= 0 else f"{_more(found.seconds)} ({percent(found.seconds / keeping)}) against"
    )
    count = plural(found.step.num_microbatches, "microbatch", "es")
    notes = [f"step of {count}: {duration(step)}, {more} keeping everything"]
    if found.moved_bytes is not None and any(found.moved_bytes):
        each = ", ".join(f"rank {rank} {format_bytes(size)}" for rank, size in enumerate(found.moved_bytes) if size)
        total = format_bytes(sum(found.moved_bytes))
        notes.append(f"{total} travel to the host tier in each step, and as much back: {each}")
    return notes


def _more(seconds: float) -> str:
    from varuna_capslog.reports.wording import duration

    return "0 s" if seconds == 0 else f"{'+' if seconds > 0 else '-'}{duration(abs(seconds))}"


def draw_plan(path: Path, plan: Plan, profile: Profile, run: RunShape, link: Link | None = None) -> Sequence[str]:
    """Draws one step of a plan: each rank's list of actions over time, and the bytes of the rank against its capacity.

    Returns sentences on what could not be counted or drawn. Raises CapslogError where the profile has no seconds.
    """
    from varuna_capslog.planning.simulation import simulate_plan
    from varuna_capslog.reports.gantt import draw_simulation

    try:
        step = simulate_plan(profile, plan, recompute=run.recompute, run=run, link=link)
    except CapslogError as error:
        raise CapslogError(f"{path} cannot be drawn: {error}; or write the plan as .json") from error
    draw_simulation(path, step, usable_of_rows(step, plan, profile), vector=False)
    return step.notes


def usable_of_rows(step: Simulation, plan: Plan, profile: Profile) -> list[int] | None:
    """What the device of each rank leaves beside the profile's headroom, in the order of the simulation's rows."""
    from varuna_capslog.memory.headroom import Headroom

    capacities = plan.capacities_of(rank for one in step.pipelines for rank in one.ranks)
    return None if capacities is None else [Headroom.of(profile).usable(size) for size in capacities]
