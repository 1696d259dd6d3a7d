"""Memory of a plan as `capslog plan` and `train` show it: the layers that each stage keeps, recomputes and offloads,
the time that this costs, and the picture of every rank's memory over one step.
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
    """Print a row per stage unless all keep everything. With a profile that has seconds, also print how much longer the
    step and each stage take than if they kept everything; with one that has the bytes of actions, the bytes that travel
    to the host tier and back.

    run: of the whole plan; decides for stages whose memory the plan leaves open. link: between ranks and to the host
    tier.
    """
    from varuna_capslog.planning.keeping import against_keeping, treatments
    from varuna_capslog.plans.parts import spans_of

    device = "cpu" if profile is None else str(profile.conditions.get("device", "cpu"))
    comparison = None if profile is None else against_keeping(profile, plan, run, link)
    rows = []
    for number, treatment in enumerate(treatments(plan, run, device)):
        away = [spans_of(treatment.offloaded)] if treatment.offloaded else []
        away += [f"inputs of {spans_of(treatment.inputs_offloaded)}"] if treatment.inputs_offloaded else []
        away += [f"moments of {spans_of(treatment.moments_away)}"] if treatment.moments_away else []
        away += [f"moments of {spans_of(treatment.moments_elsewhere)} (replica)"] if treatment.moments_elsewhere else []
        rows.append([str(number), spans_of(treatment.kept), spans_of(treatment.recomputed), ", ".join(away)])
        timed = comparison is not None and any(comparison.stage_seconds)
        rows[-1].append(_more(comparison.stage_seconds[number]) if comparison is not None and timed else "")
    if not any(again or away for _, _, again, away, _ in rows):
        return
    headings = ("stage", "kept", "recomputed", "offloaded", "against keeping all")
    title = "what becomes of the layers between forward and backward"
    print_table(title, headings, rows, left=(1, 2, 3), notes=[] if comparison is None else _notes(comparison))


def _notes(comparison: AgainstKeeping) -> list[str]:
    from varuna_capslog.base.units import format_bytes
    from varuna_capslog.reports.wording import duration, percent, plural

    step, keeping = comparison.step.step_seconds, comparison.keeping.step_seconds
    more = (
        "as long as"
        if comparison.seconds <= 0
        else f"{_more(comparison.seconds)} ({percent(comparison.seconds / keeping)}) against"
    )
    count = plural(comparison.step.num_microbatches, "microbatch", "es")
    notes = [f"step of {count}: {duration(step)}, {more} keeping everything"]
    if comparison.moved_bytes is not None and any(comparison.moved_bytes):
        each = ", ".join(
            f"rank {rank} {format_bytes(size)}" for rank, size in enumerate(comparison.moved_bytes) if size
        )
        total = format_bytes(sum(comparison.moved_bytes))
        notes.append(f"{total} travel to the host tier in each step, and as much back: {each}")
    return notes


def _more(seconds: float) -> str:
    from varuna_capslog.reports.wording import duration

    return "0 s" if seconds == 0 else f"{'+' if seconds > 0 else '-'}{duration(abs(seconds))}"


def draw_plan(path: Path, plan: Plan, profile: Profile, run: RunShape, link: Link | None = None) -> Sequence[str]:
    """Draw one step of a plan: each rank's list of actions over time, and the bytes of the rank against its capacity.

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
    """Return the bytes of each rank's device less the profile's headroom, in the order of the simulation's rows."""
    from varuna_capslog.memory.headroom import Headroom

    capacities = plan.capacities_of(rank for pipeline in step.pipelines for rank in pipeline.ranks)
    return None if capacities is None else [Headroom.of(profile).usable(size) for size in capacities]
