"""The plugin's options of this process: `configure` sets them; the patches read them when Varuna is built and trains.

Each rank searches cuts from a profile by itself, in milliseconds and with the same result.
"""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from varuna_capslog import planners
from varuna_capslog.base import fields, units
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.memory import AUTO, MEMORY_MODELS
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.plans.parts import PlanStage
from varuna_capslog.plans.plan import Plan, read_plan
from varuna_capslog.plans.plan_text import plain
from varuna_capslog.profiles.record import Profile, read_profile
from varuna_capslog.varuna_plugin.tracing import Trace, uniform_cuts

__all__ = ["CUTS_VARIABLE", "Options", "Search", "configure", "current", "cuts_of", "parse_cuts"]


# -- The cuts of a plan for Varuna. A plan that sets anything else is refused, with the name of the field.


_SCHEDULE = "varuna"


def cuts_of(plan: Plan) -> tuple[int, ...]:
    """Return the cuts of a plan that Varuna can run: stage i on rank i, in the chain's order, each wholly recomputed.

    Raises CapslogError for any other plan; the message names the field and its value.
    """
    ours = {"schedule": plan.schedule or _SCHEDULE, "routes": plan.routes, "variants": plan.variants}
    theirs: dict[str, tuple[Any, str]] = {
        "schedule": (_SCHEDULE, f"Varuna has a schedule of its own: give {_SCHEDULE}"),
        "routes": ("relay", "Varuna hands tensors from stage to stage: give relay"),
        "variants": ({}, "Varuna runs the layers as they are: leave it out"),
    }
    for name, (runs, advice) in theirs.items():
        if ours[name] != runs:
            raise CapslogError(f"{name} is {plain(ours[name])!r}; {advice}")
    if plan.actions is not None:
        raise CapslogError(f"actions are given for {len(plan.actions)} ranks; Varuna has a schedule of its own")
    begin = 0
    for number, stage in enumerate(plan.stages):
        _check_stage(number, stage, begin)
        begin = stage.end
    return plan.cut_list


def _check_stage(number: int, stage: PlanStage, begin: int) -> None:
    one_piece = len(stage.layers) == 1 and stage.first == begin
    rules = {
        "blocks": (stage.blocks is None, "in Varuna every stage serves all blocks: leave it out"),
        "grain": (stage.grain == 1, "in Varuna all stages take the same microbatches: give 1"),
        "in_flight": (stage.in_flight is None, "Varuna has limits of its own: leave it out"),
        "parallel": (stage.parallel["kind"] == "none", "Varuna does not split layers: leave it out"),
        "layers": (one_piece, f"Varuna's stages follow each other: stage {number} begins with layer {begin}"),
        "ranks": (stage.ranks == (number,), f"Varuna runs stage {number} on rank {number}"),
        "memory": (
            stage.memory is None or (bool(stage.memory) and stage.whole),
            "Varuna recomputes whole stages and does nothing else",
        ),
        "moments": (not stage.moments, "Varuna keeps the optimizer's moments on the device: leave it out"),
    }
    for name, (runs, advice) in rules.items():
        if not runs:
            raise CapslogError(f"stages[{number}].{name} is {plain(getattr(stage, name))}; {advice}")


# -- The user's configuration


_log = logging.getLogger(__name__)

CUTS_VARIABLE = "CAPSLOG_VARUNA_CUTS"
"""Environment variable with a plan file or comma-separated cut list; `launch` sets it, `configure` overrides it."""


