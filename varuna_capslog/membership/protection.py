"""Device bytes that protection takes, before a run: in a plan's notes, in its verdict and in the cuts. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.settings import Config
from varuna_capslog.membership.generation import Member, MemberLayout
from varuna_capslog.membership.placing import Placer
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.membership.redundancy import Reserve, reserves
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.planning.verdict import MemoryVerdict, judge_ranks
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import kept_copies
from varuna_capslog.profiles.record import Profile

__all__ = ["RunProtection", "describe_reserves", "state_bytes"]


def state_bytes(profile: Profile) -> tuple[list[int], list[int]] | None:
    """Return state and gradient bytes of each layer by a profile; None where it lacks them. Static bytes are the state
    and one gradient of the trained part, of which the optimizer keeps further copies (AdamW two): of the bytes beyond
    the parameters, the gradient is one part in three.
    """
    states, gradients, parts = [], [], 1 + sum(kept_copies(profile.conditions))
    for layer in profile.layers:
        if layer.static_bytes is None or layer.parameter_bytes is None:
            return None
        gradient = int(max(0, layer.static_bytes - layer.parameter_bytes) // parts)
        states.append(layer.static_bytes - gradient)
        gradients.append(gradient)
    return states, gradients


def describe_reserves(reserve_of: Mapping[Member, Reserve]) -> str:
    """Say in a sentence what protection takes: on the rank with most of it, and on all ranks together."""
    most = max(reserve_of.values(), key=sum)
    parts = [f"{format_bytes(most.snapshot)} for its own layers at the last boundary"]
    if most.copies:
        parts.append(f"{format_bytes(most.copies)} for copies of others'")
    if most.updates:
        parts.append(f"{format_bytes(most.updates)} for their gradients")
    total = sum(map(sum, reserve_of.values()))
    return (
        f"protection takes up to {format_bytes(sum(most))} of a rank's memory on the device beside training "
        f"({', '.join(parts)}), {format_bytes(total)} over {len(reserve_of)} rank(s)"
    )


@dataclass(frozen=True)
class RunProtection:
    """Protection before a run, on equal hosts; a `planning.solve.Protection`. Raises CapslogError as `Placer`."""

    config: Config
    profile: Profile

    @property
    def beside(self) -> tuple[int, ...]:
        """Bytes of each layer's snapshot; empty where they are not known."""
        sizes = state_bytes(self.profile)
        return () if sizes is None else tuple(sizes[0])

    def plan(self, capacities: Sequence[int] | None) -> Plan | None:
        """Return the `budget` plan that a member would propose, with room for protection, where its bytes are known."""
        pipeline, sizes = self.config.pipeline, state_bytes(self.profile)
        if sizes is None:
            return None
        placer = Placer.of_config(self.config, self.profile, *sizes, edges=self.profile.known_edges or ())
        if placer.budgeted is None:
            return None
        limits = [0] * pipeline.devices if capacities is None else capacities
        limit_of_rank = enumerate([*limits] * pipeline.replicas)
        seats = [Seat(f"rank {rank}", f"host {rank}", size) for rank, size in limit_of_rank]
        return placer.propose(seats) or placer.budget_plan(seats, pipeline.replicas)

    def reserve(self, plan: Plan, find: Callable[..., Plan]) -> tuple[Plan, list[int]]:
        """Return a plan with protection in its notes, and the bytes of each stage's snapshot.

        Snapshots and copies lie on the device beside training; every rank is taken to be on its own host. Where
        snapshots exceed a capacity that the plan alone keeps to, one pipeline is cut anew with them, unless the config
        fixes the cuts; otherwise the plan does not fit. Copies without room are reported, not refused: the run trains
        without that protection.

        Args:
            plan: of any form, with the bytes of its ranks. A short form stands in the config's replicas.
            find: see `planning.solve.Protection`.
        """
        return _with_reserves(self.config, self.profile, plan, find)


def _with_reserves(config: Config, profile: Profile, plan: Plan, find: Callable[..., Plan]) -> tuple[Plan, list[int]]:
    pipeline, replicas = config.pipeline, config.pipeline.replicas
    sizes = state_bytes(profile)
    if sizes is None:
        note = "what protection takes is unknown: the profile has no static_bytes or parameter_bytes; profile again"
        Placer.of_config(config, profile, [0] * profile.num_layers)
        return dataclasses.replace(plan, notes=(*plan.notes, note)), [0] * len(plan.stages)
    edges = profile.known_edges or ()
    placer, width = Placer.of_config(config, profile, *sizes, edges=edges), plan.num_ranks
    limits = [rank.capacity_bytes or 0 for rank in plan.ranks] or [0] * width
    seats = [Seat(f"rank {rank}", f"host {rank}", limits[rank % width]) for rank in range(config.world_size)]

    def placed(plan: Plan) -> tuple[MemberLayout, MemoryVerdict | None]:
        """Return the layout with its copies, and whether the ranks fit, with what lies beside training."""
        full = placer.pipelines(plan.cut_list, replicas) if plan.short else plan
        layout, held = placer.weighed(full, seats)
        verdict = None if held is None else judge_ranks(plan, held[:width], Headroom.of(profile))
        return layout, verdict and dataclasses.replace(verdict, of="stage" if plan.short else "rank")

    lack, (layout, verdict) = "", placed(plan)
    if plan.fits and verdict is not None and not verdict.fits:
        anew = None
        if plan.short and pipeline.cuts is None and pipeline.plan is None:
            anew = find(capacity=pipeline.capacity, cuts=placer.cuts(seats, replicas, width))
        if anew is not None and (moved := placed(anew))[1] is not None and moved[1].fits:
            plan = dataclasses.replace(anew, planner=plan.planner, search_seconds=plan.search_seconds)
            layout = moved[0]
        else:
            plan = dataclasses.replace(plan, fits=False, shortfall=verdict.shortfall(None))
            lack = (
                f"does not fit with elastic.enabled: {verdict.need} where a snapshot of its layers lies beside it; add "
                "devices or capacity, or set elastic.enabled to false"
            )
    kept = reserves(layout, placer.sync, placer.layer_bytes, placer.gradient_bytes)
    told = [lack, describe_reserves(kept), layout.problem]
    snapshots = [sum(sizes[0][layer] for layer in stage.numbers) for stage in plan.stages]
    return dataclasses.replace(plan, notes=(*plan.notes, *filter(None, told))), snapshots
