"""Memory treatment of each stage's layers under a plan, and its cost in seconds against keeping everything.

`capslog plan` prints it. Both steps are played by `simulation`: the plan's own, and that of the same stages under the
same schedule which keep all that they save, whether or not that fits a device. Nothing is judged here.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.simulation import Simulation, simulate_plan
from varuna_capslog.plans.parts import PlanStage, ranges_of, with_memory
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, from_strings

__all__ = ["AgainstKeeping", "StageTreatment", "against_keeping", "treatments"]


@dataclass(frozen=True)
class StageTreatment:
    """The layers of a stage as ranges (first, end), by their memory treatment between forward and backward.

    offloaded: layers whose saved activations go to the host tier. inputs_offloaded: layers of `recomputed` whose inputs
        go there.
    moments_away: layers whose optimizer moments wait there between the updates. moments_elsewhere: layers whose moments
        another replica keeps.
    """

    kept: tuple[tuple[int, int], ...]
    recomputed: tuple[tuple[int, int], ...]
    offloaded: tuple[tuple[int, int], ...]
    inputs_offloaded: tuple[tuple[int, int], ...]
    moments_away: tuple[tuple[int, int], ...] = ()
    moments_elsewhere: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class AgainstKeeping:
    """Step of a plan beside the step that keeps everything.

    step, keeping: as they are played. stage_seconds: seconds by which each stage works longer in a step; copies that
    run beside the computation are no work. moved_bytes: bytes that each rank sends to its host tier in a step, and gets
    back; None where they cannot be folded.
    """

    step: Simulation
    keeping: Simulation
    stage_seconds: tuple[float, ...]
    moved_bytes: tuple[int, ...] | None

    @property
    def seconds(self) -> float:
        """Seconds by which the whole step is longer."""
        return _difference(self.step.step_seconds, self.keeping.step_seconds)


def treatments(plan: Plan, run: RunShape, device: str = "cpu") -> list[StageTreatment]:
    """Return the memory treatment of each stage's layers.

    run: decides for stages whose memory the plan leaves open. device: as in `plans.parts.intervals_of`.
    """
    actions = None if plan.actions is None else from_strings(plan.actions)
    return [_treatment(stage) for stage in with_memory(plan.stages, run, actions, device)]


def _treatment(stage: PlanStage) -> StageTreatment:
    kinds = {layer: interval.kind for interval in stage.memory or () for layer in range(interval.first, interval.end)}

    def ranges(*wanted: str | None) -> tuple[tuple[int, int], ...]:
        layers = [layer for layer in stage.numbers if kinds.get(layer) in wanted]
        return tuple(ranges_of(layers)) if layers else ()

    again = "recompute", "recompute+offload"
    gone = [
        tuple(ranges_of(sorted(layers))) if layers else () for layers in (stage.moments_away, stage.moments_elsewhere)
    ]
    return StageTreatment(ranges(None), ranges(*again), ranges("offload"), ranges(again[1]), *gone)


def against_keeping(profile: Profile, plan: Plan, run: RunShape, link: Link | None = None) -> AgainstKeeping | None:
    """The plan's step beside that of the same stages which keep everything; None for a plan with action lists of its
    own, and where a step cannot be played with these seconds.

    Args:
        run: of the whole plan; what the plan leaves open.
        link: between ranks, and to the host tier.
    """
    if plan.actions is not None:
        return None
    stages = tuple(dataclasses.replace(stage, memory=(), moments=()) for stage in plan.stages)
    keeping = dataclasses.replace(plan, stages=stages, fits=None, shortfall=None)
    try:
        play = functools.partial(simulate_plan, profile, recompute=run.recompute, run=run, link=link)
        step = play(plan)
        kept = step if stages == plan.stages else play(keeping)
    except CapslogError:  # no seconds, or no tensors
        return None
    pairs = zip(_work(step, len(stages)), _work(kept, len(stages)), strict=True)
    return AgainstKeeping(step, kept, tuple(_difference(*pair) for pair in pairs), _moved(step))


def _difference(seconds: float, reference: float) -> float:
    """Return seconds - reference; 0 where the sums differ by rounding alone."""
    return 0.0 if abs(seconds - reference) <= 1e-9 * max(seconds, reference) else seconds - reference


def _work(step: Simulation, num_stages: int) -> list[float]:
    """Seconds of the actions of each stage of the plan."""
    seconds = [0.0] * num_stages
    for pipeline in step.pipelines:
        for row in pipeline.timeline.actions:
            for timed in row:
                seconds[pipeline.stages[timed.action.stage]] += timed.end_seconds - timed.start_seconds
    return seconds


def _moved(step: Simulation) -> tuple[int, ...] | None:
    moved: dict[int, int] = {}
    for pipeline in step.pipelines:
        if pipeline.folds is None:
            return None
        moved |= {rank: fold.moved_bytes for rank, fold in zip(pipeline.ranks, pipeline.folds, strict=True)}
    return tuple(moved.get(rank, 0) for rank in range(max(moved) + 1))