class Search:
    """Search of cuts from a profile.

    Args:
        profile: profile of the model's pieces, from `plugin.profile` or `capslog profile`, or its file.
        devices: expected number of stages, for which the constructor searches at once; None: that of Varuna.
        planner, memory: names as for `capslog plan`.
        capacity: bytes of a device, one number for all stages or one each; also as text ("16GiB", "16GiB,8GiB").

    Raises:
        CapslogError: an impossible value.
        DoesNotFit: with `devices`: no cut list keeps within the capacity.
    """

    def __init__(
        self,
        profile: Profile | str | os.PathLike[str],
        devices: int | None = None,
        planner: str = "exact",
        memory: str = AUTO,
        capacity: int | str | Sequence[int] | None = None,
    ) -> None:
        fields.refuse_unknown([planner], planners.PLANNER_NAMES, "planner")
        fields.refuse_unknown([memory], [AUTO, *MEMORY_MODELS], "memory")
        self.profile = profile if isinstance(profile, Profile) else read_profile(profile)
        self.devices, self.planner, self.memory = devices, planner, memory
        self.capacity = units.parse_capacity(capacity) if isinstance(capacity, str) else capacity
        if devices is not None:
            self.plan(devices)

    def check_microbatch(self, size: int) -> None:
        """Raise CapslogError where a capacity is set and microbatches have another size than was profiled."""
        profiled = self.profile.conditions.get("microbatch_size")
        if self.capacity is not None and profiled not in (None, size):
            raise CapslogError(
                f"the profile holds for microbatches of {profiled}, not of {size} (chunk_size), so no capacity can be "
                "promised; profile with that size"
            )

    def plan(self, num_stages: int, num_pieces: int | None = None) -> Plan:
        """Return a plan for this number of stages. num_pieces: the model's number of pieces, where known.

        Raises:
            CapslogError: the profile is of another model or has no bytes, or `devices` is another number.
            DoesNotFit: no cut list keeps within the capacity; names the stage and a sufficient number of devices.
        """
        if num_pieces is not None and num_pieces != self.profile.num_layers:
            raise CapslogError(
                f"the profile is of {self.profile.num_layers} layers, but the model has {num_pieces} pieces "
                f"({num_pieces - 1} CutPoints); profile this model"
            )
        if self.devices is not None and self.devices != num_stages:
            raise CapslogError(
                f"devices={self.devices}, but Varuna was started with {num_stages} stages; start with another "
                "--nstages, or leave devices out"
            )
        plan = solve(Problem.of(self.profile, num_stages, self.capacity, memory=self.memory), self.planner)
        if plan.fits is False:
            raise DoesNotFit("; ".join(plan.notes))
        if plan.fits is None and self.capacity is not None:
            raise CapslogError("; ".join(plan.notes))
        peak = "unknown" if plan.peak_bytes is None else units.format_bytes(plan.peak_bytes)
        _log.info("cuts %s by %s, largest stage %s", list(plan.cut_list), self.planner, peak)
        return plan


@dataclass(frozen=True)
class Options:
    """Values given to `configure`.

    num_pieces: pieces of the model for which `cuts` were planned, where known. search: finds cuts when the number of
    stages is known; `cuts` is None then.
    """

    cuts: tuple[int, ...] | None = None
    num_pieces: int | None = None
    search: Search | None = None
    loss: Literal["mean", "sum"] = "mean"
    timeout: datetime.timedelta = datetime.timedelta(seconds=600)
    stages_of_interest: tuple[int, ...] | None = None
    trace: Trace | None = None

    def cuts_for(self, num_pieces: int, num_stages: int) -> tuple[int, ...]:
        """Return the cut list of a model. Raises CapslogError where the cuts, or the profile, are for another model or
        number of stages, and DoesNotFit where no searched cut list keeps within the capacity.
        """
        if self.search is not None:
            return self.search.plan(num_stages, num_pieces).cut_list
        if self.cuts is None:
            return uniform_cuts(num_pieces, num_stages)
        if self.num_pieces is not None and self.num_pieces != num_pieces:
            raise CapslogError(
                f"the plan is for {self.num_pieces} layers, but the model has {num_pieces} pieces "
                f"({num_pieces - 1} CutPoints); plan again for this model"
            )
        if len(self.cuts) != num_stages:
            raise CapslogError(
                f"cuts={list(self.cuts)} make {len(self.cuts)} stages, but Varuna was started with {num_stages}; plan "
                "for as many devices, or start with another --nstages"
            )
        return self.cuts


_current = Options()
"""Options of the process: Varuna's classes are patched for the whole process, and Varuna's constructor and threads,
which read the options, take no argument of ours."""


