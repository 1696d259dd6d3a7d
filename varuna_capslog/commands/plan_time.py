"""What `capslog plan` is asked where time counts, and joint plans for any N."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.commands.shared import print_json, print_table, say
from varuna_capslog.reports.tables import format_seconds
from varuna_capslog.reports.wording import duration

if TYPE_CHECKING:
    from varuna_capslog.planners.joint import JointPlan
    from varuna_capslog.planners.seconds import Link
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.profiling.estimate import Memo
    from varuna_capslog.schedules import RunShape

__all__ = ["PlanRequest", "format_seconds", "plan_jointly"]


@dataclass(frozen=True)
class PlanRequest:
    """What is planned for: the flags and the config, resolved to values of the library.

    run: how a step is run; the numbers of it depend on the profile and are not set.
    memo: see `prepare.estimate_memo`.
    """

    profiles: list[Profile]
    devices: int
    run: RunShape
    memory: str
    capacity: int | list[int] | None
    minibatch_size: int | None
    link: Link | None
    memo: Memo | None = None

    def microbatches(self, profile: Profile) -> int:
        """Microbatches of a step with the size that a profile holds for; 4 per device where no minibatch is given."""
        from varuna_capslog.planners import DEFAULT_MICROBATCHES_PER_STAGE
        from varuna_capslog.start.of_profile import microbatches_of

        if self.minibatch_size is None:
            return DEFAULT_MICROBATCHES_PER_STAGE * self.devices
        return microbatches_of(profile, self.minibatch_size)

    def only_profile(self) -> Profile:
        """The one profile. Raises CapslogError for several: a choice that only joint plans make."""
        if len(self.profiles) != 1:
            raise CapslogError("several profiles are a choice of microbatch size, which only --joint makes; give one")
        return self.profiles[0]


def plan_jointly(
    request: PlanRequest, speeds: str | None, blocks: int | None, output: Path | None, as_json: bool
) -> None:
    """Prints the pipelines for N devices and writes the plan in full form. Exit status 3 if nothing fits."""
    from varuna_capslog.base.units import parse_numbers
    from varuna_capslog.planners.joint import Device
    from varuna_capslog.planning.search import joint_plan
    from varuna_capslog.plans.plan import write_plan

    number = request.devices
    capacities = request.capacity if isinstance(request.capacity, list) else [request.capacity] * number
    factors = [1.0] if speeds is None else parse_numbers(speeds, "--speeds")
    factors = factors * number if len(factors) == 1 else factors
    for name, count in (("--capacity", len(capacities)), ("--speeds", len(factors))):
        if count != number:
            raise CapslogError(f"{name} lists {count} for {number} devices; give one for all, or one for each")
    if request.minibatch_size is None:
        raise CapslogError("a joint plan shares out the samples of a step: give --minibatch SIZE, or plan for a CONFIG")
    devices = [Device(capacity, speed) for capacity, speed in zip(capacities, factors, strict=True)]
    found = joint_plan(
        request.profiles,
        devices,
        request.minibatch_size,
        blocks,
        request.run,
        request.memory,
        request.link,
    )
    if output is not None:
        write_plan(output, found.plan)
    if as_json:
        summary = {
            "step_seconds": found.step_seconds,
            "bound_seconds": found.bound_seconds,
            "idle_devices": list(found.idle),
            "max_stages": found.max_stages,
        }
        print_json(summary | {"plan": found.plan.to_json()})
    elif found.pipelines:
        _print_joint(found, devices)
    if found.plan.fits is False:
        raise DoesNotFit("; ".join(found.plan.notes))
    if len(found.pipelines) > 1 and not as_json:
        say(
            f"note: a run of this plan needs train.accumulation_blocks={found.blocks}, a constant of the run",
            err=True,
        )


def _print_joint(found: JointPlan, devices: list[Any]) -> None:
    from varuna_capslog.base.units import format_bytes

    of_block = (found.plan.num_microbatches or 1) // sum(one.blocks for one in found.pipelines)
    title = f"{len(found.pipelines)} pipelines of {found.plan.num_layers} layers on {len(devices)} devices"
    alike: Counter[tuple[str, ...]] = Counter()
    for one in found.pipelines:
        ends = [*one.cuts[1:], found.plan.num_layers]
        kinds = Counter(_kind(devices[rank]) for rank in one.devices)
        alike[
            str(len(one.cuts)),
            ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
            " ".join(str(end - first) for first, end in zip(one.cuts, ends, strict=True)),
            str(one.blocks * of_block),
            format_seconds(one.step_seconds),
            format_bytes(max(one.stage_bytes)),
        ] += 1
    assert found.step_seconds is not None
    parts = [f"microbatches of {found.plan.microbatch_size}", f"step {format_seconds(found.step_seconds)}"]
    if found.bound_seconds is not None:
        parts.append(
            f"no plan with at most {found.max_stages} stages per pipeline below {format_seconds(found.bound_seconds)}"
        )
    if found.idle:
        parts.append(f"{len(found.idle)} idle")
    parts.append(f"found in {duration(found.plan.search_seconds, 2)}")
    headings = ("pipelines", "stages", "devices", "layers of each stage", "microbatches", "step", "peak")
    rows = [[str(count), *row] for row, count in alike.items()]
    print_table(title, headings, rows, left=(2, 3), notes=[", ".join(parts)])


def _kind(device: Any) -> str:
    from varuna_capslog.base.units import format_bytes

    memory = "any memory" if device.capacity is None else format_bytes(device.capacity)
    return memory if device.speed == 1 else f"{memory} at speed {device.speed:g}"
