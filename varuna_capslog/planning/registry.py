"""All planners by name: what each takes, chooses and is good for, and how it answers a `Problem`.

The help of the command, the table of `docs/planners.md`, `compare`, what goes with elastic runs and every refusal are
made of this table.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config import defaults
from varuna_capslog.memory import AUTO, NEVER
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.planners import BUDGET, JOINT, MADPIPE
from varuna_capslog.planners.joint import Device, JointPlan, NoFleet, best_fleet, best_fleet_of_run
from varuna_capslog.planning.cuts import cut_plan
from varuna_capslog.planning.layerwise import layerwise_plan
from varuna_capslog.planning.placed.equal_pipelines import equal_pipelines_plan
from varuna_capslog.planning.placed.graphs import faster_plan
from varuna_capslog.planning.placed.periodic import periodic_plan
from varuna_capslog.planning.placed.replicated import replicated_plan
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.verdict import judge
from varuna_capslog.planning.wider import LOOPED
from varuna_capslog.plans.parts import Shortfall
from varuna_capslog.plans.plan import Plan

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config

__all__ = ["NOT_ASKED_ANEW", "REGISTRY", "Planner", "planner_named"]

NOT_ASKED_ANEW = "is not asked anew after a membership change; choose planner budget, throughput or exact"
"""Why an elastic run refuses a planner."""


@dataclass(frozen=True)
class Planner:
    """One planner.

    Attributes:
        name: as `pipeline.planner` has it.
        takes: fields of a profile, in words.
        chooses: what of a plan, in words.
        good_for: whom, in words.
        source: who published it.
        answer: from a problem to its plan; judged where it is one of cuts, else not yet.
        shape: "cuts" (one stage per device), "intervals" (and what becomes of each layer), "stages" (on any devices, of
            all that there are), or "pipelines" (of any length).
        elastic: it may be asked anew after a change of the members.
        weighed_up_to: layers x devices up to which planner `budget` weighs its answer as well; 0: never.
        long_search: it takes most of a minute, so that it is asked by name only.
    """

    name: str
    takes: str
    chooses: str
    good_for: str
    source: str
    answer: Callable[[Problem], Plan]
    shape: str = "cuts"
    elastic: bool = False
    weighed_up_to: int = 0
    long_search: bool = False

    def check_memory(self, memory: str) -> None:
        """Raises CapslogError for a memory model that does not know the planner's plans."""
        plans = {
            "intervals": f"the plans of planner {self.name!r} have memory intervals",
            "stages": f"in the plans of planner {self.name!r} ranks may have several stages, and stages several ranks",
        }
        if self.shape in plans and memory not in (AUTO, RANKS):
            raise CapslogError(
                f"memory is {memory!r}, but {plans[self.shape]}, whose bytes only memory model {RANKS!r} knows; choose "
                f"{RANKS} or auto"
            )

    def check(self, config: Config) -> None:
        """Raises CapslogError for a run that the planner cannot plan, by the key that says so."""
        pipeline, schedule = config.pipeline, config.pipeline.schedule
        if pipeline.cuts is not None or pipeline.plan is not None:
            return
        budget, free = self.name == BUDGET, self.shape in ("stages", "pipelines")
        self.check_memory(pipeline.memory)
        goes_round = budget and schedule == LOOPED and not config.elastic.enabled
        rounds_fit = self.shape == "cuts" or (goes_round and pipeline.rounds == defaults.STAGES_PER_RANK)
        rules = {
            f"engine={config.engine}": (
                config.engine == "varuna" and self.shape != "cuts",
                "Varuna runs equal pipelines without memory intervals; set engine=capslog",
            ),
            f"pipeline.replicas={pipeline.replicas}": (
                pipeline.replicas > 1 and self.shape in ("intervals", "stages") and not budget,
                "it shares all devices out itself; set replicas=1 and devices to all of them"
                if free
                else "it plans one pipeline; set replicas=1, or choose planner budget",
            ),
            f"pipeline.stages_per_rank={pipeline.rounds}": (
                pipeline.rounds > 1 and not rounds_fit,
                "it says itself how many stages a rank has; set 1" if free else "it plans one stage per rank; set 1",
            ),
            f"pipeline.schedule={schedule}": (
                schedule == "1f1b-star" and self.shape != "cuts" and not budget,
                "the limits of that schedule follow from cuts that are known; choose 1f1b",
            ),
            f"pipeline.speeds={pipeline.speeds}": (
                pipeline.speeds is not None and self.name not in (BUDGET, JOINT, "throughput"),
                "it takes all devices to be as fast; choose planner budget, throughput or joint",
            ),
            "elastic.enabled=true": (
                config.elastic.enabled and not self.elastic,
                f"it {NOT_ASKED_ANEW}",
            ),
        }
        for key, (wrong, why_not) in rules.items():
            if wrong:
                raise CapslogError(f"pipeline.planner={self.name} does not go with {key}: {why_not}")


