"""The plan: where a chain is cut into stages, where they run, and what they are predicted to cost.

Planners make plans, the engine, the simulator and the command line read them; this module is their one text form and
their one validator. A run's folder has a file plan-<generation>.json for each plan that the run has had. This module
decides nothing and never imports torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from varuna_capslog.base import fields, files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.profiles.record import check_parallel

__all__ = ["Plan", "PlanStage", "Shortfall", "latest_plan", "plan_path", "read_plan", "write_plan"]

FORMAT = "varuna-capslog/plan/1"

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Shortfall:
    """Why a plan does not fit: the stage that lacks most bytes, their number, and how many devices would be enough.

    `devices_that_fit` is None where no number of devices up to one per layer would.
    """

    stage: int
    bytes: int
    devices_that_fit: int | None = None

    def __post_init__(self) -> None:
        _set(self, "stage", fields.whole(self.stage, "stage"))
        _set(self, "bytes", fields.whole(self.bytes, "bytes", minimum=1))
        _check_optional(self, "devices_that_fit", fields.whole, minimum=1)


@dataclass(frozen=True)
class PlanStage:
    """One stage of the full form: its pipeline, its layers as (first, end) pieces, `end` not included, and its ranks.

    `parallel` is the kind and degree of parallelism inside the stage (as many ranks as its degree); `memory_actions`
    maps a layer to "recompute" or "offload"; `bytes` and `seconds` are predictions.
    """

    pipeline: int
    layers: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    parallel: Mapping[str, Any] = field(default_factory=lambda: {"kind": "none", "degree": 1})
    memory_actions: Mapping[str, str] = field(default_factory=dict)
    microbatch_size: int | None = None
    bytes: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        _set(self, "pipeline", fields.whole(self.pipeline, "pipeline"))
        pieces = tuple(fields.interval(piece, "layers") for piece in fields.listed(self.layers, "layers"))
        if not pieces or any(a[1] > b[0] for a, b in pairwise(pieces)):
            raise CapslogError("layers must hold one or more pieces [first, end] in rising order that do not overlap")
        _set(self, "layers", pieces)
        ranks = tuple(fields.whole(rank, "ranks") for rank in fields.listed(self.ranks, "ranks"))
        _set(self, "ranks", ranks)
        _set(self, "parallel", check_parallel(self.parallel))
        if len(set(ranks)) != len(ranks) or len(ranks) != self.parallel["degree"]:
            degree = self.parallel["degree"]
            raise CapslogError(
                f"ranks is {list(ranks)}; it must hold {degree} different rank(s), as parallel.degree says"
            )
        if not isinstance(self.memory_actions, Mapping):
            raise CapslogError("memory_actions must be an object that maps layers to recompute or offload")
        for layer, action in self.memory_actions.items():
            fields.choice(action, f"memory_actions[{layer!r}]", ("recompute", "offload"))
        _check_optional(self, "microbatch_size", fields.whole, minimum=1)
        _check_optional(self, "bytes", fields.whole)
        _check_optional(self, "seconds", fields.seconds)


@dataclass(frozen=True)
class Plan:
    """A plan; the fields are those of the file, in its order. Only the number of layers and the cuts must be there.

    cuts: the first layer of each stage of pipeline 0, beginning with 0.
    stage_bytes, peak_bytes, stage_seconds: predictions for one step; None where no memory model describes the schedule.
    capacity_bytes: None, one number for all devices, or one per device.
    fits: None where unknown; shortfall only where it is False.
    placed: the full form's stages (key "stages"); None means stage s on rank s.
    notes: sentences for people about what could not be predicted; not part of the file.

    Every instance is valid: the constructor raises CapslogError otherwise.
    """

    planner: str | None = field(default=None, kw_only=True)
    memory_model: str | None = field(default=None, kw_only=True)
    model: str | None = field(default=None, kw_only=True)
    profile_digest: str | None = field(default=None, kw_only=True)
    num_layers: int
    cuts: tuple[int, ...]
    schedule: str | None = None
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    stage_bytes: tuple[int, ...] | None = None
    peak_bytes: int | None = None
    stage_seconds: tuple[float, ...] | None = None
    capacity_bytes: int | tuple[int, ...] | None = None
    fits: bool | None = None
    shortfall: Shortfall | None = None
    search_seconds: float | None = None
    placed: tuple[PlanStage, ...] | None = None
    microbatches_of_pipeline: tuple[tuple[int, ...], ...] | None = None
    actions: tuple[tuple[str, ...], ...] | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        _set(self, "num_layers", fields.whole(self.num_layers, "num_layers", minimum=1))
        _set(self, "cuts", fields.cut_list(self.cuts, self.num_layers))
        for name in ("planner", "memory_model", "model", "profile_digest", "schedule"):
            _check_optional(self, name, fields.text)
        for name in ("num_microbatches", "microbatch_size"):
            _check_optional(self, name, fields.whole, minimum=1)
        _check_optional(self, "search_seconds", fields.seconds)
        self._check_costs()
        self._check_fit()
        self._check_full_form()
        self._check_ranks()

    def stages(self, pipeline: int = 0) -> list[tuple[int, int]]:
        """Return the layers (first, end) of each stage of a pipeline, `end` not included.

        Raises CapslogError where a stage holds several pieces of the chain, or where there is no such pipeline.
        """
        stages = enumerate(self._pipeline(pipeline))
        return [
            _only(one.layers, f"stage {number} holds {len(one.layers)} pieces of the chain") for number, one in stages
        ]

    def placement(self, pipeline: int = 0) -> list[int]:
        """Return the rank that runs each stage of a pipeline; stage s on rank s in the short form.

        Raises CapslogError where several ranks share a stage, or where there is no such pipeline.
        """
        stages = enumerate(self._pipeline(pipeline))
        return [_only(one.ranks, f"stage {number} runs on {len(one.ranks)} ranks") for number, one in stages]

    def capacities_of(self, ranks: Iterable[int]) -> list[int] | None:
        """Return the bytes of these ranks' devices; None where there is no limit, or none is known for one of them."""
        if not isinstance(self.capacity_bytes, tuple):
            return None if self.capacity_bytes is None else [self.capacity_bytes for _ in ranks]
        asked = list(ranks)
        return [self.capacity_bytes[rank] for rank in asked] if max(asked) < len(self.capacity_bytes) else None

    @property
    def num_pipelines(self) -> int:
        """How many pipelines the plan describes; 1 in the short form."""
        return 1 if self.placed is None else 1 + max(stage.pipeline for stage in self.placed)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form: the short one, with the full form's keys where they are set."""
        short = {name: _plain(getattr(self, name)) for name in _SHORT_KEYS}
        full = {key: _plain(getattr(self, name)) for key, name in _FULL_FORM.items() if getattr(self, name) is not None}
        return {"format": FORMAT} | short | full

    @classmethod
    def from_json(cls, value: Any, where: str = "plan") -> Plan:
        """Return the plan that a JSON value holds. Raises CapslogError that begins with `where` and names the field."""
        return fields.within(where, lambda: cls(**_parts(value)))

    def _pipeline(self, pipeline: int) -> list[PlanStage]:
        if not 0 <= pipeline < self.num_pipelines:
            raise CapslogError(f"pipeline {pipeline} is not in the plan, which has {self.num_pipelines}")
        if self.placed is not None:
            return [stage for stage in self.placed if stage.pipeline == pipeline]
        ends = (*self.cuts[1:], self.num_layers)
        return [PlanStage(0, (piece,), (rank,)) for rank, piece in enumerate(zip(self.cuts, ends, strict=True))]

    def _check_costs(self) -> None:
        # Predicted bytes may be below 0, because M_a may be; a model's answer is not changed here.
        whole = partial(fields.whole, minimum=None)
        for name, check in (("stage_bytes", whole), ("stage_seconds", fields.seconds)):
            if (costs := getattr(self, name)) is not None:
                costs = tuple(check(cost, f"{name}[{i}]") for i, cost in enumerate(fields.listed(costs, name)))
                if len(costs) != len(self.cuts):
                    raise CapslogError(f"{name} has {len(costs)} entries, but there are {len(self.cuts)} stages")
                _set(self, name, costs)
        if self.peak_bytes is not None:
            _set(self, "peak_bytes", whole(self.peak_bytes, "peak_bytes"))
            if self.stage_bytes is not None and self.peak_bytes != max(self.stage_bytes):
                raise CapslogError(
                    f"peak_bytes is {self.peak_bytes}, but the largest of stage_bytes is {max(self.stage_bytes)}"
                )

    def _check_fit(self) -> None:
        if isinstance(self.capacity_bytes, (list, tuple)):
            rows = enumerate(self.capacity_bytes)
            capacities = tuple(fields.whole(row, f"capacity_bytes[{i}]", minimum=1) for i, row in rows)
            if self.placed is None and len(capacities) != len(self.cuts):
                raise CapslogError(
                    f"capacity_bytes has {len(capacities)} entries, but there are {len(self.cuts)} devices"
                )
            _set(self, "capacity_bytes", capacities)
        else:
            _check_optional(self, "capacity_bytes", fields.whole, minimum=1)
        if self.fits is not None and not isinstance(self.fits, bool):
            raise CapslogError(f"fits is {self.fits!r}; it must be true, false or null")
        if self.shortfall is not None:
            if self.fits is not False:
                raise CapslogError("shortfall is given, but fits is not false")
            if self.shortfall.stage >= len(self.cuts):
                raise CapslogError(
                    f"shortfall.stage is {self.shortfall.stage}, but the last stage is {len(self.cuts) - 1}"
                )

    def _check_full_form(self) -> None:
        if self.placed is not None:
            _set(self, "placed", tuple(fields.listed(self.placed, "stages")))
            if not self.placed:
                raise CapslogError("stages is empty; leave it out for one stage per rank")
            for pipeline in range(self.num_pipelines):
                pieces = [piece for stage in self._pipeline(pipeline) for piece in stage.layers]
                _check_cover(pieces, self.num_layers, f"the stages of pipeline {pipeline}")
            first = [stage.layers for stage in self._pipeline(0)]
            if all(len(pieces) == 1 for pieces in first) and tuple(pieces[0][0] for pieces in first) != self.cuts:
                raise CapslogError("stages of pipeline 0 do not begin where cuts says; make the two agree")
        if self.microbatches_of_pipeline is not None:
            groups = [
                tuple(
                    fields.whole(number, "microbatches_of_pipeline")
                    for number in fields.listed(group, "microbatches_of_pipeline")
                )
                for group in fields.listed(self.microbatches_of_pipeline, "microbatches_of_pipeline")
            ]
            together = sorted(number for group in groups for number in group)
            if len(groups) != self.num_pipelines or together != list(range(self.num_microbatches or len(together))):
                raise CapslogError(
                    "microbatches_of_pipeline must give each microbatch to exactly one of the plan's pipelines"
                )
            _set(self, "microbatches_of_pipeline", tuple(groups))
        if self.actions is not None:
            rows = enumerate(fields.listed(self.actions, "actions"))
            actions = [
                tuple(fields.text(a, f"actions[{i}]") for a in fields.listed(row, f"actions[{i}]")) for i, row in rows
            ]
            _set(self, "actions", tuple(actions))

    def _check_ranks(self) -> None:
        """Refuse `fits` where the stages of one rank together are said to hold more than its device has."""
        if not self.fits or self.capacity_bytes is None:
            return
        stages_of: dict[int, list[int]] = {}
        held: dict[int, int] = {}
        for pipeline in range(self.num_pipelines):
            for number, stage in enumerate(self._pipeline(pipeline)):
                size = stage.bytes
                if size is None and pipeline == 0 and number < len(self.stage_bytes or ()):
                    size = (self.stage_bytes or ())[number]
                for rank in stage.ranks:
                    stages_of.setdefault(rank, []).append(number)
                    held[rank] = held.get(rank, 0) + (size or 0)
        for rank, size in held.items():
            limits = self.capacities_of([rank])
            if limits is not None and size > limits[0]:
                raise CapslogError(
                    f"fits is true, but rank {rank} has {limits[0]} bytes of capacity and its stage(s) "
                    f"{', '.join(map(str, stages_of[rank]))} hold {size} together; plan again, or set fits to false"
                )


