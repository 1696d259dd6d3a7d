"""What protection will take of a planned run, before it starts: sentences for the plan's notes, and the check.

`prepare` asks for it where `elastic.enabled` is set. Snapshots and copies lie on the device beside training, so a plan
that fits without them may not fit with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from varuna_capslog.config.reading import Config
from varuna_capslog.membership.placing import Placer, describe_reserves, state_bytes
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.planning.verdict import MemoryVerdict, judge
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile

__all__ = ["with_reserves"]


def with_reserves(config: Config, profile: Profile, plan: Plan, find: Callable[..., Plan]) -> tuple[Plan, list[int]]:
    """The plan with what protection takes in its notes, and the bytes of each stage's own snapshot.

    Every rank is taken to be on a host of its own. Where a capacity is given that the plan keeps to without snapshots
    and not with them, it is cut anew with them, unless the config fixes the cuts; where that does not help it does not
    fit. Copies that find no room are said, not refused: the run trains without that protection.

    Args:
        find: `search.plan` for this run, without capacity and cuts.

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

    def judged(cuts: Sequence[int]) -> MemoryVerdict | None:
        """Whether stages with what lies beside them fit their devices."""
        return judge(placer.of_cuts(cuts, replicas, seats)[1], capacities, headroom)

    lack, verdict = "", judged(plan.cuts)
    if plan.fits and verdict is not None and not verdict.fits:
        cuts = placer.cuts_of(len(plan.cuts), replicas, seats)
        other = judged(cuts)
        if pipeline.cuts is None and other is not None and other.fits:
            found = find(capacity=pipeline.capacity, cuts=list(cuts))
            plan = dataclasses.replace(found, planner=plan.planner, search_seconds=plan.search_seconds)
        else:
            plan = dataclasses.replace(plan, fits=False, shortfall=verdict.shortfall(None))
            lack = (
                f"does not fit with elastic.enabled: {verdict.need} where a snapshot of its layers lies beside it; add "
                "devices or capacity, or set elastic.enabled to false"
            )
    layout, _ = placer.of_cuts(plan.cuts, replicas, seats)
    told = [lack, describe_reserves(placer.reserves(layout)), layout.problem]
    snapshots = [sum(sizes[0][first:end]) for first, end in plan.stages()]
    return dataclasses.replace(plan, notes=(*plan.notes, *filter(None, told))), snapshots
