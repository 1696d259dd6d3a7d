"""Trains plans of `budget` for random budgets: the same bits as one rank without recomputation, within the budget.

The seven models of `benchmarks/fold`, 1 to 4 devices, a schedule by name or chosen by the planner, budgets from too
small up to the peak without recomputation; every third plan may also move tensors to a host tier. Ranks are processes
of this machine; their peaks come from torch's CPU allocator in the second training step. Prints README.md's tables;
exit status 1 if a bit differs or a rank takes more than its budget.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "fold"))

import torch
from cases import CPU, MICROBATCHES, MODELS, Case, workload_of
from common import layerwise_plan, write_json
from torch import Tensor

from tests.engine.pool import WorkerPool
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.offload import HostTier
from varuna_capslog.engine.pipeline import PipelineEngine, Ready
from varuna_capslog.engine.probe import PeakProbe, resident_tensors
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.verdict import HostMemory, judge_by_fold
from varuna_capslog.plans.parts import PlanStage
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.estimate import StageEstimator, estimate_workload
from varuna_capslog.profiling.rehearsal import rehearse_layout
from varuna_capslog.schedules import RunShape
from varuna_capslog.schedules.shape import AUTO_SCHEDULE

SCHEDULES = (AUTO_SCHEDULE, AUTO_SCHEDULE, "1f1b", "zb-h1", "varuna", "gpipe")
PARTS = (0.25, 0.95)
"""Range of budgets, as shares of the largest rank's peak without recomputation."""


def trained(communicator: Communicator, case: Case) -> dict[str, Any]:
    """Train two steps; return this rank's peaks in the second, losses, norms and a digest of each layer's weights."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    workload, size = workload_of(case.model)
    tier, chain = HostTier(CPU), workload.build_chain()
    engine = PipelineEngine(chain, workload.loss, case.layout, case.options, communicator, CPU, Ready(tier=tier))
    specs = dict(workload.profile_inputs(size))
    targets, normalisers = workload.profile_targets(size)
    minibatch = Minibatch([specs] * MICROBATCHES, [targets] * MICROBATCHES, normalisers)

    def load(number: int) -> dict[str, Tensor]:
        made = torch.Generator().manual_seed(number)
        return {
            name: torch.rand(spec.shape, dtype=spec.dtype, generator=made)
            if spec.dtype.is_floating_point
            else torch.ones(spec.shape, dtype=spec.dtype)
            for name, spec in specs.items()
        }

    verdicts = [train_step(engine, 1, minibatch, load)]
    with PeakProbe(CPU, resident_tensors(engine.layers, engine.optimizer)) as probe:
        verdicts.append(train_step(engine, 2, minibatch, load))
    losses = [(verdict.parts, verdict.grad_norm) for verdict in verdicts]
    digests = {layer.layer.name: _digest(layer.layer.module) for layer in engine.layers}
    return {"peak": probe.peak_bytes, "host": tier.peak_bytes, "losses": losses, "digests": digests}


def _digest(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode() + tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def case_of(model: str, plan: Plan, edges: tuple[tuple[int, int], ...]) -> Case:
    """Return the case that runs a plan, without its predicted bytes and seconds."""
    stages = tuple(dataclasses.replace(stage, bytes=None, seconds=None) for stage in plan.stages)
    assert plan.schedule is not None
    return Case(model, Layout(stages, plan.units.blocks or 1), plan.schedule, True, None, edges)


def keeping(model: str, blocks: int, layers: int) -> Case:
    """Return the case of one rank that keeps all activations."""
    return Case(model, Layout((PlanStage(((0, layers),), (0,), memory=()),), blocks), "1f1b", True, None, ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4, help="most devices of a plan")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rehearse", type=int, default=4, help="rehearse one plan of so many; 0: none")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    draw, pool, begun = random.Random(args.seed), WorkerPool(), time.perf_counter()
    profiles: dict[str, Profile] = {}
    estimators: dict[str, StageEstimator] = {}
    for model in MODELS:
        workload, size = workload_of(model)
        conditions = RunConditions(microbatch_size=size, halves=True)
        profiles[model] = estimate_workload(workload, conditions)
        estimators[model] = StageEstimator(workload, conditions)
    oracles: dict[tuple[str, int], dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    try:
        while counts["plans"] < args.plans:
            model, devices = draw.choice(list(MODELS)), draw.randint(1, args.ranks)
            profile, blocks = profiles[model], draw.choice([1, 2])
            run = RunShape(
                MICROBATCHES, draw.choice(SCHEDULES), True, microbatch_size=workload_of(model)[1], num_blocks=blocks
            )
            tier = HostMemory(in_files=True) if draw.random() < 1 / 3 else HostMemory()
            link = Link(host_bandwidth=draw.choice([1e9, 1e11]))
            free = layerwise_plan(profile, devices, "budget", None, run, link, tier)
            kept = judge_by_fold(profile, free, run.settled())
            capacity = int(max(rank.bytes or 0 for rank in kept.ranks) * draw.uniform(*PARTS))
            plan = layerwise_plan(profile, devices, "budget", capacity, run, link, tier)
            plan = judge_by_fold(profile, plan, dataclasses.replace(run, schedule=plan.schedule or "1f1b"), None, tier)
            if not plan.fits:
                counts["too small"] += 1
                continue
            case = case_of(model, plan, ())
            if (model, blocks) not in oracles:
                (oracles[model, blocks],) = pool.run(trained, 1, keeping(model, blocks, profile.num_layers))
            oracle, ranks = oracles[model, blocks], pool.run(trained, case.layout.world_size, case)
            digests = {name: digest for rank in ranks for name, digest in rank["digests"].items()}
            same = digests == oracle["digests"] and all(rank["losses"] == oracle["losses"] for rank in ranks)
            counts["plans"] += 1
            counts["differ"] += not same
            counts[f"schedule {plan.schedule}"] += 1
            kinds = {interval.kind for stage in plan.stages for interval in stage.memory or ()}
            for kind in kinds or {"keeps everything"}:
                counts[kind] += 1
            guesses: list[Any] = [None] * len(ranks)
            if args.rehearse and counts["plans"] % args.rehearse == 0:
                guesses = [stage.peak_bytes for stage in rehearse_layout(estimators[model], case.layout, case.options)]
            for rank, (real, guess) in enumerate(zip(ranks, guesses, strict=True)):
                rows.append(
                    {"plan": counts["plans"], "model": model, "devices": devices, "capacity": capacity}
                    | {"measured": real["peak"], "host": real["host"], "predicted": plan.ranks[rank].bytes}
                    | {"rehearsed": guess}
                )
            if counts["plans"] % 20 == 0:
                sys.stderr.write(f"{counts['plans']} of {args.plans}, {counts['differ']} differ\n")
    finally:
        pool.close()
    over = sum(row["measured"] > row["capacity"] for row in rows)
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    print("\n| prediction | ranks | median error | worst | lowest | over the budget |\n|---|---|---|---|---|---|")
    for name in ("predicted", "rehearsed"):
        errors = [row[name] / row["measured"] - 1 for row in rows if row[name] is not None]
        beyond = sum(row["measured"] > row["capacity"] for row in rows if row[name] is not None)
        if errors:
            print(
                f"| {name} | {len(errors)} | {statistics.median(map(abs, errors)):.4%} | {max(map(abs, errors)):.2%} | "
                f"{min(errors):+.2%} | {beyond} |"
            )
    print(f"\n{time.perf_counter() - begun:.0f} s")
    write_json(args.json, {"counts": dict(counts), "ranks": rows})
    sys.exit(1 if over or counts["differ"] else 0)


if __name__ == "__main__":
    main()
