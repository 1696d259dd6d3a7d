"""Compares random valid plans with one rank and one stage without recomputation, bit for bit.

Losses, norms, gradients, weights and statistics are compared. Every plan is written as a file, read again and turned
into the engine's layout, as a training run does it. The models are those of the tests: a small chain with frozen
layers, dropout, BatchNorm and a parameter that three layers share, DETR in three layouts, a captured GPT-2 with split
layers, and three graphs: two towers, an Inception block, and decoders that all read the encoder. Graphs have direct
routes half of the time, with stages of any layers that can be put in an order, and grains where nothing forbids them;
then the one rank has a stage for every layer, of the same grain, and gradients are compared with plain autograd as
well. Prints the table of README.md; exit status 1 where a bit differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engine import cases, detr, models
from tests.engine.compare import differences, gradient_error
from tests.engine.layouts import Cuts, random_layout, round_layout, with_intervals
from tests.engine.pool import WorkerPool
from varuna_capslog.config.reading import Config, section
from varuna_capslog.engine.layout import Layout, layout_of
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan, read_plan, write_plan
from varuna_capslog.schedules import SCHEDULES

KEEPS = {"schedule": "1f1b", "recompute": False}
GRAPHS = models.GRAPHS | models.SPLIT
UNITS = {"tiny": (4, 2), **dict.fromkeys(detr.MODELS, (4, 2)), **dict.fromkeys(GRAPHS, (8, 2))}
"""Microbatches of a step, and samples of one as far as the plan says it."""
JOINS = {"towers": {7}}
"""Layers whose result depends on which samples are together."""


@functools.cache
def layers_of(model: str) -> tuple[int, tuple[tuple[int, int], ...] | None]:
    """Return a model's number of layers, and its edges if plans may have direct routes. Not computed when this file is
    imported: every rank imports it, and captures would run backwards before the rank has set its threads.
    """
    if model == "tiny":
        return 11, None
    chain = GRAPHS[model].build_chain() if model in GRAPHS else detr.build(model)[1]
    return len(chain), chain.edges if model in GRAPHS or model.startswith("split") else None


def through_a_file(layout: Layout, schedule: str, model: str, folder: Path) -> Layout:
    """Write the layout to a plan file, and return the layout that the engine reads from it."""
    count, samples = UNITS[model]
    units, routes = Units(count, samples, layout.num_blocks), "direct" if layout.direct else "relay"
    plan = Plan(layers_of(model)[0], layout.stages, units, schedule, routes=routes)
    write_plan(folder / "plan.json", plan)
    train = {"minibatch_size": count * samples, "microbatch_size": samples, "accumulation_blocks": layout.num_blocks}
    values = {"workload": "a.b:c", "train": train, "pipeline": {"schedule": schedule}}
    return layout_of(read_plan(folder / "plan.json"), section(Config, values, ""))


def drawn(draw: random.Random, model: str, blocks: int, ranks: int, schedule: str) -> Layout:
    """Draw a layout with memory intervals; gpipe has no limits in flight, since it holds all microbatches."""
    num_layers, edges = layers_of(model)
    edges = edges if edges is not None and draw.random() < 0.5 else None
    layout = random_layout(draw.randrange(1 << 30), num_layers, blocks, ranks, edges)
    if schedule in ("gpipe", "kfkb"):
        stages = tuple(dataclasses.replace(stage, in_flight=None) for stage in layout.stages)
        layout = dataclasses.replace(layout, stages=stages)
    return with_intervals(layout, draw.randrange(1 << 30))


def of_chunks(draw: random.Random, model: str, blocks: int, ranks: int) -> Layout:
    """Draw uneven chunks on every rank, half of the time with memory intervals."""
    layout = round_layout(draw.randrange(1 << 30), layers_of(model)[0], blocks, ranks)
    return with_intervals(layout, draw.randrange(1 << 30)) if draw.random() < 0.5 else layout


def grained(draw: random.Random, model: str, layout: Layout) -> Layout:
    """Draw a grain for every stage of the layout, where a single way through the stages fixes those of the layers."""
    if model not in ("towers", "translation") or len(layout.ways) > 1 or draw.random() < 0.5:
        return layout
    of_block, stages = UNITS[model][0] // layout.num_blocks, []
    for stage in layout.stages:
        grain = draw.choice([size for size in (1, 2, 4, 8) if of_block % size == 0])
        grain = 1 if JOINS.get(model, set()) & set(stage.numbers) else grain
        stages.append(dataclasses.replace(stage, grain=grain, in_flight=None))
    return dataclasses.replace(layout, stages=tuple(stages))


def by_layers(layout: Layout) -> Layout | Cuts:
    """Return a layout on one rank without recomputation: one stage, or a stage per layer where a grain is above 1."""
    grains = {layer: stage.grain for stage in layout.stages for layer in stage.numbers}
    if set(grains.values()) == {1}:
        return Cuts((0,), (0,))
    stages = (PlanStage(((layer, layer + 1),), (0,), grain=grains[layer]) for layer in range(layout.num_layers))
    return Layout(tuple(stages), layout.num_blocks)


@functools.cache
def plain(model: str) -> dict[str, torch.Tensor]:
    """Return the gradients of a graph's first step by plain autograd."""
    graph = GRAPHS[model]
    chain = graph.build_chain(dropout=0.0)
    minibatch, inputs = graph.make_minibatch(UNITS[model][0], 1, even=True)
    models.plain_step(chain, minibatch, inputs, seed=7, step=1, loss=graph.loss)
    return {name: p.grad for name, p in chain.named_parameters().items() if p.grad is not None}


