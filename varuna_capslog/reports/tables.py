"""The tables of a plan and of a profile: what `capslog plan` and `capslog profile` print, and notebooks show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from varuna_capslog.base.tables import Table
from varuna_capslog.base.units import format_bytes
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.planning.verdict import MemoryVerdict, judge_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import KEPT_WHOLE
from varuna_capslog.profiles.record import Profile

__all__ = ["format_seconds", "plan_table", "profile_table"]


def format_seconds(seconds: float) -> str:
    """Seconds for people: 1.234 s, 56.7 ms."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def _said_of_bound(plan: Plan, step: float, bound: float) -> str:
    """The step, and how much faster another plan of the search space could be at most."""
    schedule = "" if plan.schedule is None else f" under {plan.schedule}"
    if plan.proven:
        return f"step {format_seconds(step)}{schedule}, proven: no plan is faster of {plan.search_space}"
    gap = f"within {(step / bound - 1) * 100:.2g} % of the bound" if bound > 0 else "without a bound"
    return (
        f"step {format_seconds(step)}{schedule}, {gap}: no plan is below {format_seconds(bound)} of {plan.search_space}"
    )


def plan_table(plan: Plan, profile: Profile | None = None, memory: bool = True) -> Table:
    """The stages: layers (the first and the last also by name where a profile knows it), predicted peak and what
    is left of the device beside it and its headroom; the blocks where stages share them out, and with `memory` what is
    not kept where the plan says so.
    """
    title = f"{plan.planner or 'given cuts'}: {len(plan.stages)} stages of {plan.num_layers} layers"
    ranks, verdict, rows = plan.placement(), judge_plan(plan, profile), []
    for number, stage in enumerate(plan.stages):
        names = [profile.layers[index].name for index in (stage.first, stage.end - 1)] if profile else ["", ""]
        peak = None if plan.stage_bytes is None else plan.stage_bytes[number]
        margin = "" if verdict is None else format_bytes(verdict.margins[number])
        shown = "unknown" if peak is None else format_bytes(peak)
        served = "all" if stage.blocks is None else ", ".join(map(str, stage.blocks))
        rows.append([str(number), str(ranks[number]), stage.spans, *names, shown, margin, served])
        rows[-1].append(", ".join(f"{one.kind} {one.first}-{one.end - 1}" for one in stage.memory or ()))
    notes = [] if plan.search_seconds is None else [f"found in {plan.search_seconds * 1e3:.3g} ms"]
    if verdict is not None and profile is not None:
        notes += _device_notes(verdict, profile)
    if plan.bound_seconds is not None and plan.step_seconds is not None:
        notes.append(_said_of_bound(plan, plan.step_seconds, plan.bound_seconds))
    if plan.stage_bytes is None and any(one.bytes is not None for one in plan.ranks):
        sizes = ["unknown" if one.bytes is None else format_bytes(one.bytes) for one in plan.ranks]
        notes.append(f"peak of each rank: {', '.join(sizes)}")
    headings = ("stage", "rank", "layers", "from", "to", "peak", "margin", "blocks", "memory")
    absent = dict.fromkeys((3, 4), profile is None)
    treated = memory and any(stage.memory for stage in plan.stages)
    absent |= {7: not any(stage.blocks for stage in plan.stages), 8: not treated}
    kept = [place for place in range(len(headings)) if not absent.get(place)]
    left = [place for place, column in enumerate(kept) if column in (3, 4, 7, 8)]
    shown_rows = [[row[place] for place in kept] for row in rows]
    return Table(title, [headings[place] for place in kept], shown_rows, left, notes)


def _device_notes(verdict: MemoryVerdict, profile: Profile) -> list[str]:
    """The bytes of the stage that leaves least of its device, as the three counters show them; none for a CPU."""
    headroom = Headroom.of(profile)
    if not headroom.fixed_bytes:
        return []
    peak = verdict.peaks[verdict.worst]
    allocated, reserved, device = map(format_bytes, (peak, headroom.reserved(peak), headroom.device(peak)))
    parts = profile.conditions["headroom"].get("parts", {})
    stated = [
        f"{name} {format_bytes(part['bytes'])} ({part['known']})"
        for name, part in parts.items()
        if isinstance(part, dict) and part.get("bytes")
    ]
    beside = f"; beside the allocator {', '.join(stated)}" if stated else ""
    return [f"stage {verdict.worst}: {allocated} allocated, {reserved} reserved, {device} of its device{beside}"]


def profile_table(profile: Profile, *more: str) -> Table:
    """The layers: bytes alone and added, seconds, and what each reads where there are branches; `more`: last notes."""
    rows, notes = [], []
    for index, layer in enumerate(profile.layers):
        sizes = ["" if size is None else format_bytes(size) for size in (layer.isolated_bytes, layer.added_bytes)]
        times = ["" if t is None else f"{t * 1e3:.1f} ms" for t in (layer.forward_seconds, layer.backward_seconds)]
        rows.append([str(index), layer.name, *sizes, *times])
    headings = ["", "layer", "alone (M_i)", "added (M_a)", "forward", "backward"]
    if profile.edges != [(index, index + 1) for index in range(profile.num_layers - 1)]:
        headings.append("reads from")
        for reader, row in enumerate(rows):
            row.append(", ".join(str(writer) for writer, other in profile.edges if other == reader))
    if "input_sizes" in profile.conditions:
        notes.append(_sizes(profile.conditions["input_sizes"]))
    if "headroom" in profile.conditions:
        room = profile.conditions["headroom"]
        notes.append(
            f"a device needs {room['fragmentation']:.3g} times a stage's peak, and {format_bytes(room['fixed_bytes'])}"
        )
    for limit in profile.conditions.get("limits", []):
        notes.append(f"bytes are too low for {limit}: measure them (--measure)")
    notes += profile.conditions.get(KEPT_WHOLE, [])
    if "profiling" in profile.conditions:
        notes.append(_launches(profile.conditions["profiling"]))
    title = f"{profile.model or 'model'}: {profile.num_layers} layers, {profile.source}"
    return Table(title, headings, rows, (1, 6), [*notes, *more])


def _sizes(sizes: Mapping[str, Any]) -> str:
    """The largest microbatch, which the bytes are for, and the median of those that training meets."""

    def text(shapes: Mapping[str, list[int]]) -> str:
        name, shape = max(shapes.items(), key=lambda item: math.prod(item[1]))
        return f"{name} {'x'.join(map(str, shape))}"

    if sizes["sampled"] == 1:
        return f"every microbatch: {text(sizes['largest'])}"
    return f"largest {text(sizes['largest'])}, median {text(sizes['median'])} of {sizes['sampled']} sampled minibatches"


def _launches(runs: Mapping[str, Any]) -> str:
    return (
        f"order {runs['order']}: {runs['launches']} launch(es) on {runs['workers']} workers, {runs['rounds']} rounds "
        f"of {runs['mean_seconds']:.2f} s for {runs['stage_runs']} stage runs, {runs['total_seconds']:.1f} s in all, "
        f"{runs['end_to_end_seconds']:.1f} s end to end"
    )
