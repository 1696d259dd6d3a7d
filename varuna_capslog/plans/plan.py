"""The plan: layers, share of a step, memory intervals and order of actions of each rank.

The short form of a plan is one pipeline of consecutive stages, stage s on rank s. The full form describes everything
that ranks can do. A run's folder has a file plan-<generation>.json for each of its plans. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from varuna_capslog.base import fields, files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.parallel import Divisors
from varuna_capslog.plans import plan_text, rules
from varuna_capslog.plans.parts import (
    PlanRank,
    PlanStage,
    Shortfall,
    Units,
    check_optional,
    set_field,
)
from varuna_capslog.schedules import StageGraph

__all__ = [
    "Plan",
    "latest_plan",
    "pipelines_of",
    "plan_of_pipelines",
    "plan_path",
    "read_plan",
    "stages_of_pipelines",
    "write_plan",
]


@dataclass(frozen=True)
class Plan:
    """Plan of a step. Only the number of layers and the stages are required; `of_cuts` makes the short form.

    num_layers: of the whole chain. stages: numbered by their place.
    units: microbatches and blocks of one step. In the short form, `per_step` counts those of one pipeline.
    schedule, actions: name of a schedule; or one list of actions per rank, whose numbers count the stage's own calls.
    routes: "relay": tensors go from stage to stage; "direct": straight to the stages that read them.
    variants: layer -> name of its implementation.
    ranks: as many as run stages, or more; () where nothing is known about them.
    peak_bytes, step_seconds: predicted largest peak of the ranks, and seconds of one step; None: not predicted.
    fits, shortfall: `fits` is None where unknown; `shortfall` is set only where it is False.
    planner, memory_model, model, profile_digest, search_seconds: the origin of the plan.
    bound_seconds, proven, search_space: no plan of the named space is faster than the bound; `proven` is True where the
        plan is proven to be the fastest there.
    parallel: how another system divides each stage, whose bytes and seconds are those of one card; None: not at all.
    purpose: "training", or "inference": only forwards, with the microbatches of all sequences served together.
    notes: sentences for people about what could not be predicted; not part of the file.

    Raises CapslogError for a plan that breaks rules 1, 3, 4 or 5 of `plans/rules.py`; `check_graph` checks rule 2.
    """

    num_layers: int
    stages: tuple[PlanStage, ...]
    units: Units = field(default_factory=Units)
    schedule: str | None = None
    actions: tuple[tuple[str, ...], ...] | None = None
    routes: str = "relay"
    variants: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[PlanRank, ...] = ()
    peak_bytes: int | None = None
    step_seconds: float | None = None
    fits: bool | None = None
    shortfall: Shortfall | None = None
    planner: str | None = None
    memory_model: str | None = None
    model: str | None = None
    profile_digest: str | None = None
    search_seconds: float | None = None
    bound_seconds: float | None = None
    proven: bool | None = None
    search_space: str | None = None
    parallel: Divisors | None = None
    purpose: str = "training"
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        set_field(self, "num_layers", fields.whole(self.num_layers, "num_layers", 1, fields.MOST_LAYERS))
        set_field(self, "stages", tuple(fields.listed(self.stages, "stages")))
        set_field(self, "ranks", tuple(fields.listed(self.ranks, "ranks")))
        if not self.stages:
            raise CapslogError("stages is empty; a plan has one stage or more")
        for name in ("schedule", "planner", "memory_model", "model", "search_space"):
            check_optional(self, name, fields.text)
        check_optional(self, "profile_digest", fields.digest)
        for name in ("search_seconds", "step_seconds", "bound_seconds"):
            check_optional(self, name, fields.seconds)
        check_optional(self, "peak_bytes", partial(fields.whole, minimum=None))
        set_field(self, "parallel", Divisors.of(self.parallel))
        fields.choice(self.purpose, "purpose", ("training", "inference"))
        for name in ("fits", "proven"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise CapslogError(f"{name} is {value!r}; it must be true, false or null")
        rules.check_variants(self.variants, self.num_layers)
        rules.check_routes(self.stages, self.routes)
        blocks = self._blocks()
        rules.check_cover(self.stages, self.num_layers, blocks)
        rules.check_grains(self.stages, self.units, self.routes)
        if self.ranks:
            rules.check_ranks(self.stages, self.ranks)
        if self.shortfall is not None:
            self._check_shortfall(self.shortfall)
        if self.fits:
            rules.check_capacity(self.stages, self.ranks)
        if self.actions is not None:
            self._check_actions()

    # -- how a plan is made ------------------------------------------------------------------------------------------

    @classmethod
    def of_cuts(
        cls,
        num_layers: int,
        cuts: Sequence[int],
        *,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        stage_bytes: Sequence[int] | None = None,
        stage_seconds: Sequence[float] | None = None,
        capacity_bytes: int | Sequence[int] | None = None,
        **more: Any,
    ) -> Plan:
        """Make a plan of the short form: one pipeline, stage s on rank s, all kept or recomputed as the config says.

        cuts: the first layer of each stage, beginning with 0.
        num_microbatches, microbatch_size: microbatches of a step of this pipeline, and samples of each.
        stage_bytes, stage_seconds: predictions, as in `PlanStage`; the largest of stage_bytes is peak_bytes.
        capacity_bytes: None, one number for all devices, or one per device.
        more: further fields of the plan.
        """
        num_layers = fields.whole(num_layers, "num_layers", 1, fields.MOST_LAYERS)
        cuts = fields.cut_list(cuts, num_layers)
        sizes = fields.column(stage_bytes, "stage_bytes", partial(fields.whole, minimum=None), len(cuts), "stages")
        times = fields.column(stage_seconds, "stage_seconds", fields.seconds, len(cuts), "stages")
        if isinstance(capacity_bytes, (list, tuple)):
            least = partial(fields.whole, minimum=1)
            limits = fields.column(capacity_bytes, "capacity_bytes", least, len(cuts), "devices")
        else:
            if capacity_bytes is not None:
                capacity_bytes = fields.whole(capacity_bytes, "capacity_bytes", minimum=1)
            limits = [capacity_bytes] * len(cuts)
        if stage_bytes is not None and more.get("peak_bytes") not in (None, max(sizes)):
            raise CapslogError(f"peak_bytes is {more['peak_bytes']}, but the largest of stage_bytes is {max(sizes)}")
        rows = zip(cuts, (*cuts[1:], num_layers), sizes, times, strict=True)
        stages = [
            PlanStage(((first, end),), (rank,), memory=None, bytes=size, seconds=seconds)
            for rank, (first, end, size, seconds) in enumerate(rows)
        ]
        ranks = [PlanRank(size, capacity_bytes=limit) for size, limit in zip(sizes, limits, strict=True)]
        any_known = any(plan_rank != PlanRank() for plan_rank in ranks)
        units = Units(
            _optional(num_microbatches, "num_microbatches", most=fields.MOST_CALLS),
            _optional(microbatch_size, "microbatch_size"),
        )
        return cls(num_layers, tuple(stages), units, ranks=tuple(ranks) if any_known else (), **more)

    # -- what a plan tells -------------------------------------------------------------------------------------------

    @property
    def short(self) -> bool:
        """True where the short form can express the whole plan."""
        plain = all(
            dataclasses.replace(stage, bytes=None, seconds=None) == PlanStage(stage.layers, (number,), memory=None)
            for number, stage in enumerate(self.stages)
        )
        full = self.units.blocks is not None or self.actions is not None or self.variants or self.routes != "relay"
        more = any(
            (plan_rank.host_bytes, plan_rank.seconds, plan_rank.speed) != (None, None, None) for plan_rank in self.ranks
        )
        return plain and not full and not more and self.cuts is not None and len(self.ranks) in (0, len(self.stages))

    @property
    def cuts(self) -> tuple[int, ...] | None:
        """First layer of each stage, where the stages are one pipeline in the order of the chain; else None."""
        follow = all(len(stage.layers) == 1 and stage.blocks is None for stage in self.stages)
        cuts = tuple(stage.first for stage in self.stages)
        return cuts if follow and list(cuts) == sorted(cuts) else None

    @property
    def cut_list(self) -> tuple[int, ...]:
        """`cuts`, for callers that need them. Raises CapslogError where the stages are not one pipeline."""
        if self.cuts is None:
            raise CapslogError(
                "the plan is not one pipeline of stages in the order of the chain, so that it has no cut list; give a "
                "plan that has one"
            )
        return self.cuts

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return max(len(self.ranks), 1 + max(rank for stage in self.stages for rank in stage.ranks))

    @property
    def num_microbatches(self) -> int | None:
        """Units of a step; in the short form those of one pipeline."""
        return self.units.per_step

    @property
    def microbatch_size(self) -> int | None:
        """Samples of a unit."""
        return self.units.samples

    def speed_of(self, rank: int) -> float:
        """Return the speed of a rank's device relative to the fastest device; 1 where the plan has no speed."""
        speed = self.ranks[rank].speed if rank < len(self.ranks) else None
        return 1.0 if speed is None else speed

    @property
    def capacity_bytes(self) -> int | tuple[int | None, ...] | None:
        """Bytes of the ranks' devices: one number where all are equal, None where none is known."""
        limits = tuple(plan_rank.capacity_bytes for plan_rank in self.ranks) or (None,)
        return limits[0] if len(set(limits)) == 1 else limits

    @property
    def stage_bytes(self) -> tuple[int, ...] | None:
        """Predicted bytes of every stage; None unless all are known."""
        sizes = [stage.bytes for stage in self.stages if stage.bytes is not None]
        return tuple(sizes) if len(sizes) == len(self.stages) else None

    @property
    def stage_seconds(self) -> tuple[float, ...] | None:
        """Predicted seconds of every stage; None unless all are known."""
        times = [stage.seconds for stage in self.stages if stage.seconds is not None]
        return tuple(times) if len(times) == len(self.stages) else None

    def placement(self) -> list[int]:
        """Return the rank of each stage. Raises CapslogError where several ranks split a stage."""
        for number, stage in enumerate(self.stages):
            if len(stage.ranks) != 1:
                raise CapslogError(f"stage {number} runs on {len(stage.ranks)} ranks; one is needed here")
        return [stage.rank for stage in self.stages]

    @property
    def recomputes(self) -> bool | None:
        """True where every stage runs again as a whole, False where none does; None where the config decides, where
        stages differ, or where memory intervals are parts of a stage.
        """
        whole_stages = {None if stage.memory is None else bool(stage.memory) for stage in self.stages}
        return whole_stages.pop() if len(whole_stages) == 1 and all(stage.whole for stage in self.stages) else None

    def paths(self) -> dict[tuple[int, ...], list[int]]:
        """Return each path through the stages, as the numbers of its stages, with the blocks that take it."""
        blocks_of_path: dict[tuple[int, ...], list[int]] = {}
        for block, path in enumerate(rules.paths_of(self.stages, self._blocks())):
            blocks_of_path.setdefault(path, []).append(block)
        return blocks_of_path

    def stage_graph(self, edges: Iterable[tuple[int, int]] | None = None) -> StageGraph:
        """Return the stages and the path of every unit through them, for schedules.

        edges: of the graph of the layers (`Chain.edges`, `Profile.edges`), for routes "direct". Raises CapslogError
        where units or needed edges are not known, and for what schedules do not describe (splits, incompatible grains).
        """
        units = self.units if self.units.blocks is not None else dataclasses.replace(self.units, blocks=self._blocks())
        return rules.stage_graph(self.stages, units, self.routes, edges)

    def capacities_of(self, ranks: Iterable[int]) -> list[int] | None:
        """Return the bytes of these ranks' devices; None where a device has no limit, or its limit is not known."""
        limits = [self.ranks[rank].capacity_bytes if rank < len(self.ranks) else None for rank in ranks]
        known_limits = [limit for limit in limits if limit is not None]
        return known_limits if known_limits and len(known_limits) == len(limits) else None

    def with_bytes(self, sizes: Sequence[int]) -> Plan:
        """Return the same plan with other predicted bytes, one number per stage; each stage must have its own rank."""
        stages = tuple(dataclasses.replace(stage, bytes=size) for stage, size in zip(self.stages, sizes, strict=True))
        of_rank = dict(zip(self.placement(), sizes, strict=True))
        ranks = tuple(
            dataclasses.replace(plan_rank, bytes=of_rank.get(rank)) for rank, plan_rank in enumerate(self.ranks)
        )
        return dataclasses.replace(self, stages=stages, ranks=ranks, peak_bytes=max(sizes), fits=None, shortfall=None)

    def check_trains(self, where: str) -> None:
        """Raise CapslogError, which begins with `where`, for a plan whose purpose is not training."""
        if self.purpose != "training":
            raise CapslogError(
                f"{where} is a plan for {self.purpose}, with which nothing can be trained; make one with `capslog "
                "plan` without --for"
            )

    def check_graph(self, edges: Iterable[tuple[int, int]]) -> None:
        """Check that stages are convex in the graph of the layers, and that the graph of the stages has no cycle (rule
        2).

        edges: (layer that writes a tensor, layer that reads it).
        """
        rules.check_graph(self.stages, self._blocks(), edges)

    # -- the file ----------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value, in the short form where this can express the plan."""
        value: dict[str, Any] = {"format": plan_text.FORMAT}
        value |= {name: plan_text.plain(getattr(self, name)) for name in plan_text.BOTH}
        value |= {} if self.purpose == "training" else {"purpose": self.purpose}
        value |= {} if self.parallel is None else {"parallel": vars(self.parallel)}
        if self.short:
            return value | {
                "cuts": plan_text.plain(self.cuts),
                "num_microbatches": self.units.per_step,
                "microbatch_size": self.units.samples,
                "stage_bytes": plan_text.plain(self.stage_bytes),
                "stage_seconds": plan_text.plain(self.stage_seconds),
                "capacity_bytes": plan_text.plain(self.capacity_bytes),
            }
        if self.cuts is not None and sorted(self.placement()) == list(range(len(self.stages))):
            value["cuts"] = plan_text.plain(self.cuts)
        return value | {name: plan_text.plain(getattr(self, name)) for name in plan_text.FULL}

    @classmethod
    def from_json(cls, value: Any, where: str = "plan") -> Plan:
        """Return the plan of a JSON value. Raises CapslogError that begins with `where` and names the field."""
        return fields.within(where, lambda: _of_json(value))

    # -- checks ------------------------------------------------------------------------------------------------------

    def _blocks(self) -> int:
        """Return the number of blocks of a step; where it is not known, as many as the stages name."""
        named = [block for stage in self.stages for block in stage.blocks or ()]
        return self.units.blocks or 1 + max(named, default=0)

    def _check_shortfall(self, shortfall: Shortfall) -> None:
        if self.fits is not False:
            raise CapslogError("shortfall is given, but fits is not false")
        for name, count in (("stage", len(self.stages)), ("rank", self.num_ranks)):
            number = getattr(shortfall, name)
            if number is not None and number >= count:
                raise CapslogError(f"shortfall.{name} is {number}, but the last {name} is {count - 1}")

    def _check_actions(self) -> None:
        rows = enumerate(fields.listed(self.actions, "actions"))
        actions = tuple(
            tuple(fields.text(action, f"actions[{i}]") for action in fields.listed(row, f"actions[{i}]"))
            for i, row in rows
        )
        set_field(self, "actions", actions)
        if self.units.per_step is None:
            raise CapslogError("actions are given, but not the units of a step; give units")
        # under direct routes only the chain has the edges between stages; the engine checks the lists with these
        fields.within("actions", lambda: rules.check_actions(actions, self.stage_graph(()), self.stages))


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file of either form, or of format plan/1. Raises CapslogError naming the file and the field."""
    return Plan.from_json(files.read_json(path), where=str(path))


def write_plan(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write a plan file atomically."""
    files.write_json(path, plan.to_json())