def run(
    pool: WorkerPool, model: str, layout: Layout | Cuts, options: dict[str, Any], shapes: detr.Shapes | None = None
) -> list[dict[str, Any]]:
    """Run the layout. shapes: tensor shapes at a DETR's cuts; None: traced, which takes longer than the step."""
    if model == "tiny":
        return pool.run(cases.train, layout.world_size, layout, options, 2, torch.float32, None, "reordered")
    if model in GRAPHS:
        even = "even" if isinstance(layout, Layout) and any(stage.grain > 1 for stage in layout.stages) else None
        options = options | {"num_microbatches": UNITS[model][0]}
        return pool.run(cases.train, layout.world_size, layout, options, 2, torch.float32, even, "reordered", model)
    return pool.run(detr.step, layout.world_size, model, layout, options, shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=8, help="most ranks of a plan")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", help="draw for this model alone; may be given several times")
    parser.add_argument("--chunks", action="store_true", help="schedule interleaved, several chunks on every rank")
    arguments = parser.parse_args()
    pool, draw, began = WorkerPool(), random.Random(arguments.seed), time.perf_counter()
    names = arguments.only or ["tiny", "tiny", *detr.MODELS, *GRAPHS, *models.GRAPHS]
    oracles: dict[object, dict[str, Any]] = {}
    shapes = ("several stages on a rank", "several ways", "a rank on several ways", "direct", "pieces", "grains")
    counts = dict.fromkeys(("plans", *shapes, "recompute", "offload", "differ"), 0)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(arguments.plans):
                model, blocks = draw.choice(names), draw.choice([1, 2, 4])
                if arguments.chunks:
                    schedule, layout = "interleaved", of_chunks(draw, model, blocks, arguments.ranks)
                else:
                    schedule = draw.choice(SCHEDULES)
                    layout = drawn(draw, model, blocks, draw.randint(1, arguments.ranks), schedule)
                    layout = grained(draw, model, layout)
                layout = through_a_file(layout, schedule, model, Path(folder))
                alone = by_layers(layout)
                key = (model, blocks, None if isinstance(alone, Cuts) else tuple(stage.grain for stage in alone.stages))
                if key not in oracles:
                    oracles[key] = run(pool, model, alone, KEEPS | {"num_blocks": blocks})[0]
                wrong = differences(
                    run(pool, model, layout, {"schedule": schedule, "num_blocks": blocks}, oracles[key].get("shapes")),
                    oracles[key],
                )
                grains = any(stage.grain > 1 for stage in layout.stages)
                if grains and gradient_error(oracles[key]["gradients"], plain(model))[0] > 1e-5:
                    wrong.append("plain autograd")
                counts["plans"] += 1
                counts["direct"] += layout.direct
                counts["pieces"] += any(len(stage.layers) > 1 for stage in layout.stages)
                counts["grains"] += grains
                rank_stages = [layout.stages_of(rank) for rank in range(layout.world_size)]
                counts["several stages on a rank"] += any(len(stages) > 1 for stages in rank_stages)
                kinds = [{interval.kind for interval in stage.memory or ()} for stage in layout.stages]
                counts["recompute"] += any(kind.startswith("recompute") for row in kinds for kind in row)
                counts["offload"] += any(stage.offloads for stage in layout.stages)
                counts["several ways"] += len(layout.ways) > 1
                counts["a rank on several ways"] += len(layout.ways) > 1 and any(
                    sum(bool(set(stages) & set(way)) for way in layout.ways) > 1 for stages in rank_stages
                )
                if wrong:
                    counts["differ"] += 1
                    print(f"plan {number} ({model}, {schedule}, {layout}) differs in {wrong[:5]}", flush=True)
                elif sys.stderr.isatty() or number % 25 == 24:
                    print(f"{number + 1} of {arguments.plans}", file=sys.stderr, flush=True)
    finally:
        pool.close()
    print("| " + " | ".join(counts) + " | seconds |")
    print("|---" * (len(counts) + 1) + "|")
    print("| " + " | ".join(map(str, counts.values())) + f" | {time.perf_counter() - began:.0f} |")
    raise SystemExit(counts["differ"] > 0)


if __name__ == "__main__":
    main()