_FULL_FORM = {
    "stages": "placed",
    "microbatches_of_pipeline": "microbatches_of_pipeline",
    "actions": "actions",
}
"""The keys of the full form, which a file has only where they are set, and their fields."""

_SHORT_KEYS = [one.name for one in dataclasses.fields(Plan) if one.compare and one.name not in _FULL_FORM.values()]


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file, short or full form. Raises CapslogError naming the file and the field."""
    return Plan.from_json(files.read_json(path), where=str(path))


def write_plan(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write a plan file atomically."""
    files.write_json(path, plan.to_json())


def plan_path(run_dir: Path, generation: int) -> Path:
    """The file that holds the plan of a generation."""
    return run_dir / f"plan-{generation}.json"


def latest_plan(run_dir: Path) -> tuple[int, Plan] | None:
    """Generation and plan of a run's newest plan file, or None where there is none yet."""
    names = [path.stem.removeprefix("plan-") for path in run_dir.glob("plan-*.json")]
    newest = max((int(name) for name in names if name.isdigit()), default=None)
    return None if newest is None else (newest, read_plan(plan_path(run_dir, newest)))


def _check_cover(pieces: list[tuple[int, int]], num_layers: int, what: str) -> None:
    """Refuse pieces of the chain that do not hold every layer exactly once."""
    reached = 0
    for first, end in sorted(pieces):
        if first != reached:
            kind = "twice" if first < reached else "nowhere"
            raise CapslogError(f"{what} hold layer {min(first, reached)} {kind}; each layer must be in one stage")
        reached = end
    if reached != num_layers:
        raise CapslogError(f"{what} end at layer {reached}, but there are {num_layers} layers")


