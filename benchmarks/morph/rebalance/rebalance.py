"""Halves the speed of one of four ranks in the middle of a run, and measures how soon and how well the cuts follow.

The small model with blocks that sleep (`../small.yaml`), `elastic.rebalance=true`. From `--step` on every forward and
backward of one member takes twice as long. Printed: the steps until the new cuts; the step time before, with the slow
member, and afterwards; the step time with the same slow member under the plan searched for known speeds from the
beginning; and whether the losses equal those of one device bit by bit. `--recover`: later the member is fast again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from common import layerwise_plan
from live import HERE, SLEEPING, Clock, Live, append_result, losses, step_ends
from live import main as live_main

from tests.rig.faults import Slowness, slow_down
from varuna_capslog.config.reading import Config, load_config
from varuna_capslog.planning.verdict import with_stage_bytes
from varuna_capslog.plans.plan import Plan, write_plan
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.prepare import profile_run

FAULTS = "faults"
ENTRY = "benchmarks.morph.rebalance.rebalance:member"


def member(arguments: Sequence[str]) -> int:
    """Entry point of a member that may be slowed down."""
    return live_main(arguments, observer=Slowness(Path(arguments[0]) / FAULTS, os.environ["CAPSLOG_MEMBER"]))


def step_seconds(live: Live, first: int, last: int) -> float:
    """Return the median time from the end of one step to that of the next, without changes of generation."""
    ends = step_ends(live.marks())
    seconds = [
        generation[step][1] - generation[step - 1][1]
        for generation in ends.values()
        for step in range(first + 1, last + 1)
        if step in generation and step - 1 in generation
    ]
    return statistics.median(seconds)


def slow_run(
    config: Path, overrides: Sequence[str], rank: int, factor: float, at: int, steps: int, recover: int | None = None
) -> tuple[dict[str, Any], dict[int, float]]:
    """Run four members, one of which is slow from step `at` on (0: from the start); return the result and the losses.

    recover: number of steps after which it is fast again.
    """
    with Live(config, [*overrides, f"train.max_steps={steps}"], 4, ENTRY) as live:
        name = f"h-{rank + 1}"
        if at:
            live.wait_steps(4, at, 120)
        slow_down(live.folder / FAULTS, name, factor)
        slow_at = max((mark.step for mark in live.marks()), default=0)
        if recover is not None:
            live.wait(lambda marks: max(mark.step for mark in marks) >= slow_at + recover, 120)
            slow_down(live.folder / FAULTS, name, 1.0)
        live.finish(300)
        assert name == live.members[rank]
        morphs = [event for event in live.events() if event["kind"] == "morph"]
        rebalances = [event for event in live.events() if event["kind"] == "rebalance"]
        row = {
            "slow_from_step": slow_at + 1,
            "new_cuts_at_steps": [event["step"] for event in morphs],
            "cuts": [event["cuts"] for event in live.events() if "cuts" in event],
            "why": [event["why"] for event in rebalances],
            "planned_gains": [round(event["planned_gain"], 3) for event in rebalances],
            "pauses_ms": [round(1e3 * event["pause_seconds"], 1) for event in morphs],
        }
        borders = [0, slow_at, *[event["step"] - 1 for event in morphs], steps]
        between = [pair for pair in itertools.pairwise(borders) if pair[1] > pair[0] + 3]
        row["steps_ms"] = [round(1e3 * step_seconds(live, first + 2, last), 1) for first, last in between]
        return row, losses(live.folder)


def plan_for_known_speeds(config: Config, speeds: Sequence[float]) -> Plan:
    """Return planner `budget`'s plan for known speeds."""
    shape = RunShape.of_config(config)
    return with_stage_bytes(layerwise_plan(profile_run(config, show=False), speeds, "budget", None, shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", type=int, default=50, help="from which on a member is slow")
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--recover", action="store_true", help="the member is fast again 60 steps later")
    parser.add_argument("--config", type=Path, default=HERE / "small.yaml")
    args = parser.parse_args()
    clock, steps = Clock(), args.step + (130 if args.recover else 70)
    overrides, slow = SLEEPING, (args.rank, args.factor)
    learnt, elastic_losses = slow_run(
        args.config,
        [*overrides, "elastic.rebalance=true"],
        *slow,
        args.step,
        steps,
        60 if args.recover else None,
    )
    speeds = [1 / args.factor if rank == args.rank else 1.0 for rank in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_for_known_speeds(load_config(args.config, [*overrides, "pipeline.devices=4"]), speeds)
        write_plan(path := Path(folder) / "plan.json", plan)
        plan_overrides = [f"pipeline.plan={path}", f"pipeline.schedule={plan.schedule}"]
        reference, _ = slow_run(args.config, [*overrides, *plan_overrides], *slow, 0, 40)
    with Live(args.config, [*overrides, f"train.max_steps={steps}"], 1) as alone:
        alone.finish(600)
        plain_losses = losses(alone.folder)
    append_result(
        "rebalance",
        {
            "factor": args.factor,
            **learnt,
            "steps_until_new_cuts": learnt["new_cuts_at_steps"][0] - learnt["slow_from_step"],
            "cuts_for_known_speeds": plan.cuts,
            "step_for_known_speeds_ms": reference["steps_ms"][-1],
            "step_to_that": round(learnt["steps_ms"][2] / reference["steps_ms"][-1], 3),
            "losses_bitwise": elastic_losses == plain_losses,
            "seconds": clock.seconds,
        },
    )


if __name__ == "__main__":
    main()
