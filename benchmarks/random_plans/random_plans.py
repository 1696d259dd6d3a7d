"""Random valid plans against one rank and one stage: losses, norms, gradients, weights and statistics, bit for bit.

Every plan is written as a file, read again and turned into the engine's layout, as a training run does it. The models
are those of the tests: a small chain with frozen layers, dropout, BatchNorm and a parameter that three layers share,
and DETR in three layouts. Prints the table of README.md; exit status 1 where a bit differs.
"""

from __future__ import annotations

import argparse
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
from tests.engine.layouts import Cuts, random_layout
from tests.engine.pool import WorkerPool
from varuna_capslog.config.reading import Config, section
from varuna_capslog.engine.layout import Layout, layout_of
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units
from varuna_capslog.plans.plan import Plan, read_plan, write_plan

KINDS = ("gradients", "state", "buffers")
LENGTHS = {"tiny": 11, **{name: len(detr.build(name)[1]) for name in detr.MODELS}}
UNITS = {"tiny": (4, 2), **dict.fromkeys(detr.MODELS, (4, 2))}
"""Microbatches of a step, and samples of one as far as the plan says it."""


def through_a_file(layout: Layout, schedule: str, recompute: bool, model: str, folder: Path) -> Layout:
    """The layout that the engine makes of a plan file which says this layout."""
    count, samples = UNITS[model]
    stages = tuple(
        PlanStage(
            ((one.first, one.end),),
            (one.rank,),
            one.blocks,
            in_flight=one.in_flight,
            memory=(MemoryInterval(one.first, one.end, "recompute"),) if recompute else (),
        )
        for one in layout.stages
    )
    plan = Plan(LENGTHS[model], stages, Units(count, samples, layout.num_blocks), schedule)
    write_plan(folder / "plan.json", plan)
    train = {"minibatch_size": count * samples, "microbatch_size": samples, "accumulation_blocks": layout.num_blocks}
    pipeline = {"schedule": schedule, "recompute": recompute}
    config = section(Config, {"workload": "a.b:c", "train": train, "pipeline": pipeline}, "")
    return layout_of(read_plan(folder / "plan.json"), config)


def run(pool: WorkerPool, model: str, layout: Layout | Cuts, options: dict[str, Any]) -> list[dict[str, Any]]:
    if model == "tiny":
        return pool.run(cases.train, layout.world_size, layout, options, 2)
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
    counts = {"plans": 0, "several stages on a rank": 0, "several ways": 0, "a rank on several ways": 0, "differ": 0}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(arguments.plans):
                model, blocks = draw.choice(models), draw.choice([1, 2, 4])
                schedule, recompute = draw.choice([("1f1b", False), ("1f1b", True), ("varuna", True)])
                layout = random_layout(
                    draw.randrange(1 << 30), LENGTHS[model], blocks, draw.randint(1, arguments.ranks)
                )
                layout = through_a_file(layout, schedule, recompute, model, Path(folder))
                key = (model, blocks)
                if key not in oracles:
                    oracles[key] = run(pool, model, Cuts((0,), (0,)), {"num_blocks": blocks})[0]
                wrong = differences(
                    run(pool, model, layout, {"schedule": schedule, "recompute": recompute, "num_blocks": blocks}),
                    oracles[key],
                )
                counts["plans"] += 1
                own = [layout.stages_of(rank) for rank in range(layout.world_size)]
                counts["several stages on a rank"] += any(len(stages) > 1 for stages in own)
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
