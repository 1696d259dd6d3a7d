"""Plans of planners that say on which ranks each stage stands: `replicated` gives a stage several, `periodic` gives a
rank several stages. `planning/search` and the start of a run ask here. `equal_pipelines` repeats a plan of planner
`budget` for several pipelines; who wants that imports it.
"""

from __future__ import annotations

from collections.abc import Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import AUTO
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.planners import MADPIPE, with_microbatches
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.placed.periodic import periodic_plan
from varuna_capslog.planning.placed.replicated import replicated_plan
from varuna_capslog.planning.ranks import judged
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["check_ranks_memory", "judged_placed_plan", "placed_plan"]


def placed_plan(
    profile: Profile,
    devices: int,
    planner: str,
    capacity: int | Sequence[int] | None,
    run: RunShape,
    link: Link | None = None,
    blocks: int | None = None,
) -> Plan:
    """The plan of a planner of `WHOLE_RUN`, not judged yet; the arguments are those of `replicated_plan`."""
    if planner == MADPIPE:
        return periodic_plan(profile, devices, capacity, run, link)
    return replicated_plan(profile, devices, planner, capacity, run, link, blocks)


def judged_placed_plan(
    profile: Profile,
    devices: int,
    planner: str,
    memory: str,
    capacity: int | Sequence[int] | None,
    run: RunShape,
    link: Link | None = None,
) -> Plan:
    """`placed_plan`, and whether it fits. memory: "auto" or "ranks"; see `check_ranks_memory`."""
    check_ranks_memory(planner, memory)
    blocks = run.num_blocks if run.num_blocks > 1 else None
    found = placed_plan(profile, devices, planner, capacity, run, link, blocks)
    return judged(profile, found, with_microbatches(run, devices))


def check_ranks_memory(planner: str, memory: str) -> None:
    """Raises CapslogError for a memory model that does not know the ranks of such a plan."""
    if memory in (AUTO, RANKS):
        return
    one, several = ("ranks", "may have several stages") if planner == MADPIPE else ("stages", "have several replicas")
    raise CapslogError(
        f"memory is {memory!r}, but {one} of planner {planner!r} {several}, whose bytes only memory model {RANKS!r} "
        f"knows; choose {RANKS} or auto"
    )
