"""What protection will take of a planned run, before it starts: sentences for the plan's notes, and the check.

`prepare` asks for it where `elastic.enabled` is set. Snapshots and copies lie on the device beside training, so a plan
that fits without them may not fit with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.reading import Config
from varuna_capslog.membership.placing import Placer, describe_reserves, state_bytes
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.plans.plan import Plan, Shortfall
from varuna_capslog.profiles.record import Profile

__all__ = ["with_reserves"]


def with_reserves(config: Config, profile: Profile, plan: Plan, find: Callable[..., Plan]) -> tuple[Plan, list[int]]:
    """The plan with what protection takes in its notes, and the bytes of each stage's own snapshot.

    Every rank is taken to be on a host of its own. Where a capacity is given that the plan keeps to without snapshots
    and not with them, it is cut anew with them, unless the config fixes the cuts; where that does not help it does not
    fit. Copies that find no room are said, not refused: the run trains without that protection.

    Args:
        find: `planners.plan` for this run, without capacity and cuts.

    Raises:
        CapslogError: as `Placer`: what a run that changes its members cannot be planned with.
    """
    pipeline, replicas = config.pipeline, config.pipeline.replicas
    sizes = state_bytes(profile)
    if sizes is None:
        note = "what protection takes is unknown: the profile has no static_bytes or parameter_bytes; profile again"
        Placer.of_config(config, profile, [0] * profile.num_layers)
        return dataclasses.replace(plan, notes=(*plan.notes, note)), [0] * len(plan.cuts)
    placer, headroom = Placer.of_config(config, profile, *sizes), Headroom.of(profile)
    capacities = plan.capacities_of(plan.placement())
    seats = [
        Seat(f"rank {rank}", f"host {rank}", 0 if capacities is None else capacities[rank % len(plan.cuts)])
        for rank in range(len(plan.cuts) * replicas)
    ]

    def lacking(cuts: Sequence[int]) -> list[int]:
        """Bytes by which each stage exceeds its device."""
        held = placer.of_cuts(cuts, replicas, seats)[1]
        if held is None or capacities is None:
            return [0]
        return [headroom.reserved(used) - size for used, size in zip(held, capacities, strict=True)]

    lack = ""
    if plan.fits and max(lacking(plan.cuts)) > 0:
        cuts = placer.cuts_of(len(plan.cuts), replicas, seats)
        if pipeline.cuts is None and max(lacking(cuts)) <= 0:
            found = find(capacity=pipeline.capacity, cuts=list(cuts))
            plan = dataclasses.replace(found, planner=plan.planner, search_seconds=plan.search_seconds)
        else:
            assert capacities is not None
            lacks = lacking(plan.cuts)
            stage = max(range(len(lacks)), key=lambda number: lacks[number])
            plan = dataclasses.replace(plan, fits=False, shortfall=Shortfall(stage, lacks[stage], None))
            size = capacities[stage]
            lack = (
                f"does not fit with elastic.enabled: stage {stage} needs {format_bytes(size + lacks[stage])} of "
                f"{format_bytes(size)} where a snapshot of its layers lies beside it; add devices or capacity, or set "
                "elastic.enabled to false"
            )
    layout, _ = placer.of_cuts(plan.cuts, replicas, seats)
    told = [lack, describe_reserves(placer.reserves(layout)), layout.problem]
    snapshots = [sum(sizes[0][first:end]) for first, end in plan.stages()]
    return dataclasses.replace(plan, notes=(*plan.notes, *filter(None, told))), snapshots
