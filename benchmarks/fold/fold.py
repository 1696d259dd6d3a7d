"""Compares real peaks of every rank of random plans with its rehearsal and its fold. Prints README.md's tables.

Real ranks are processes of this machine, each with one thread; their peaks come from torch's CPU allocator in the
second training step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cases import GRAINS, JOINABLE, MICROBATCHES, MODELS, Case, draw_case, draw_chunks, real_peak, workload_of
from common import write_json

from tests.engine.pool import WorkerPool
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.memory.fold import RankFold, fold
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator, estimate_workload
from varuna_capslog.profiling.rehearsal import rehearse_layout
from varuna_capslog.schedules import RunShape, make_schedule

MIB = 1 << 20


@dataclass(frozen=True)
class Trial:
    """Measured and predicted bytes of a rank of a plan."""

    plan: int
    model: str
    rank: int
    stages: int
    blocks: int
    schedule: str
    direct: bool
    measured: int
    rehearsed: int
    folded: int
    host: int
    host_folded: int
    grains: tuple[int, ...]


def folded(case: Case, profile: Profile) -> list[RankFold]:
    """Return the fold of every rank of a case."""
    units = Units(MICROBATCHES, 1, case.layout.num_blocks)
    return fold(profile, case.layout.stages, units, case.rows(), case.run, "direct" if case.layout.direct else "relay")


def errors(trials: Sequence[Trial], name: str) -> list[float]:
    return [getattr(trial, name) / trial.measured - 1 for trial in trials]


def summary(trials: Sequence[Trial], name: str) -> str:
    """Return a table row: median and largest absolute error, the lowest, and the outcome of 21 capacities per peak."""
    rank_errors = errors(trials, name)
    if not rank_errors:
        return f"| {name} | 0 |"
    fits, refused = false_fits(trials, name)
    return (
        f"| {name} | {len(rank_errors)} | {statistics.median(map(abs, rank_errors)):.4%} | "
        f"{max(map(abs, rank_errors)):.2%} | {min(rank_errors):+.2%} | {fits} | {refused} |"
    )


def false_fits(trials: Sequence[Trial], name: str) -> tuple[int, int]:
    """Return the numbers of false and of refused fits, with the headroom of an estimate for the CPU."""
    headroom, wrong, refused = Headroom(0, 1.01), 0, 0
    for trial in trials:
        for part in range(90, 111):
            capacity = part * trial.measured / 100
            says, does = headroom.device(getattr(trial, name)) <= capacity, trial.measured <= capacity
            wrong, refused = wrong + (says and not does), refused + (does and not says)
    return wrong, refused


def seconds_of_a_long_list(profile: Profile) -> float:
    """Return the seconds of the fold per list of 10,000 actions, the fastest of five."""
    size, seconds = profile.num_layers, []
    cuts = [size * rank // 4 for rank in range(5)]
    stages = [PlanStage(((cuts[rank], cuts[rank + 1]),), (rank,)) for rank in range(4)]
    rows = make_schedule("1f1b", 4, 5000)
    for _ in range(5):
        began = time.perf_counter()
        fold(profile, stages, Units(5000, 1, 1), rows, RunShape(5000, "1f1b", False))
        seconds.append((time.perf_counter() - began) / len(rows))
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4, help="most ranks of a plan")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--grains", action="store_true", help="plans whose stages take several microbatches in one call"
    )
    parser.add_argument("--chunks", action="store_true", help="schedule interleaved, several chunks on every rank")
    parser.add_argument("--unmeasured", action="store_true", help="compare with the rehearsal, and train nothing")
    parser.add_argument("--only", action="append", help="draw for this model alone; may be given several times")
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    profiles: dict[tuple[str, bool], Profile] = {}
    estimators: dict[str, StageEstimator] = {}
    chosen = tuple(arguments.only or (JOINABLE if arguments.grains else MODELS))
    for model in chosen:
        workload, size = workload_of(model)
        estimators[model] = StageEstimator(workload, RunConditions(microbatch_size=size))
        for recompute in (True, False):
            conditions = RunConditions(
                microbatch_size=size, recompute=recompute, halves=True, grains=GRAINS if arguments.grains else ()
            )
            profiles[model, recompute] = estimate_workload(workload, conditions)
    chains = {model: estimator.chain for model, estimator in estimators.items()}
    draw, pool, trials = random.Random(arguments.seed), WorkerPool(), []
    try:
        for number in range(arguments.plans):
            if arguments.chunks:
                case = draw_chunks(draw, chains, arguments.ranks)
            else:
                case = draw_case(draw, chains, arguments.ranks, arguments.grains)
            rehearsed = rehearse_layout(estimators[case.model], case.layout, case.options)
            if arguments.unmeasured:
                real = [(guess.peak_bytes, 0) for guess in rehearsed]
            else:
                real = pool.run(real_peak, case.layout.world_size, case)
            again = any(stage.recomputes(case.run) for stage in case.layout.stages)  # as `conditions_of_run`
            rows = folded(case, profiles[case.model, case.recompute or again])
            for rank, parts in enumerate(zip(real, rehearsed, rows, strict=True)):
                num_stages = len(case.layout.stages_of(rank))
                intervals = any(stage.memory is not None for stage in case.layout.stages)
                again = ", intervals" if intervals else ", recomputation" * case.recompute
                how = f"{case.schedule}{again}{', given list' * bool(case.actions)}"
                (peak, host), guess, sums = parts
                sizes = (peak, guess.peak_bytes, sums.peak_bytes, host, sums.host_bytes)
                blocks, direct = case.layout.num_blocks, case.layout.direct
                grains = tuple(stage.grain for stage in case.layout.stages)
                trials.append(Trial(number, case.model, rank, num_stages, blocks, how, direct, *sizes, grains))
            if number % 25 == 24:
                sys.stderr.write(f"{number + 1} of {arguments.plans}\n")
    finally:
        pool.close()
    seconds = seconds_of_a_long_list(profiles[chosen[0], False])
    out("| prediction | ranks | median error | worst | lowest | false fits | fits refused |")
    out("|---|---|---|---|---|---|---|")
    out("\n".join(summary(trials, name) for name in ("rehearsed", "folded")))
    out("\n| model | ranks | rehearsed: worst | folded: median | highest | lowest |\n|---|---|---|---|---|---|")
    for model in chosen:
        model_trials = [trial for trial in trials if trial.model == model]
        if not model_trials:
            continue
        exact, ours = errors(model_trials, "rehearsed"), errors(model_trials, "folded")
        out(
            f"| {model} | {len(model_trials)} | {max(map(abs, exact)):.3%} | {statistics.median(map(abs, ours)):.4%} | "
            f"{max(ours):+.2%} | {min(ours):+.2%} |"
        )
    parts = [trial for trial in trials if "intervals" in trial.schedule]
    out(f"\nwith memory intervals: {len(parts)} ranks")
    out("\n".join(summary(parts, name) for name in ("rehearsed", "folded")))
    parts = [trial for trial in trials if trial.schedule.startswith("zb-h1")]
    out(f"\nwith split backwards: {len(parts)} ranks")
    out("\n".join(summary(parts, name) for name in ("rehearsed", "folded")))
    parts = [trial for trial in trials if trial.direct]
    out(f"\nwith direct routes: {len(parts)} ranks")
    out("\n".join(summary(parts, name) for name in ("rehearsed", "folded")))
    tiers = [trial.host_folded / trial.host - 1 for trial in trials if trial.host]
    if tiers:
        out(f"host tier: {len(tiers)} ranks, folded {min(tiers):+.2%} to {max(tiers):+.2%}")
    several = sum(trial.stages > 1 for trial in trials)
    out(f"\n{arguments.plans} plans, {len(trials)} ranks, {several} of them with several stages")
    out(f"a list of 10,000 actions: {seconds * 1e3:.1f} ms")
    write_json(arguments.json, {"trials": [asdict(trial) for trial in trials], "seconds_per_list": seconds})


def out(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
