"""A plan as other systems see it: one pipeline of consecutive stages, and equal copies of it.

All exporters except `torch_csv` start here. Errors name the fields of a plan that other systems do not have.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.names import LayerModules, ModelNames
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, with_memory
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules import RunShape, dealt_out, from_strings

__all__ = [
    "StageLine",
    "check_names",
    "held_modules",
    "memory_of_stages",
    "number_of",
    "refuse_shared",
    "run_of",
    "stage_line",
]


@dataclass(frozen=True)
class StageLine:
    """Pipeline of a plan, and the number of its equal replicas.

    stages: (first layer, layer after the last) of each stage, in the order of layers; the two are equal for a turn in
        which a rank has no stage of the plan.
    ranks: of this pipeline in the plan; stage s runs on ranks[s % len(ranks)].
    """

    stages: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    replicas: int

    @property
    def stages_per_rank(self) -> int:
        """Stages of every rank."""
        return len(self.stages) // len(self.ranks)


def stage_line(
    plan: Plan,
    system: str,
    one_stage_per_rank: bool = False,
    intervals: bool = False,
    empty: bool = False,
    parts: bool = False,
) -> StageLine:
    """Return the pipeline of a plan. Raises CapslogError unless the plan is equal pipelines whose stages go round their
    ranks.

    system: name for messages. one_stage_per_rank: the system runs one stage per rank.
    intervals: the exporter itself writes, or refuses, memory intervals of whole layers; parts: of parts of layers.
    empty: the system takes stages without layers, so that ranks may have unequal numbers of stages in the plan.
    """
    _refuse_fields(plan, system, intervals, parts)
    paths = plan.paths()
    first, *others = [[plan.stages[number] for number in path] for path in paths]
    used = [rank for path in paths for rank in {plan.stages[number].rank for number in path}]
    alike = [(stage.layers, stage.memory) for stage in first]
    shares = {len(blocks) for blocks in paths.values()}
    unequal = any([(stage.layers, stage.memory) for stage in path] != alike for path in others)
    if unequal or len(shares) > 1 or len(set(used)) < len(used):
        raise CapslogError(
            f"the plan has {len(paths)} ways through its stages that are not equal pipelines on ranks of their own, "
            f"but {system} has equal replicas only; export a plan whose replicas have the same cuts, shares and memory"
        )
    pipelines = [_pipeline(path, len(paths), system, empty) for path in (first, *others)]
    line = pipelines[0]
    if any(len(pipeline.ranks) != len(line.ranks) for pipeline in pipelines):
        raise CapslogError(
            f"the plan's pipelines have {sorted({len(pipeline.ranks) for pipeline in pipelines})} ranks, but {system} "
            "has equal replicas only; give every pipeline as many ranks"
        )
    if one_stage_per_rank and line.stages_per_rank > 1:
        raise CapslogError(
            f"each rank runs {line.stages_per_rank} stages, but {system} has one stage per rank; plan with "
            "pipeline.stages_per_rank=1"
        )
    return line


def run_of(plan: Plan, run: RunShape) -> RunShape:
    """Return the run with the schedule that the plan names."""
    return dataclasses.replace(run, schedule=plan.schedule or run.schedule)


def memory_of_stages(plan: Plan, line: StageLine, run: RunShape) -> list[tuple[MemoryInterval, ...]]:
    """Return the memory intervals of each stage of the line. run: for stages whose memory the plan leaves open."""
    actions = None if plan.actions is None else from_strings(plan.actions)
    stages = with_memory(plan.stages, run_of(plan, run), actions)
    intervals = {stage.first: stage.memory or () for stage in stages}  # replicas are equal
    return [intervals[first] for first, _ in line.stages]


def number_of(count: int, noun: str) -> str:
    """Return a count with its noun: 1 layer, 2 layers."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def held_modules(names: ModelNames, plan: Plan, system: str) -> tuple[LayerModules, ...]:
    """Return the modules that each layer holds. Raises CapslogError where only the layers' own names are known."""
    check_names(names, plan)
    if names.predictions:
        raise CapslogError(
            f"what {system} calls the layers for multi-token prediction is not known; plan without them, with "
            "--model-arg num_nextn_predict_layers=0"
        )
    if names.held is None:
        raise CapslogError(
            f"{system} speaks of the model's modules, of which only the names of the layers are known; give the "
            "ordinary module itself with --model PACKAGE.MODULE:FUNCTION, or a run or config that captures one"
        )
    return names.held