def plan_path(run_dir: Path, generation: int) -> Path:
    """Return the path of a generation's plan file."""
    return run_dir / f"plan-{generation}.json"


def latest_plan(run_dir: Path) -> tuple[int, Plan] | None:
    """Return generation and plan of a run's newest plan file, or None where there is none yet."""
    names = [path.stem.removeprefix("plan-") for path in run_dir.glob("plan-*.json")]
    newest = max((int(name) for name in names if name.isascii() and name.isdigit()), default=None)
    return None if newest is None else (newest, read_plan(plan_path(run_dir, newest)))


def _of_json(value: Any) -> Plan:
    parts = plan_text.parts_of(value)
    if "stages" not in parts:
        return Plan.of_cuts(parts.pop("num_layers"), parts.pop("cuts"), **parts)
    cuts = parts.pop("cuts", None)
    plan = Plan(**parts)
    if cuts is not None and fields.cut_list(cuts, plan.num_layers) != plan.cuts:
        raise CapslogError(
            f"cuts is {list(cuts)}, but the stages begin at {None if plan.cuts is None else list(plan.cuts)}; make "
            "the two agree, or leave cuts out"
        )
    return plan


def _optional(value: Any, name: str, **rules: int) -> int | None:
    return None if value is None else fields.whole(value, name, 1, **rules)


