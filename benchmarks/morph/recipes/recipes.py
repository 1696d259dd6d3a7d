"""Optimizers, schedules, averages and parameter groups over one sequence of cut lists, replicas, morphs and crashes.

For every recipe one elastic run goes through the same changes: five members, a leave to two replicas of two stages, a
SIGKILL there, a leave, a join, a SIGKILL of one of three and one of the last two. Nothing is read from a checkpoint.
The run is then compared with one process without faults: every loss, gradient norm and tensor bit by bit.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))

from equality import BLOCKS, compare
from live import HERE, Clock, Live, append_result
from live import main as marked

LAYOUTS = {5: ((0, 2, 4, 6, 8), 1), 4: ((0, 6), 2), 3: ((0, 3, 7), 1), 2: ((0, 4), 1), 1: ((0,), 1)}
"""Cuts and replicas by the number of members."""

COURSE = ("leave", "kill", "leave", "join", "kill", "kill")
"""Changes from five members to 4 (replicas), 3, 2, 3, 2, 1."""

MINE = "own_optimizer:Mine"

OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": ("optimizer_args={betas: [0.8, 0.95], amsgrad: true}",),
    "adam": (),
    "sgd": ("optimizer_args={momentum: 0.9, nesterov: true}", "lr=0.01"),
    "nadam": (),
    "rmsprop": ("optimizer_args={momentum: 0.5, centered: true}",),
    "adagrad": (),
    "adafactor": (),
    MINE: ("lr=0.01",),
}

SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("lr_schedule=linear", "lr_decay_steps=25", "lr_final_factor=0.1"),
    "cosine": ("lr_schedule=cosine", "lr_decay_steps=25"),
    "drops": ("lr_drop_steps=7", "lr_drop_factor=0.5"),
}

EMAS: dict[str, tuple[str, ...]] = {
    "none": (),
    "0.95": ("ema=0.95",),
    "0.99, warm-up": ("ema=0.99", "ema_warmup_steps=20"),
}

GROUPS: dict[str, tuple[str, ...]] = {
    "none": (),
    "no decay on vectors": ("parameter_groups=[{vectors: true, weight_decay: 0}]",),
    "and rates by pattern": (
        "parameter_groups=[{vectors: true, weight_decay: 0}, {match: 'block.*', lr_factor: 0.5}]",
        "lr_multipliers={head: 2.0}",
    ),
}


def recipes(all_pairs: bool) -> list[tuple[str, str, str, str]]:
    """Return recipes by name: every optimizer with every schedule, or each optimizer with two of them.

    Averages and groups take turns, so that each of them is combined with every schedule.
    """
    chosen = []
    for number, (optimizer, schedule) in enumerate(itertools.product(OPTIMIZERS, SCHEDULES)):
        row, column = divmod(number, len(SCHEDULES))
        if all_pairs or (row + column) % 2 == 0:
            ema, groups = list(EMAS)[(row + 2 * column) % 3], list(GROUPS)[(row + column + 1) % 3]
            chosen.append((optimizer, schedule, ema, groups))
    return chosen


def overrides_of(recipe: tuple[str, str, str, str]) -> list[str]:
    optimizer, schedule, ema, groups = recipe
    settings = (*OPTIMIZERS[optimizer], *SCHEDULES[schedule], *EMAS[ema], *GROUPS[groups])
    return [f"train.optimizer={optimizer}", *(f"train.{key}" for key in settings)]


def main(arguments: Sequence[str]) -> int:
    """Entry point of a member, whose layouts are those above."""
    from varuna_capslog.elastic.member.pipeline_work import PipelineWork
    from varuna_capslog.plans.parts import Units
    from varuna_capslog.plans.plan import plan_of_pipelines

    class Led(PipelineWork):
        def place(self, seats, plan=None):  # type: ignore[no-untyped-def]
            if seats and plan is None:
                cuts, replicas = LAYOUTS[len(seats)]
                run = self.placer.candidates.run
                units = Units(run.num_microbatches, run.microbatch_size, run.num_blocks)
                plan = plan_of_pipelines(len(self.chain), cuts, replicas, units, run.schedule)
            return self.placer(seats, plan)

    return marked(arguments, Led)


def alone(config: Path, overrides: Sequence[str], folder: Path) -> None:
    """Run the same training in this process, without changes or faults."""
    import torch

    from varuna_capslog.config.reading import load_config
    from varuna_capslog.engine.communicator import connect_group
    from varuna_capslog.model.workload import load_workload
    from varuna_capslog.plans.plan import latest_plan
    from varuna_capslog.start.prepare import prepare_run
    from varuna_capslog.training.run import Run

    torch.set_num_threads(1)
    keys = [f"run_dir={folder}", "elastic.enabled=false", "pipeline.devices=1", "pipeline.cuts=[0]"]
    settings = load_config(config, [*keys, *overrides])
    prepare_run(settings, show=False)
    planned = latest_plan(folder)
    assert planned is not None
    communicator = connect_group(torch.distributed.HashStore(), "alone", 0, 1)
    run = Run(settings, planned[1], load_workload(settings), communicator, torch.device("cpu"))
    run.train()
    run.loop.close()


def led(recipe: tuple[str, str, str, str], config: Path, dice: random.Random, more: Sequence[str]) -> dict[str, Any]:
    """Run one recipe through the changes; return what differs from the run of one process."""
    overrides = [f"train.accumulation_blocks={BLOCKS}", "train.weight_decay=0.1", *overrides_of(recipe), *more]
    layouts, changes = [], []
    with tempfile.TemporaryDirectory(prefix="capslog-recipes-") as holder:
        folder, truth = Path(holder) / "led", Path(holder) / "alone"
        with Live(config, overrides, 5, "recipes:main", folder) as live:
            count, newest = 5, live.wait_steps(5, 4, 400)
            layouts.append(LAYOUTS[count])
            for kind in COURSE:
                if kind == "join":
                    live.join()
                elif kind == "leave":
                    live.leave(dice.choice(live.members))
                else:
                    live.kill(dice.choice(live.members))
                count += 1 if kind == "join" else -1
                newest = live.wait_steps(count, 3 + dice.randint(0, 2), 400, after=newest)
                layouts.append(LAYOUTS[count])
                changes.append(kind)
            live.host.stop()
            live._thread.join(60)
            steps = max(mark.step for mark in live.marks())
            read = [path for path in (folder / "checkpoints").glob("step-*") if int(path.name[5:]) < steps]
        alone(config, [*overrides, f"train.max_steps={steps}"], truth)
        return {
            "recipe": recipe,
            "cut_lists": len({cuts for cuts, _ in layouts}),
            "replicas": max(replicas for _, replicas in layouts),
            "leaves": changes.count("leave"),
            "joins": changes.count("join"),
            "kills": changes.count("kill"),
            "earlier_checkpoints": len(read),
            **compare(folder, truth),
        }


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", action="store_true", help="every optimizer with every schedule: 32 recipes, not 16")
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of some, from 0")
    parser.add_argument("--minutes", type=float, default=0.0, help="and no more than fit into so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=HERE / "small.yaml")
    parser.add_argument("overrides", nargs="*", help="of the config's keys, for all recipes")
    args = parser.parse_args()
    dice, clock, rows = random.Random(args.seed), Clock(args.minutes), []
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    chosen = recipes(args.every)
    for number in args.only or range(len(chosen)):
        if clock.over:
            break
        rows.append(led(chosen[number], args.config, dice, args.overrides))
        append_result("recipes", {"overrides": args.overrides, "seed": args.seed, **rows[-1]})
    if any(row["losses_that_differ"] or row["tensors_that_differ"] or row["earlier_checkpoints"] for row in rows):
        raise SystemExit("not equal")


if __name__ == "__main__":
    run()
