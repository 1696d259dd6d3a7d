"""Table of all planners by name: texts for people, runs that each can plan, and the function that answers a `Problem`.
The command's help, `docs/planners.md`, `compare`, elastic runs and error messages use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config import defaults

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.planning.problem import Problem
    from varuna_capslog.plans.plan import Plan

__all__ = ["NOT_ASKED_ANEW", "REGISTRY", "Planner", "planner_named"]

BUDGET, RANKS, LOOPED = defaults.FASTEST, "ranks", "interleaved"

NOT_ASKED_ANEW = "is not asked anew after a membership change; choose planner budget, throughput or exact"
"""Reason why an elastic run refuses a planner, for the error message."""


@dataclass(frozen=True)
class Planner:
    """Planner: its texts for people, the function that searches, and the runs that it can plan.

    name: as in `pipeline.planner`.
    takes, chooses, good_for, source: in words: fields of a profile, parts of a plan, its use, the publication.
    search: "module:function" below `planning`, (problem, planner's name) -> plan; imported on demand, since it needs
        numpy, which a command's help does without.
    shape: "cuts" (one stage per device), "intervals" (the same with memory intervals), "stages" (placed freely on all
        devices), or "pipelines" (of any length).
    elastic: may plan again after a membership change.
    quick_up_to: largest layers x devices at which its search takes about a second at most, so that `compare` and
        `budget` call the planner even if the user does not name it; None: any size; 0: never.
    """

    name: str
    takes: str
    chooses: str
    good_for: str
    source: str
    search: str
    shape: str = "cuts"
    elastic: bool = False
    quick_up_to: int | None = None

    def is_quick(self, problem: Problem) -> bool:
        """Return True where the search of this problem is short enough for an unnamed planner (`quick_up_to`)."""
        return self.quick_up_to is None or problem.profile.num_layers * problem.width <= self.quick_up_to

    def answer(self, problem: Problem) -> Plan:
        """Return the planner's plan, judged where its shape is "cuts". Raises CapslogError for data that the profile
        lacks, and for a problem that the planner cannot search.
        """
        module, _, function = self.search.partition(":")
        plan: Plan = getattr(import_module(f"varuna_capslog.planning.{module}"), function)(problem, self.name)
        return plan

    def check_memory(self, memory: str) -> None:
        """Raise CapslogError for a memory model that cannot compute the bytes of the planner's plans."""
        plans = {
            "intervals": f"the plans of planner {self.name!r} have memory intervals",
            "stages": f"stages of planner {self.name!r} have several replicas",
        }
        if self.name == "madpipe":
            plans["stages"] = f"ranks of planner {self.name!r} may have several stages"
        if self.shape in plans and memory not in (defaults.MEMORY, RANKS):
            raise CapslogError(
                f"memory is {memory!r}, but {plans[self.shape]}, whose bytes only memory model {RANKS!r} knows; choose "
                f"{RANKS} or auto"
            )

    def check(self, config: Config) -> None:
        """Raise CapslogError for a run that the planner cannot plan, naming the key."""
        pipeline, schedule = config.pipeline, config.pipeline.schedule
        if pipeline.cuts is not None or pipeline.plan is not None:
            return
        budget, free = self.name == BUDGET, self.shape in ("stages", "pipelines")
        self.check_memory(pipeline.memory)
        goes_round = budget and schedule == LOOPED and not config.elastic.enabled
        count = pipeline.stages_per_rank
        rounds_fit = self.shape == "cuts" or (goes_round and count in (None, defaults.STAGES_PER_RANK))
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
            f"pipeline.stages_per_rank={pipeline.rounds if count is None else count}": (
                pipeline.rounds > 1 and not rounds_fit,
                "it says itself how many stages a rank has; set 1" if free else "it plans one stage per rank; set 1",
            ),
            f"pipeline.schedule={schedule}": (
                schedule == "1f1b-star" and self.shape != "cuts" and not budget,
                "the limits of that schedule follow from cuts that are known; choose 1f1b",
            ),
            f"pipeline.speeds={pipeline.speeds}": (
                pipeline.speeds is not None and self.name not in (BUDGET, "joint", "throughput"),
                "it takes all devices to be as fast; choose planner budget, throughput or joint",
            ),
            "elastic.enabled=true": (
                config.elastic.enabled and not self.elastic,
                f"it {NOT_ASKED_ANEW}",
            ),
            f"pipeline.stages_per_rank={count} and elastic.enabled=true": (
                config.elastic.enabled and isinstance(count, (str, list)),
                "the number of devices changes; set one number",
            ),
        }
        for key, (wrong, why_not) in rules.items():
            if wrong:
                raise CapslogError(f"pipeline.planner={self.name} does not go with {key}: {why_not}")


def planner_named(name: str) -> Planner:
    """Return the planner of this name. Raises CapslogError for an unknown name, and suggests the nearest."""
    fields.refuse_unknown([name], list(REGISTRY), "planner")
    return REGISTRY[name]


def _cuts(
    name: str,
    takes: str,
    good_for: str,
    source: str,
    elastic: bool = False,
    quick_up_to: int | None = None,
) -> Planner:
    return Planner(name, takes, "cuts", good_for, source, "cuts:cut_plan", "cuts", elastic, quick_up_to)


def _stages(
    name: str, takes: str, chooses: str, good_for: str, source: str, quick_up_to: int, search: str | None = None
) -> Planner:
    search = search or "placed.replicated:replicated_plan"
    return Planner(name, takes, chooses, good_for, source, search, "stages", quick_up_to=quick_up_to)


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
        "placed.whole_runs:budget_plan",
        "intervals",
        elastic=True,
    ),
    _cuts("exact", "bytes", "the smallest peak; profiles without seconds", _OURS, elastic=True),
    _cuts("throughput", _SECONDS, "the fastest cuts that fit where no layer is treated by itself", _OURS, elastic=True),
    Planner(
        "joint",
        _SECONDS,
        "pipelines of unequal length, cuts, shares of the blocks",
        "any number of devices, also unlike ones; elastic runs",
        _OURS,
        "placed.whole_runs:joint_plan",
        "pipelines",
        elastic=True,
        quick_up_to=1024,
    ),
    _cuts("capslog", "bytes", "comparison: fill-first cuts", "CAPSlog", elastic=True),
    _cuts("capslog-tb", "bytes", "comparison: the same with a tie-breaker", "CAPSlog", elastic=True),
    _cuts("mcap-bf", "bytes", "comparison: every cut list", "mCAP", quick_up_to=384),
    _cuts("mcap-bo", "bytes", "comparison: Bayesian optimisation over cut lists", "mCAP", quick_up_to=0),
    _cuts("varuna", "nothing", "comparison: as many layers on each device", "Varuna", elastic=True),
    _cuts("gpipe", "seconds", "comparison: seconds balanced, whatever fits", "torchgpipe"),
    _cuts("gpipe-size", "bytes", "comparison: bytes balanced, whatever fits", "torchgpipe"),
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
        "fastest:layerwise_plan",
        "intervals",
        quick_up_to=512,
    ),
    Planner("vpipe", _SECONDS, _TREATED, _PUBLISHED, "vPipe", "fastest:layerwise_plan", "intervals", quick_up_to=512),
    _stages(
        "madpipe",
        _SECONDS,
        "stages, of which a rank may have several, and when each of their calls starts",
        "devices that no cuts of the chain load evenly; slow links",
        "MadPipe, with exact labels for its grid",
        32,
        "placed.periodic:periodic_plan",
    ),
)

REGISTRY = {planner.name: planner for planner in _PLANNERS}
"""All planners, in the order in which `compare` lists them and `budget` calls them."""
