"""Tables of a plan and of a profile, which `capslog plan` and `capslog profile` print and notebooks show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.tables import Table
from varuna_capslog.base.units import format_bytes, format_percent, format_seconds, unit_of
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.memory.range_bytes import kinds_on
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.playing import play
from varuna_capslog.planning.verdict import MemoryVerdict, judge
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import DECODE_SECONDS, KEPT_WHOLE, LAST_HOLDS
from varuna_capslog.profiles.record import Profile
from varuna_capslog.reports.markup import duration, plural, second_unit, significant
from varuna_capslog.schedules import RunShape

__all__ = ["degrees_table", "idle_notes", "plan_table", "profile_table"]


# -- Notes on a pipeline that idles more than half of its step: how much, and changes that would help, each
#    simulated.
#
# No new plan is made, so the notes do not consider the memory that a change takes.


_DEGREES = (1, 2, 4, 8, 16)
_MUCH = 0.5
"""Share of the devices' time in a step above which a note is made."""
_MOST_CALLS = 2_000
"""Largest number of calls in a step to simulate, which takes a second at most; larger steps get no note."""


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
    """Return texts on the fewest microbatches, and on the most devices (each with equally many neighbouring stages of
    the plan), with which at most half of the step is idle. Only doubled microbatches and halved devices are tried.
    """
    assert plan.num_microbatches is not None
    assert plan.cuts is not None
    helps, count, cuts = [], 2 * plan.num_microbatches, plan.cuts[::2]
    # beyond eight per device, devices idle because one stage is too long
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

    step_seconds: of the step as planned, with links; the simulation here has none.
    count: microbatches, if not the plan's. recompute: for stages whose memory the plan leaves open; None: as in the
        profile.
    """
    run = RunShape.of_conditions(profile.conditions)
    played = play(profile, plan, None, count, recompute, run, Link())
    seconds = max(played.step_seconds, step_seconds or 0.0) - (played.update or 0.0)
    busy = played.busy_seconds.values()
    return 1 - sum(busy) / (len(busy) * seconds) if seconds > 0 else 0.0


# -- The tables of a plan and of a profile


def _said_of_bound(plan: Plan, step: float, bound: float) -> str:
    """Describe the step time, and how much faster another plan of the search space could be at most."""
    head = f"step time {format_seconds(step)}{'' if plan.schedule is None else f', schedule {plan.schedule}'}"
    if plan.proven:
        return f"{head}: proven to be the shortest of {plan.search_space}"
    above = f"at most {format_percent(step / bound - 1)} above" if bound > 0 else "perhaps above"
    return f"{head}: {above} the shortest of {plan.search_space} (lower bound {format_seconds(bound)})"


def plan_table(plan: Plan, profile: Profile | None = None, memory: bool = True) -> Table:
    """Return a table of the stages: layers (the first and the last also by name where a profile has it), predicted
    peak, headroom and margin, which together are the capacity of the device; the blocks where stages share them out;
    with `memory` the plan's memory intervals. Notes below describe the run that the plan is for.
    """
    count = f"{len(plan.stages)} stage{'s' * (len(plan.stages) != 1)}"
    title = f"{plan.planner or 'given cuts'}: {count} of {plan.num_layers} layers"
    ranks, sizes, rows = plan.placement(), plan.stage_bytes, []
    if sizes is None and len(set(ranks)) == len(ranks) <= len(plan.ranks):  # a rank's bytes are those of its only stage
        known_sizes = [size for rank in ranks if (size := plan.ranks[rank].bytes) is not None]
        sizes = tuple(known_sizes) if len(known_sizes) == len(ranks) else None
    headroom = Headroom() if profile is None else Headroom.of(profile)
    verdict = judge(sizes, plan.capacities_of(ranks), headroom)
    unit, unit_name = unit_of(max(sizes or [0]))
    alike = verdict is not None and len(set(verdict.capacities)) == 1
    shared_out = any(stage.blocks for stage in plan.stages)
    by_rank = sizes is None and any(rank_use.bytes is not None for rank_use in plan.ranks)
    for number, stage in enumerate(plan.stages):
        names = [profile.layers[index].name for index in (stage.first, stage.end - 1)] if profile else ["", ""]
        if profile is not None and stage.end == profile.num_layers and LAST_HOLDS in profile.conditions:
            names[1] = ", ".join(profile.conditions[LAST_HOLDS])
        peak = "" if by_rank else "unknown" if sizes is None else f"{sizes[number] / unit:.2f}"
        parts = [peak, "", "", ""]
        if verdict is not None:
            parts = _parts_of_capacity(verdict, number, unit)
            parts[3] = "" if alike else parts[3]
        rows.append(["" if ranks == list(range(len(ranks))) else str(ranks[number]), stage.spans, *names, *parts])
        rows[-1].insert(0, str(number))
        rows[-1].append("" if not shared_out else "all" if stage.blocks is None else ", ".join(map(str, stage.blocks)))
        rows[-1].append(", ".join(interval.text for interval in stage.memory or ()) if memory else "")
    notes = _purpose(plan, profile)
    if verdict is not None:
        each = f"{verdict.capacities[0] / unit:.2f} {unit_name}, the capacity of each device" if alike else "capacity"
        notes.append(f"peak {'+ headroom ' if verdict.needed != verdict.peaks else ''}+ margin = {each}")
    if verdict is not None and profile is not None:
        notes += _device_notes(verdict, profile)
    if sizes and profile is not None and plan.purpose == "training":
        notes += _kind_notes(plan, profile, sizes)
    if profile is not None:
        notes += [*idle_notes(plan, profile), *_forward_notes(plan, profile)]
    if plan.bound_seconds is not None and plan.step_seconds is not None:
        notes.append(_said_of_bound(plan, plan.step_seconds, plan.bound_seconds))
    if by_rank:
        sizes_of_ranks = [
            "unknown" if rank_use.bytes is None else format_bytes(rank_use.bytes) for rank_use in plan.ranks
        ]
        notes.append(f"peak of each rank: {', '.join(sizes_of_ranks)}")
    notes += [] if plan.search_seconds is None else [f"found in {duration(plan.search_seconds, 2)}"]
    of_bytes = [
        name if sizes is None else f"{name}\n{unit_name}" for name in ("peak", "headroom", "margin", "capacity")
    ]
    headings = ["stage", "rank", "layers", "from", "to", *of_bytes, "blocks", "memory"]
    return Table(title, headings, rows, (3, 4, 9, 10), notes, (3, 4))


def _forward_notes(plan: Plan, profile: Profile) -> list[str]:
    """Return a line for each kind of forward of a served model: seconds of the slowest stage, and of all stages."""
    if plan.purpose == "training":
        return []
    size, conditions = plan.microbatch_size or 1, profile.conditions
    forward = [layer.forward_seconds for layer in profile.layers]
    if DECODE_SECONDS in conditions:
        forwards = {f"prefill of {size} x {conditions.get('sequence')} tokens": forward}
        forwards[f"next token of {plural(size, 'sequence')}"] = conditions[DECODE_SECONDS]
    else:
        forwards = {f"forward of {plural(size, 'sample')}": forward}
    notes = []
    for name, seconds in forwards.items() if profile.timed else ():
        sums = [sum(seconds[layer] or 0.0 for layer in stage.numbers) for stage in plan.stages]
        slowest = max(range(len(sums)), key=sums.__getitem__)
        notes.append(f"{name}: {duration(sums[slowest])} in the slowest stage, {slowest}; {duration(sum(sums))} in all")
    return [*notes, f"next token {conditions['decode']}"] if "decode" in conditions else notes


def _kind_notes(plan: Plan, profile: Profile, sizes: Sequence[int]) -> list[str]:
    """Return a line on the bytes of the heaviest stage by kind; none where they are not known."""
    heaviest = max(range(len(sizes)), key=lambda stage: sizes[stage])
    kinds = kinds_on(plan, profile, heaviest, "stage", sizes[heaviest])
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in kinds.items() if size)
    where = "peak" if len(sizes) == 1 else f"peak of stage {heaviest}"
    return [f"{where}: {parts}"] if parts else []


def _parts_of_capacity(verdict: MemoryVerdict, number: int, unit: int) -> list[str]:
    """Return peak, headroom, margin and capacity of a stage, rounded so that the first three sum to the last."""
    peak, needed, capacity = (sizes[number] for sizes in (verdict.peaks, verdict.needed, verdict.capacities))
    total, used, more = (round(size / unit, 2) for size in (capacity, peak, needed - peak))
    headroom = "" if verdict.needed == verdict.peaks else f"{more:.2f}"
    return [f"{used:.2f}", headroom, f"{total - used - more:.2f}", f"{total:.2f}"]


_SCHEDULES = {
    "gpipe": "all forwards, then all backwards",
    "1f1b": "one forward, one backward",
    "1f1b-star": "one forward, one backward, as many in flight as no stage waits for",
    "interleaved": "several stages of each device in turn",
    "kfkb": "k forwards, k backwards",
    "zb-h1": "one forward, one backward in two halves",
    "varuna": "every forward runs again before its backward",
}
"""Order of actions of each schedule in words."""


def _purpose(plan: Plan, profile: Profile | None) -> list[str]:
    """Describe the run that the plan is for, and the source of its numbers, as far as plan and profile have them."""
    conditions = {} if profile is None else profile.conditions
    size, count, parts = plan.microbatch_size or conditions.get("microbatch_size"), plan.num_microbatches, []
    if count is not None and isinstance(size, int):
        step, calls = f"per step{' and pipeline' if plan.short else ''}", plural(count, "microbatch", "es")
        if plan.purpose == "inference":
            step, calls = "together", plural(count, "forward")
        parts.append(f"{plural(count * size, 'sample')} {step} in {calls} of {size}")
    elif count is not None or size is not None:
        parts.append(f"microbatches of {size}" if count is None else f"{plural(count, 'microbatch', 'es')} per step")
    if plan.schedule is not None:
        parts.append(f"{plan.schedule} ({_SCHEDULES[plan.schedule]})" if plan.schedule in _SCHEDULES else plan.schedule)
    types = {name: conditions.get(name) for name in ("dtype", "weights", "moments")}
    dtypes = [f"{name} {kind}" if name != "dtype" else str(kind) for name, kind in types.items() if kind is not None]
    parts += [*dtypes, *([str(conditions["optimizer"])] if "optimizer" in conditions else [])]
    if profile is not None and (profile.source or "device" in conditions):
        kind = f":{conditions['gpu']}" if conditions.get("gpu") else ""
        where = f" for {conditions['device']}{kind}" if "device" in conditions else ""
        parts.append(f"costs {profile.source or 'given'}{where}")
    return [f"for {', '.join(parts)}"] if parts else []


def _device_notes(verdict: MemoryVerdict, profile: Profile) -> list[str]:
    """Return a line on the stage with the smallest margin: bytes allocated, reserved, on its device; none for a CPU."""
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
    """Return a table of the layers: bytes alone and added to a stage, seconds, and inputs of branches; `more`: last
    notes. Each column of numbers has one unit, which leaves room for the layers' names.
    """
    names, notes = [layer.name for layer in profile.layers], []
    names[-1] = ", ".join(profile.conditions.get(LAST_HOLDS, names[-1:]))
    sizes = [(layer.isolated_bytes, layer.added_bytes) for layer in profile.layers]
    times = [(layer.forward_seconds, layer.backward_seconds) for layer in profile.layers]
    unit, bytes_unit = unit_of(round(_median(sizes)))
    factor, seconds_unit = second_unit(_median(times))
    rows = [
        [
            *(str(index), name),
            *("" if size is None else f"{size / unit:.2f}" for size in sizes[index]),
            *("" if seconds is None else significant(seconds * factor, 4) for seconds in times[index]),
        ]
        for index, name in enumerate(names)
    ]
    of_bytes, of_seconds = ("alone", "added"), ("forward", "backward")
    headings = ["", "layer", *(f"{name}\n{bytes_unit}" for name in of_bytes)]
    headings += [f"{name}\n{seconds_unit}" for name in of_seconds]
    if profile.edges != [(index, index + 1) for index in range(profile.num_layers - 1)]:
        headings.append("reads from")
        for reader, row in enumerate(rows):
            row.append(", ".join(str(writer) for writer, layer_reading in profile.edges if layer_reading == reader))
    if "input_sizes" in profile.conditions:
        notes.append(_sizes(profile.conditions["input_sizes"]))
    if "headroom" in profile.conditions:
        room = profile.conditions["headroom"]
        fixed = f", and {format_bytes(room['fixed_bytes'])}" if room["fixed_bytes"] else ""
        notes.append(f"a device needs {room['fragmentation']:.3g} times a stage's peak{fixed}")
    for limit in profile.conditions.get("limits", []):
        notes.append(f"bytes are too low for {limit}: measure them (--measure)")
    notes += profile.conditions.get(KEPT_WHOLE, [])
    if "profiling" in profile.conditions:
        notes.append(_launches(profile.conditions["profiling"]))
    title = f"{profile.model or 'model'}: {profile.num_layers} layers, {profile.source}"
    return Table(title, headings, rows, (1, 6), [*notes, *more], (1,))


def degrees_table(profile: Profile, samples: int) -> Table:
    """Return a table of the bytes of one stage of all layers on 1, 2, ... 16 devices that share calls of `samples`
    samples, by CAPTURE's predictor: profiled degrees by a line through two batch sizes, others by its fit.
    """
    from varuna_capslog.planners.replicas.fitted import FittedPeaks

    peaks = FittedPeaks(profile)
    known, rows = peaks.degrees, []
    kinds = [kind for kind in ("data", "tensor") if kind in known]
    for degree in sorted({*_DEGREES, *(degree for degrees in known.values() for degree in degrees)}):
        cells = []
        for kind in kinds:
            predicted = peaks.predicts(kind, degree)
            size = peaks.of(0, profile.num_layers, kind, degree, samples) if predicted else None
            fit = "" if peaks.is_profiled(kind, degree) else " (fit)"
            cells.append("" if size is None else format_bytes(round(size)) + fit)
        if any(cells):
            rows.append([str(degree), *cells])
    note = f"by CAPTURE's predictor, for calls of {plural(samples, 'sample')} (benchmarks/capture has its errors)"
    return Table("one stage of all layers on several devices", ["devices", *kinds], rows, (), [note])


def _median(rows: Sequence[Sequence[float | None]]) -> float:
    """Return the median of the numbers that are not 0; 0 without any."""
    return statistics.median([abs(number) for row in rows for number in row if number] or [0])


def _sizes(sizes: Mapping[str, Any]) -> str:
    """Describe the largest microbatch, for which the bytes hold, and the median microbatch of training."""

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