def configure(
    cuts: Plan | str | os.PathLike[str] | Sequence[int] | None = None,
    *,
    profile: Profile | str | os.PathLike[str] | None = None,
    stages_of_interest: Sequence[int] | None = None,
    loss: Literal["mean", "sum"] = "mean",
    timeout_seconds: float = 600.0,
    trace: Trace | None = None,
    **search: Any,
) -> None:
    """Set the options of the next Varuna; omitted options return to their defaults.

    Args:
        cuts: a plan, a plan file, or the first piece of each stage (`[0, 3, 7]`: piece i begins behind the i-th
            CutPoint); None: Varuna's uniform split.
        profile: a profile or its file, from which cuts are searched when Varuna is built, in place of `cuts`.
        stages_of_interest: stages that compute; all others hold nothing and pass on dummy tensors of the right shapes,
            so that their ranks can use small devices while these stages are measured. The losses have no meaning.
        loss: "mean" weights each microbatch by its number of samples (the last may be shorter); "sum" adds the losses
            up, for a model that divides by the minibatch's own normalisers.
        timeout_seconds: longest wait for a message, a gradient or the other ranks; then the rank ends with an error.
        trace: trace of the model on inputs of the same sizes; None: rank 0 traces the model when Varuna is built.
        search: with a profile: `devices`, `planner`, `memory` and `capacity`, as in `Search`.

    Raises:
        CapslogError: an impossible value, or a plan that Varuna cannot run.
        DoesNotFit: with `devices`: no cut list keeps within the capacity.
    """
    global _current
    _, *search_options = inspect.signature(Search).parameters.values()
    fields.refuse_unknown(search, [option.name for option in search_options], "option")
    if loss not in ("mean", "sum"):
        raise CapslogError(f"loss={loss!r} is unknown; choose mean or sum")
    if not timeout_seconds > 0:
        raise CapslogError(f"timeout_seconds={timeout_seconds!r} must be above 0")
    first, num_pieces = _cuts(cuts)
    if profile is not None and cuts is not None:
        raise CapslogError("both cuts and a profile to search them from are given; leave one out")
    if profile is None and any(
        option.name in search and search[option.name] != option.default for option in search_options
    ):
        raise CapslogError("devices, planner, memory and capacity belong to a profile, which is not given")
    interest = None
    if stages_of_interest is not None:
        named = fields.listed(stages_of_interest, "stages_of_interest")
        interest = tuple(sorted({fields.whole(stage, "stages_of_interest") for stage in named}))
        if not interest:
            raise CapslogError("stages_of_interest is empty; name at least one stage, or leave it out to run all")
    _current = Options(
        cuts=first,
        num_pieces=num_pieces,
        search=None if profile is None else Search(profile, **search),
        loss=loss,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        stages_of_interest=interest,
        trace=trace,
    )


def current() -> Options:
    """Return the configured options; without cuts or search, with the cuts of `CAPSLOG_VARUNA_CUTS`."""
    cuts = os.environ.get(CUTS_VARIABLE)
    if _current.cuts is not None or _current.search is not None or not cuts:
        return _current
    first, num_pieces = parse_cuts(cuts)
    return dataclasses.replace(_current, cuts=first, num_pieces=num_pieces)


def parse_cuts(text: str) -> tuple[tuple[int, ...] | None, int | None]:
    """Parse cuts from a command line: `0,3,7` or the path of a plan file. Return (cuts, number of pieces or None)."""
    parts = text.split(",")
    if all(part.strip().isdigit() for part in parts):
        return _cuts([int(part) for part in parts])
    return _cuts(text)


def _cuts(cuts: Any) -> tuple[tuple[int, ...] | None, int | None]:
    if cuts is None:
        return None, None
    if isinstance(cuts, (str, os.PathLike)):
        cuts = read_plan(cuts)
    if isinstance(cuts, Plan):
        cuts.check_trains("the plan that is given")
        return cuts_of(cuts), cuts.num_layers
    numbers = tuple(cuts)
    if not numbers or any(isinstance(cut, bool) or not isinstance(cut, int) for cut in numbers):
        raise CapslogError(f"cuts={list(numbers)} must be a plan, a plan file or whole numbers such as [0, 3]")
    return numbers, None
