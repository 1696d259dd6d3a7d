"""Random valid plans against one rank and one stage that keeps everything, bit for bit.

Losses, norms, gradients, weights and statistics are compared. Every plan is written as a file, read again and turned
into the engine's layout, as a training run does it. The models are those of the tests: a small chain with frozen
layers, dropout, BatchNorm and a parameter that three layers share, and DETR in three layouts. Prints the table of
README.md; exit status 1 where a bit differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engine import cases, detr
from tests.engine.compare import merged
from tests.engine.layouts import Cuts, random_layout, with_intervals
from tests.engine.pool import WorkerPool
from varuna_capslog.config.reading import Config, section
from varuna_capslog.engine.layout import Layout, layout_of
from varuna_capslog.plans.parts import Units
from varuna_capslog.plans.plan import Plan, read_plan, write_plan
from varuna_capslog.schedules import SCHEDULES

KEEPS = {"schedule": "1f1b", "recompute": False}
KINDS = ("gradients", "state", "buffers")
LENGTHS = {"tiny": 11, **{name: len(detr.build(name)[1]) for name in detr.MODELS}}
UNITS = {"tiny": (4, 2), **dict.fromkeys(detr.MODELS, (4, 2))}
"""Microbatches of a step, and samples of one as far as the plan says it."""


def through_a_file(layout: Layout, schedule: str, model: str, folder: Path) -> Layout:
    """The layout that the engine makes of a plan file which says this layout."""
    count, samples = UNITS[model]
    plan = Plan(LENGTHS[model], layout.stages, Units(count, samples, layout.num_blocks), schedule)
    write_plan(folder / "plan.json", plan)
    train = {"minibatch_size": count * samples, "microbatch_size": samples, "accumulation_blocks": layout.num_blocks}
    values = {"workload": "a.b:c", "train": train, "pipeline": {"schedule": schedule}}
    return layout_of(read_plan(folder / "plan.json"), section(Config, values, ""))


def drawn(draw: random.Random, model: str, blocks: int, ranks: int, schedule: str) -> Layout:
    """A random layout with memory intervals; gpipe holds all microbatches, whatever limits in flight would say."""
    layout = random_layout(draw.randrange(1 << 30), LENGTHS[model], blocks, ranks)
    if schedule in ("gpipe", "kfkb"):
        stages = tuple(dataclasses.replace(stage, in_flight=None) for stage in layout.stages)
        layout = dataclasses.replace(layout, stages=stages)
    return with_intervals(layout, draw.randrange(1 << 30))


def run(pool: WorkerPool, model: str, layout: Layout | Cuts, options: dict[str, Any]) -> list[dict[str, Any]]:
    if model == "tiny":
        return pool.run(cases.train, layout.world_size, layout, options, 2, torch.float32, None, "reordered")
    return pool.run(detr.step, layout.world_size, model, layout, options)


def differences(results: list[dict[str, Any]], alone: dict[str, Any]) -> list[str]:
    """What is not the same bit for bit."""
    found = [name for name in ("parts", "norms", "norm", "loss") for one in results if one.get(name) != alone.get(name)]
    for kind in (kind for kind in KINDS if kind in alone):
        ours = merged(results, kind)
        found += [f"{kind} {name}" for name in alone[kind].keys() ^ ours.keys()]
        found += [f"{kind} {n}" for n, tensor in alone[kind].items() if n in ours and not torch.equal(ours[n], tensor)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=8, help="most ranks of a plan")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    pool, draw, began = WorkerPool(), random.Random(arguments.seed), time.perf_counter()
    models = ["tiny", "tiny", "tiny", *detr.MODELS]
    oracles: dict[tuple[str, int], dict[str, Any]] = {}
    shapes = ("several stages on a rank", "several ways", "a rank on several ways")
    counts = dict.fromkeys(("plans", *shapes, "recompute", "offload", "differ"), 0)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(arguments.plans):
                model, blocks = draw.choice(models), draw.choice([1, 2, 4])
                schedule = draw.choice(SCHEDULES)
                layout = drawn(draw, model, blocks, draw.randint(1, arguments.ranks), schedule)
                layout = through_a_file(layout, schedule, model, Path(folder))
                key = (model, blocks)
                if key not in oracles:
                    oracles[key] = run(pool, model, Cuts((0,), (0,)), KEEPS | {"num_blocks": blocks})[0]
                wrong = differences(
                    run(pool, model, layout, {"schedule": schedule, "num_blocks": blocks}),
                    oracles[key],
                )
                counts["plans"] += 1
                own = [layout.stages_of(rank) for rank in range(layout.world_size)]
                counts["several stages on a rank"] += any(len(stages) > 1 for stages in own)
                kinds = [{one.kind for one in stage.memory or ()} for stage in layout.stages]
                counts["recompute"] += any(kind.startswith("recompute") for row in kinds for kind in row)
                counts["offload"] += any(stage.offloads for stage in layout.stages)
                counts["several ways"] += len(layout.ways) > 1
                counts["a rank on several ways"] += len(layout.ways) > 1 and any(
                    sum(bool(set(stages) & set(way)) for way in layout.ways) > 1 for stages in own
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
