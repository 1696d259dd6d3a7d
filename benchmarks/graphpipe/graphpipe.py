"""Simulates GraphPipe's evaluation: its three models at 4 to 32 devices, compared with PipeDream's and Piper's plans.

Plans are searched with every microbatch size of a sweep, as in the paper, and the fastest simulated step counts. Prints
the tables of README.md; `--search`, `--steps`, `--branches` and `--case` choose among them.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from models import MINIBATCH, MODELS, candle_uno, case_study

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.replicas import REPLICATED, GraphCosts, ReplicatedStage
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.placed.replicated import plan_of_stages, replicated_plan
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

CAPACITY = 16 << 30
"""A V100's."""
LINK = Link(12.5e9, 10e-6)
"""100 Gb/s InfiniBand."""
MOST_MICROBATCHES, FEWEST_PER_DEVICE = 128, 1
PRINTED = {
    "MMT": {4: (0.12, 2.57, 52.9), 8: (0.76, 11.9, 126), 16: (3.00, 44.3, 304), 32: (10.11, 151, 745)},
    "DLRM": {4: (0.33, 6.39, None), 8: (2.73, 31.3, None), 16: (13.28, 131, None), 32: (54.6, 505, None)},
    "CANDLE-Uno": {4: (0.19, 3.84, None), 8: (1.43, 17.0, None), 16: (6.14, 66.1, None), 32: (22.37, 234, None)},
}
"""Search seconds of Table 3.1: GraphPipe, PipeDream, Piper."""


class Answer(NamedTuple):
    """Fastest plan over the microbatch sizes: its step, its microbatch, its stages, and the seconds of all searches."""

    step: float
    samples: int
    stages: int
    depth: int
    search: float
    plan: Plan | None


