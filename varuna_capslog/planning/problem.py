"""The planning problem: where to cut a model, and whether that fits. `solve` answers it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import AUTO
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.planners import with_microbatches
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.playing import even_share_seconds
from varuna_capslog.planning.verdict import HostMemory, capacities_of_devices
from varuna_capslog.plans.parts import PlanRank
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import DEFAULT_RUN, RunShape

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config, Pipeline

__all__ = ["Problem"]


@dataclass(frozen=True)
class Problem:
    """Inputs that decide where a model is cut, and whether the plan fits.

    profile: of training or of inference. memory: name of the memory model, or "auto".
    devices: memory and speed of every device, pipeline after pipeline; capacities are known for all or none.
    run: the whole step over all pipelines, with its number of microbatches; the schedule may be open (`AUTO_SCHEDULE`).
    blocks_open: a planner may choose the number of accumulation blocks; else `run.num_blocks`.
    pipelines: equal pipelines that share the step.
    stages_per_rank: stages of a pipeline on each device: one number, or one for each device; None: `solve` chooses.
    link: between two devices, and to their host tiers. tier: limits of the host tiers.
    cuts, plan: first layer of each stage, or the plan to judge, where no planner chooses.
    beside: for each layer, bytes beside training (snapshots) on its device; planner joint leaves room where it can.
    shares_moments: only one of the pipelines keeps a layer's optimizer moments (`pipeline.zero`).
    members_change: devices leave and join during the run, so that blocks are fixed and replicas keep whole states.
    search_seconds: time after which a long search returns the best plan so far; None: no limit.
    longest: seconds of a step; planner budget skips slower plans with replicas, and madpipe all that it knows to be no
        faster. None: budget skips only those slower than its line of stages, madpipe none.
    """

    profile: Profile
    devices: tuple[PlanRank, ...]
    run: RunShape
    blocks_open: bool = False
    pipelines: int = 1
    stages_per_rank: int | tuple[int, ...] | None = 1
    memory: str = AUTO
    link: Link = field(default_factory=Link)
    tier: HostMemory = field(default_factory=HostMemory)
    cuts: tuple[int, ...] | None = None
    plan: Plan | None = None
    beside: tuple[int, ...] = ()
    shares_moments: bool = False
    members_change: bool = False
    search_seconds: float | None = None
    longest: float | None = None

    @classmethod
    def of(
        cls,
        profile: Profile,
        devices: int,
        capacity: int | Sequence[int] | None = None,
        run: RunShape = DEFAULT_RUN,
        link: Link | None = None,
        *,
        speeds: Sequence[float] | None = None,
        memory: str = AUTO,
        cuts: Sequence[int] | None = None,
    ) -> Problem:
        """Return the problem of one pipeline.

        capacity: bytes of every device, or one number each; None: no limit.
        run: without a number of microbatches, it gets `DEFAULT_MICROBATCHES_PER_STAGE` per device; one accumulation
            block leaves the number of blocks open.
        link: default: transfers and copies take no time.
        speeds: of each device relative to the fastest, above 0 and at most 1; None: all 1.

        Raises CapslogError for fewer than one device, and for a list of capacities or speeds of another length.
        """
        devices = fields.whole(devices, "devices", minimum=1)
        ranks, shape = _ranks(devices, capacity, speeds), with_microbatches(run, devices)
        first_layers = None if cuts is None else tuple(cuts)
        link, open_blocks = link or Link(), run.num_blocks == 1
        return cls(profile, ranks, shape, open_blocks, memory=memory, link=link, cuts=first_layers)

    @classmethod
    def of_serving(
        cls,
        profile: Profile,
        devices: int,
        batch: int,
        capacity: int | Sequence[int] | None = None,
        cuts: Sequence[int] | None = None,
    ) -> Problem:
        """Return the problem of serving a model, with a profile of inference. batch: sequences that are served
        together. Raises CapslogError as `of`, and for a batch that is no multiple of the profile's microbatch size.
        """
        size = int(profile.conditions.get("microbatch_size", 1))
        if batch % size:
            raise CapslogError(
                f"a batch of {batch} is not a multiple of the microbatch size {size}; choose a microbatch that divides "
                "it"
            )
        run = RunShape(batch // size, recompute=False, microbatch_size=size)
        return cls.of(profile, devices, capacity, run, cuts=cuts)

    @classmethod
    def of_config(cls, config: Config, profile: Profile, plan: Plan | None = None) -> Problem:
        """Return the problem of a run; plan: the plan that `pipeline.plan` names."""
        pipeline, train = config.pipeline, config.train
        cuts, capacity = pipeline.cuts, pipeline.capacity
        if plan is not None and plan.short:
            cuts, capacity, plan = list(plan.cut_list), plan.capacities_of(plan.placement()), None
        alone = pipeline.replicas == 1 and pipeline.parallel is None
        open_blocks = train.blocks_are_open and alone and not config.elastic.enabled
        return cls(
            profile,
            _ranks(pipeline.devices, capacity, pipeline.speeds) * pipeline.replicas,
            RunShape.of_config(config),
            open_blocks,
            pipeline.replicas,
            _stages_per_rank(pipeline),
            pipeline.memory,
            Link.of_config(config),
            HostMemory.of_config(config),
            None if cuts is None else tuple(cuts),
            plan,
            shares_moments=pipeline.zero == 1,
            members_change=config.elastic.enabled,
            search_seconds=pipeline.search_seconds,
        )

    @property
    def width(self) -> int:
        """Devices of one pipeline."""
        return len(self.devices) // self.pipelines

    @property
    def placement(self) -> list[int]:
        """Device of each stage of a pipeline, round by round; where the number per device is open, one stage each."""
        count = 1 if self.stages_per_rank is None else self.stages_per_rank
        counts = (count,) * self.width if isinstance(count, int) else count
        return [rank for number in range(max(counts)) for rank in range(self.width) if number < counts[rank]]

    @property
    def capacities(self) -> list[int] | None:
        """Bytes of each device of the first pipeline; None: no limit."""
        sizes = [device.capacity_bytes for device in self.devices[: self.width]]
        return None if None in sizes else [size for size in sizes if size is not None]

    @property
    def usable(self) -> list[int] | None:
        """`capacities` less the profile's headroom; None: no limit."""
        headroom = Headroom.of(self.profile)
        return None if self.capacities is None else [headroom.usable(size) for size in self.capacities]

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """Speeds of the devices of the first pipeline; None where all are as fast as the profile's."""
        speeds = tuple(1.0 if device.speed is None else device.speed for device in self.devices[: self.width])
        return None if set(speeds) == {1.0} else speeds

    @property
    def even_share_seconds(self) -> float:
        """Seconds of a step's work, divided among the devices by their speeds: a lower bound of every plan."""
        speeds = self.speeds or (1.0,) * self.width
        return even_share_seconds(self.profile, self.share.microbatches, 1) / sum(speeds)

    @property
    def share(self) -> RunShape:
        """Part of the step that one pipeline runs."""
        return self.run if self.pipelines == 1 else self.run.share(self.pipelines)

    @property
    def blocks(self) -> int | None:
        """Accumulation blocks of a step; None: a planner chooses them."""
        return None if self.blocks_open else self.run.num_blocks

    @property
    def is_given(self) -> bool:
        """True where the stages are fixed, so that no planner chooses them."""
        return self.cuts is not None or self.plan is not None

    def with_capacity(self, capacity: int | Sequence[int] | None) -> Problem:
        """Return the problem for devices of these bytes: one number for all, or one for each device of a pipeline."""
        sizes: Sequence[int | None] = capacities_of_devices(capacity, self.width) or [None] * self.width
        pairs = zip(self.devices, [*sizes] * self.pipelines, strict=True)
        ranks = (dataclasses.replace(device, capacity_bytes=size) for device, size in pairs)
        return dataclasses.replace(self, devices=tuple(ranks))


def _stages_per_rank(pipeline: Pipeline) -> int | tuple[int, ...] | None:
    if isinstance(pipeline.stages_per_rank, list):
        return tuple(pipeline.stages_per_rank)
    is_open = pipeline.stages_per_rank == "auto" and pipeline.cuts is None and pipeline.plan is None
    return None if is_open else pipeline.rounds


def _ranks(devices: int, capacity: int | Sequence[int] | None, speeds: Sequence[float] | None) -> tuple[PlanRank, ...]:
    sizes: Sequence[int | None] = capacities_of_devices(capacity, devices) or [None] * devices
    if speeds is not None and len(speeds) != devices:
        raise CapslogError(f"{len(speeds)} speeds for {devices} devices; give one for each")
    factors = [None] * devices if speeds is None else list(speeds)
    return tuple(PlanRank(capacity_bytes=size, speed=factor) for size, factor in zip(sizes, factors, strict=True))