def check_names(names: ModelNames, plan: Plan) -> None:
    """Raise CapslogError where the names are those of another model."""
    if len(names.layers) != plan.num_layers:
        raise CapslogError(
            f"the plan has {number_of(plan.num_layers, 'layer')}, but the model has {len(names.layers)}; give the "
            "profile or the model that the plan was made for"
        )


def refuse_shared(names: ModelNames, line: StageLine, system: str) -> None:
    """Raise CapslogError for a parameter that layers of several stages use."""
    for name, layers in names.shared:
        stages = sorted({stage for stage, (a, b) in enumerate(line.stages) if any(a <= layer < b for layer in layers)})
        if len(stages) > 1:
            raise CapslogError(
                f"the parameter {name!r} is used by stages {stages}, but {system} has no parameters that several "
                f"stages share; choose cuts that keep layers {list(layers)} in one stage, or untie the parameter"
            )


def _refuse_fields(plan: Plan, system: str, intervals: bool, parts: bool) -> None:
    if plan.routes != "relay":
        raise CapslogError(
            f"routes is {plan.routes!r}, but in {system} each stage hands on to the next one; export a plan with "
            "routes relay"
        )
    if plan.variants:
        raise CapslogError(f"the plan has variants of layers, which {system} does not know; export one without")
    for number, stage in enumerate(plan.stages):
        where = f"stage {number} ({stage.describe()})"
        if len(stage.ranks) > 1:
            raise CapslogError(
                f"{where} is split by {stage.parallel['kind']}, which the form for {system} cannot say; export a plan "
                f"without splits, and set the degree in {system} itself"
            )
        if stage.grain > 1:
            raise CapslogError(
                f"{where} takes {stage.grain} units in one call, but in {system} all stages take the same microbatch; "
                "export a plan of grain 1"
            )
        if stage.moments:
            raise CapslogError(
                f"{where} keeps the optimizer's moments of some layers elsewhere, which the form for {system} cannot "
                "say; export a plan without moments"
            )
        for interval in stage.memory or ():
            if not (parts if interval.parts else intervals):
                shown = f"[{', '.join(map(str, interval.entries))}]".replace("'", "")
                raise CapslogError(
                    f"{where} has the memory interval {shown}, which the form for {system} cannot say; export a plan "
                    "that keeps everything (pipeline.recompute=false) or leaves memory null"
                )


def _pipeline(path: list[PlanStage], replicas: int, system: str, empty: bool) -> StageLine:
    if any(before.end != after.first for before, after in pairwise(path)):
        raise CapslogError(f"the plan's stages do not follow one another as the layers do, as they must in {system}")
    dealt = dealt_out([stage.rank for stage in path])
    if dealt is None or (None in dealt[1] and not empty):
        raise CapslogError(
            f"the stages run on the ranks {[stage.rank for stage in path]}, but {system} deals them out in turn, "
            "as many to each rank; plan with pipeline.stages_per_rank, or one stage for each rank"
        )
    ranks, places = dealt
    if None in (places[0], places[-1]):
        raise CapslogError(
            f"the stages run on the ranks {[stage.rank for stage in path]}, but {system} begins on the first and "
            f"ends on the last of them; end the plan on rank {ranks[-1]}"
        )
    stages: list[tuple[int, int]] = []
    for place in places:
        behind = stages[-1][1] if stages else 0
        stages.append((behind, behind) if place is None else (path[place].first, path[place].end))
    return StageLine(tuple(stages), tuple(ranks), replicas)