def sizes(minibatch: int, devices: int) -> Iterator[int]:
    """Yield microbatch sizes: powers of two up to the largest, with at least one microbatch for every device."""
    size = max(1, minibatch // MOST_MICROBATCHES)
    while minibatch // size >= FEWEST_PER_DEVICE * devices:
        yield size
        size *= 2


def by_bound(model: Callable[[int], Profile], minibatch: int, devices: int) -> list[tuple[int, Profile, float]]:
    """Return microbatch sizes with their profiles, sorted by a lower bound of the step: the work shared evenly."""
    rows = []
    for samples in sizes(minibatch, devices):
        profile = model(samples)
        work = sum(layer.forward_seconds + layer.backward_seconds for layer in profile.layers)  # type: ignore[operator]
        rows.append((samples, profile, work * (minibatch // samples) / devices))
    return sorted(rows, key=lambda row: row[2])


def run_of(minibatch: int, samples: int) -> RunShape:
    return RunShape(minibatch // samples, "1f1b", False, microbatch_size=samples)


def fits(profile: Profile, plan: Plan) -> bool:
    """Return True where static bytes and the activations in flight stay within the capacity in the simulated step."""
    step = simulate_plan(profile, plan, link=LINK)
    for part in step.pipelines:
        for row, ids in zip(part.timeline.actions, part.stage_of_row, strict=True):
            for number in ids:
                stage = plan.stages[part.stages[number]]
                calls, most = 0, 0
                for timed in row:
                    if timed.action.stage == number and timed.action.kind in "FB":
                        calls += 1 if timed.action.kind == "F" else -1
                        most = max(most, calls)
                layers = [profile.layers[layer] for layer in stage.numbers]
                held = sum((layer.static_bytes or 0) + most * (layer.saved_bytes or 0) for layer in layers)
                if held > CAPACITY:
                    return False
    return True


def best(model: Callable[[int], Profile], minibatch: int, devices: int, planner: str) -> Answer:
    """Return a planner's fastest plan that fits, over all microbatch sizes."""
    answer, spent = Answer(float("inf"), 0, 0, 0, 0.0, None), 0.0
    for samples, profile, least in by_bound(model, minibatch, devices):
        if least >= answer.step:
            break
        run = run_of(minibatch, samples)
        begun = time.process_time()
        try:
            plan = replicated_plan(Problem.of(profile, devices, CAPACITY, run, LINK), planner)
        except CapslogError:
            return Answer(float("inf"), 0, 0, 0, 0.0, None)
        spent += time.process_time() - begun
        assert plan.step_seconds is not None
        if plan.step_seconds < answer.step and fits(profile, plan):
            depth = max(plan.stage_graph(profile.edges).depths)
            answer = Answer(plan.step_seconds, samples, len({stage.layers for stage in plan.stages}), depth, 0.0, plan)
    return answer._replace(search=spent)


def as_line(profile: Profile, stages: list[ReplicatedStage]) -> tuple[Profile, list[ReplicatedStage]]:
    """Return the profile with its layers in the order of the stages, each of which becomes one range: Piper's stages
    are one sequential pipeline.
    """
    order = [layer for stage in stages for layer in stage.layers]
    place = {layer: number for number, layer in enumerate(order)}
    last = profile.num_layers
    tensors = [
        dataclasses.replace(
            tensor,
            writer=None if tensor.writer is None else place[tensor.writer],
            readers=tuple(sorted(place.get(reader, last) for reader in tensor.readers)),
        )
        for tensor in profile.tensors
    ]
    rows = [
        dataclasses.replace(
            profile.layers[layer],
            added_bytes=0 if number else None,
            boundary_bytes=sum(
                tensor.bytes
                for tensor in tensors
                if tensor.writer is not None and tensor.writer <= number < tensor.readers[-1]
            ),
        )
        for number, layer in enumerate(order)
    ]
    moved = [ReplicatedStage(tuple(sorted(place[layer] for layer in stage.layers)), stage.replicas) for stage in stages]
    return dataclasses.replace(profile, layers=tuple(rows), tensors=tuple(tensors)), moved


def best_line_of_piper(model: Callable[[int], Profile], minibatch: int, devices: int) -> Answer:
    """Return the fastest of Piper's plans as one sequential pipeline, as published."""
    answer, spent = Answer(float("inf"), 0, 0, 0, 0.0, None), 0.0
    for samples, profile, least in by_bound(model, minibatch, devices):
        if least >= answer.step:
            break
        run = run_of(minibatch, samples)
        costs = GraphCosts.of_profile(profile, devices, run.microbatches, CAPACITY, None, LINK)
        begun = time.process_time()
        try:
            answers = REPLICATED["piper"](costs)
        except CapslogError:
            return answer
        spent += time.process_time() - begun
        if not answers:
            continue
        line, stages = as_line(profile, answers[0])
        units = Units(run.microbatches, samples, 1)
        frame = Plan(line.num_layers, (PlanStage(((0, line.num_layers),), (0,)),), units, "1f1b")
        blocks = run.microbatches if any(stage.replicas > 1 for stage in stages) else 1
        plan = plan_of_stages(frame, stages, blocks, None)
        step = simulate_plan(line, plan, link=LINK).step_seconds
        if step < answer.step and fits(line, plan):
            answer = Answer(step, samples, len(stages), len(stages), 0.0, plan)
    return answer._replace(search=spent)


def text(seconds: float | None, digits: int = 3) -> str:
    return "-" if seconds is None or seconds == float("inf") else f"{seconds:.{digits}f}"


def show(answer: Answer) -> str:
    if answer.plan is None:
        return "-"
    return f"{answer.step:.3f} ({answer.samples}; {answer.stages}/{answer.depth})"


def steps_and_searches(piper: bool) -> None:
    """Print the table of every model and number of devices."""
    names = (
        "graphpipe",
        "pipedream",
        "piper",
        "speed-up",
        "search",
        "printed",
        "pipedream",
        "printed",
        "piper",
        "printed",
    )
    print("| model | devices |", " | ".join(names), "|")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name, model in MODELS.items():
        for devices, minibatch in MINIBATCH[name].items():
            ours = best(model, minibatch, devices, "graphpipe")
            theirs = best(model, minibatch, devices, "pipedream")
            third = best_line_of_piper(model, minibatch, devices) if piper else theirs._replace(plan=None)
            printed = PRINTED[name][devices]
            print(
                f"| {name} | {devices} | {show(ours)} | {show(theirs)} | {show(third)} "
                f"| {theirs.step / ours.step:.2f} | {ours.search:.3f} | {printed[0]} | {theirs.search:.3f} "
                f"| {printed[1]} | {text(third.search if third.plan else None)} | {printed[2] or '✗'} |",
                flush=True,
            )


def branches() -> None:
    """Print the table of CANDLE-Uno with 2 to 16 branches at 4, 8 and 16 devices (Fig. 3.7, left)."""
    print("| branches | devices | graphpipe | pipedream | speed-up |\n|---|---|---|---|---|")
    for count in (2, 4, 8, 16):
        for devices in (4, 8, 16):
            minibatch = MINIBATCH["CANDLE-Uno"][devices]
            rows = [
                best(lambda samples: candle_uno(samples, count), minibatch, devices, name)  # noqa: B023
                for name in ("graphpipe", "pipedream")
            ]
            print(
                f"| {count} | {devices} | {show(rows[0])} | {show(rows[1])} | {rows[1].step / rows[0].step:.2f} |",
                flush=True,
            )


def case() -> None:
    """Print two branches of four blocks on eight devices, one stage each, at several numbers of microbatches."""
    print("| microbatches | line of 8 | branches | gain |\n|---|---|---|---|")
    profile = case_study(2)
    stages = [ReplicatedStage((layer,)) for layer in range(7)] + [ReplicatedStage((7, 8))]
    for count in (8, 16, 32, 64):
        steps = {}
        for routes in ("relay", "direct"):
            frame = Plan(9, (PlanStage(((0, 9),), (0,)),), Units(count, 2, 1), "1f1b", routes=routes)
            plan = plan_of_stages(frame, stages, 1, profile.edges)
            steps[routes] = simulate_plan(profile, plan, link=LINK).step_seconds
        gain = steps["relay"] / steps["direct"] - 1
        print(f"| {count} | {steps['relay']:.3f} | {steps['direct']:.3f} | {100 * gain:.1f} % |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--without-piper", action="store_true", help="leave out Piper, which takes minutes")
    parser.add_argument("--only", choices=["steps", "branches", "case"], help="one of the tables")
    args = parser.parse_args()
    if args.only in (None, "steps"):
        steps_and_searches(not args.without_piper)
    if args.only in (None, "branches"):
        branches()
    if args.only in (None, "case"):
        case()


if __name__ == "__main__":
    main()