def planner_named(name: str) -> Planner:
    """The planner of this name. Raises CapslogError for an unknown one, with the nearest name."""
    fields.refuse_unknown([name], list(REGISTRY), "planner")
    return REGISTRY[name]


def _budget(problem: Problem) -> Plan:
    """A line of stages with memory intervals, or stages with branches and replicas where these are faster."""
    until = None if problem.search_seconds is None else time.perf_counter() + problem.search_seconds
    plan = equal_pipelines_plan(problem)
    if problem.pipelines > 1 or problem.speeds is not None:
        return plan
    return faster_plan(problem, plan, until)


def _joint(problem: Problem) -> Plan:
    """Pipelines of any length; where none fits, the smallest-peak pipeline, which says what it lacks."""
    devices = [Device(device.capacity_bytes, device.speed or 1.0) for device in problem.devices]
    run = problem.run.settled()
    if problem.blocks_open:
        size = problem.profile.conditions.get("microbatch_size", 1)
        fleet = best_fleet(problem.profile, devices, run.microbatches * size, None, run, problem.memory, problem.link)
    else:
        fleet = best_fleet_of_run(problem.profile, devices, run, problem.memory, problem.link)
    return fleet.plan if isinstance(fleet, JointPlan) else _smallest_peak(problem, fleet)


def _smallest_peak(problem: Problem, fleet: NoFleet) -> Plan:
    """The smallest-peak pipeline over as many devices as there are layers, and what it lacks."""
    profile, blocks = problem.profile, fleet.run.num_blocks
    used = sorted(fleet.devices, key=lambda device: device.capacity or NEVER, reverse=True)[: profile.num_layers]
    sizes = [device.capacity or NEVER - 1 for device in used]
    one = Problem.of(profile, len(used), sizes, fleet.run, problem.link, memory=fleet.memory)
    plan = cut_plan(one, "exact")
    if plan.fits:
        # it lacks the gradients of a second block, which the planner of one pipeline does not know
        usable = [NEVER if device.capacity is None else Headroom.of(profile).usable(device.capacity) for device in used]
        verdict = judge(fleet.stage_bytes(plan.cut_list), usable, Headroom())
        assert verdict is not None
        lack = f"stage {verdict.worst} needs {format_bytes(verdict.lacking)} more for the gradients that wait"
        note = f"does not fit: {lack} until all {blocks} accumulation blocks are added; use 1 block"
        shortfall = Shortfall(verdict.worst, max(1, verdict.lacking))
        plan = dataclasses.replace(plan, fits=False, shortfall=shortfall, notes=(note,))
    return dataclasses.replace(plan, planner=JOINT)


def _by(planner: str, answer: Callable[[Problem, str], Plan]) -> Callable[[Problem], Plan]:
    return functools.partial(answer, planner=planner)  # type: ignore[call-arg]


def _cuts(name: str, takes: str, good_for: str, source: str, **more: object) -> Planner:
    return Planner(name, takes, "cuts", good_for, source, _by(name, cut_plan), **more)  # type: ignore[arg-type]