def _parts(value: Any) -> dict[str, Any]:
    """The constructor's arguments from a JSON value."""
    if not isinstance(value, Mapping):
        raise CapslogError("a JSON object is needed; is this a plan?")
    if value.get("format") != FORMAT:
        raise CapslogError(f"format is {value.get('format')!r}; this version reads {FORMAT!r}")
    fields.refuse_unknown(value, ["format", *_SHORT_KEYS, *_FULL_FORM])
    for name in ("num_layers", "cuts"):
        if name not in value:
            raise CapslogError(f"field {name!r} is missing")
    parts = {name: item for name, item in value.items() if name not in ("format", "stages")}
    if parts.get("shortfall") is not None:
        parts["shortfall"] = fields.build(Shortfall, parts["shortfall"], "shortfall")
    if value.get("stages") is not None:
        rows = enumerate(fields.listed(value["stages"], "stages"))
        parts["placed"] = tuple(fields.build(PlanStage, row, f"stages[{i}]") for i, row in rows)
    return parts


def _only(entries: Sequence[Entry], what: str) -> Entry:
    if len(entries) != 1:
        raise CapslogError(f"{what}; one is needed here")
    return entries[0]


def _plain(value: Any) -> Any:
    """A value as JSON has it: records as objects, tuples as lists."""
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _set(record: Any, name: str, value: Any) -> None:
    object.__setattr__(record, name, value)


def _check_optional(record: Any, name: str, check: Callable[..., Any], **rules: Any) -> None:
    """Put the checked value of a field in its place; None stays None."""
    if (value := getattr(record, name)) is not None:
        _set(record, name, check(value, name, **rules))