# -- Conversions between equal pipelines and plans; most runs are equal pipelines.


def stages_of_pipelines(
    num_layers: int, cuts: Sequence[int], replicas: int, blocks: int, placement: Sequence[int] | None = None
) -> tuple[PlanStage, ...]:
    """Return the stages of `replicas` pipelines of the same cuts, which share the blocks evenly and in order. Their
    `memory` is None, so that the config decides about recomputation.

    cuts: the first layer of each stage, beginning with 0.
    placement: stage -> device of the pipeline; default: s -> s. Device d of pipeline r is rank r * devices + d.
    """
    devices, ends = list(range(len(cuts)) if placement is None else placement), (*cuts[1:], num_layers)
    share, width = blocks // replicas, max(devices) + 1
    return tuple(
        PlanStage(
            ((first, end),),
            (replica * width + device,),
            None if replicas == 1 else tuple(range(replica * share, (replica + 1) * share)),
            memory=None,
        )
        for replica in range(replicas)
        for first, end, device in zip(cuts, ends, devices, strict=True)
    )


def plan_of_pipelines(
    num_layers: int, cuts: Sequence[int], replicas: int, units: Units, schedule: str | None = None
) -> Plan:
    """Return the plan of `replicas` pipelines of the same cuts; stage s of pipeline r is on rank r * len(cuts) + s.

    cuts: the first layer of each stage. units: of the whole step. Raises CapslogError as `Plan`.
    """
    stages = stages_of_pipelines(num_layers, cuts, replicas, units.blocks or replicas)
    return Plan(num_layers, stages, units, schedule)


def pipelines_of(plan: Plan) -> tuple[tuple[int, ...], int] | None:
    """Return the cuts and the number of the plan's equal pipelines; None for any other plan."""
    if plan.actions is not None or plan.variants or plan.routes != "relay":
        return None
    stages = tuple(dataclasses.replace(stage, bytes=None, seconds=None) for stage in plan.stages)
    firsts = [stage.first for stage in stages]
    replicas = firsts.count(0)
    cuts = firsts[: len(firsts) // max(1, replicas)]
    if cuts[:1] != [0] or cuts != sorted(set(cuts)) or (plan.units.blocks or replicas) % replicas:
        return None
    expected = plan_of_pipelines(plan.num_layers, cuts, replicas, plan.units)
    return (tuple(cuts), replicas) if stages == expected.stages else None