def _stages(name: str, takes: str, chooses: str, good_for: str, source: str, weighed_up_to: int) -> Planner:
    answer = periodic_plan if name == MADPIPE else _by(name, replicated_plan)
    return Planner(name, takes, chooses, good_for, source, answer, "stages", weighed_up_to=weighed_up_to)


_OURS = "this project"
_PUBLISHED = "comparison with a published planner"
_SECONDS = "seconds, bytes"
_GRAPH = "seconds, tensors; bytes under a capacity"
_TREATED = "cuts, memory intervals"

_PLANNERS = (
    Planner(
        BUDGET,
        "seconds, bytes; tensors for branches",
        "stages, also with branches and replicas, memory intervals, schedule, accumulation blocks; says a bound",
        "the fastest step that fits: the default",
        _OURS,
        _budget,
        "intervals",
        elastic=True,
    ),
    _cuts("exact", "bytes", "the smallest peak; profiles without seconds", _OURS, elastic=True, weighed_up_to=64),
    _cuts("throughput", _SECONDS, "the fastest cuts that fit where no layer is treated by itself", _OURS, elastic=True),
    Planner(
        JOINT,
        _SECONDS,
        "pipelines of unequal length, cuts, shares of the blocks",
        "any number of devices, also unlike ones; elastic runs",
        _OURS,
        _joint,
        "pipelines",
        elastic=True,
        weighed_up_to=1024,
    ),
    _cuts("capslog", "bytes", "comparison: fill-first cuts", "CAPSlog", elastic=True, weighed_up_to=64),
    _cuts("capslog-tb", "bytes", "comparison: the same with a tie-breaker", "CAPSlog", elastic=True, weighed_up_to=64),
    _cuts("mcap-bf", "bytes", "comparison: every cut list", "mCAP", weighed_up_to=32),
    _cuts("mcap-bo", "bytes", "comparison: Bayesian optimisation over cut lists", "mCAP", long_search=True),
    _cuts("varuna", "nothing", "comparison: as many layers on each device", "Varuna", elastic=True, weighed_up_to=64),
    _cuts("gpipe", "seconds", "comparison: seconds balanced, whatever fits", "torchgpipe", weighed_up_to=64),
    _cuts("gpipe-size", "bytes", "comparison: bytes balanced, whatever fits", "torchgpipe", weighed_up_to=64),
    _stages("pipedream", _SECONDS, "cuts, and replicas of every stage", _PUBLISHED, "PipeDream, Sec. 3.1", 1024),
    _stages(
        "graphpipe",
        _GRAPH,
        "stages of a graph, branches side by side, replicas of every stage",
        "models with branches; numbers of devices that no line of stages uses well",
        "GraphPipe, with stages across branches added",
        128,
    ),
    _stages("piper", _GRAPH, "convex stages, and their replicas", _PUBLISHED, "Piper, Sec. 4", 128),
    _stages(
        "capture",
        _SECONDS,
        "cuts, and replicas in powers of two, node by node",
        "the smallest peak where stages may have replicas; nodes of several devices",
        "CAPTURE, Sec. III",
        64,
    ),
    Planner(
        "dawnpiper",
        _SECONDS,
        _TREATED,
        _PUBLISHED,
        "DawnPiper, Sec. 4",
        _by("dawnpiper", layerwise_plan),
        "intervals",
        weighed_up_to=128,
    ),
    Planner(
        "vpipe", _SECONDS, _TREATED, _PUBLISHED, "vPipe", _by("vpipe", layerwise_plan), "intervals", weighed_up_to=128
    ),
    _stages(
        MADPIPE,
        _SECONDS,
        "stages, of which a rank may have several, and when each of their calls starts",
        "devices that no cuts of the chain load evenly; slow links",
        "MadPipe, with exact labels for its grid",
        32,
    ),
)

REGISTRY = {planner.name: planner for planner in _PLANNERS}
"""Every planner, in the order in which `compare` shows and `budget` weighs them."""
