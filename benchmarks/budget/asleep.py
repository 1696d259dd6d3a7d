"""Compares simulated ratios of planner `budget`'s steps with real steps on layers that sleep, 4 ranks.

Plans are those for the paper's six models, estimated for CUDA. Every layer of the real steps sleeps for its estimated
time, times one factor for the whole model; engine, schedule and gloo are real. Both plans exist at once and take
turns. Prints README.md's table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from common import Sleeping, beside_play, interleave, mean_loss, plan, run_ranks, stepping, write_json
from paper_models import paper_profiles

from varuna_capslog.base.units import parse_bytes
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.schedules import RunShape

DEVICES, SHAPE = 4, (1, 16)
Seconds = tuple[tuple[float, float], ...]
"""Seconds of the forward and of the backward of each layer."""


def plans_of(profile: Profile, capacity: int, microbatches: int) -> dict[str, tuple[Plan, bool]]:
    """Return the plans that fit, each with whether whole stages recompute: Varuna's cuts, cuts for time, `budget`."""
    plans = {}
    for name, schedule in (("varuna", "varuna"), ("throughput", "1f1b"), ("budget", "1f1b")):
        run = RunShape(microbatches, schedule, True, num_blocks=1)
        candidate = plan(profile, DEVICES, name, capacity=None if name == "varuna" else capacity, run=run)
        if name == "varuna" or candidate.fits:
            plans[name] = candidate, name != "budget"
    return plans


def measure(
    communicator: Communicator, seconds: Seconds, plans: dict[str, tuple[Plan, bool]], microbatches: int, rounds: int
) -> dict[str, list[float]]:
    """Return this rank's seconds of every round of each plan."""
    runs = {}
    for name, (candidate, recompute) in plans.items():
        chain = Chain([Layer(f"layer.{n}", Sleeping(*waits)) for n, waits in enumerate(seconds)], name="sleeper")
        schedule = "varuna" if name == "varuna" else "1f1b"
        options = EngineOptions(microbatches, schedule=schedule, recompute=recompute)
        engine = PipelineEngine(chain, mean_loss, Layout(candidate.stages), options, communicator, torch.device("cpu"))
        runs[name] = stepping(engine, microbatches, {"x": torch.zeros(*SHAPE)})
    times = interleave(runs, rounds, communicator.barrier, warmup=1)
    return {name: [wall for wall, _ in row] for name, row in times.items()}


def rows_of(model: str, profile: Profile, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare `budget`'s plan with every other plan; print and return a row for each."""
    microbatches = arguments.microbatches
    plans = plans_of(profile, parse_bytes(arguments.capacity), microbatches)
    if "budget" not in plans:
        print(f"| {model} | nothing fits | | | | |")
        return []
    asleep = [(float(layer.forward_seconds or 0), float(layer.backward_seconds or 0)) for layer in profile.layers]
    play = simulate_plan(profile, plans["varuna"][0]).step_seconds
    scale = arguments.step / play
    seconds = tuple((scale * forward, scale * backward) for forward, backward in asleep)
    scaled = Profile(
        tuple(
            LayerProfile(layer.name, 0, 0 if n else None, forward_seconds=waits[0], backward_seconds=waits[1])
            for n, (layer, waits) in enumerate(zip(profile.layers, seconds, strict=True))
        )
    )
    played = {}
    for name, (candidate, recompute) in plans.items():
        schedule = "varuna" if name == "varuna" else "1f1b"
        played[name] = simulate_plan(
            scaled, candidate, schedule=schedule, num_microbatches=microbatches, recompute=recompute
        ).step_seconds
    ranks = run_ranks(measure, DEVICES, seconds, plans, microbatches, arguments.rounds)
    steps = {
        name: [max(seconds_of_ranks) for seconds_of_ranks in zip(*(row[name] for row in ranks), strict=True)]
        for name in plans
    }
    results = []
    for rival in [name for name in plans if name != "budget"]:
        row = {"model": model, "other": rival, **beside_play(steps, played, rival, "budget")}
        middle, low, high = row["ratio"]
        off = 100 * (middle / row["played_ratio"] - 1)
        print(
            f"| {model} | {rival} | {1e3 * row['measured_seconds']['budget']:.0f} | {middle:.3f} ({low:.3f}-{high:.3f})"
            f" | {row['played_ratio']:.3f} | {off:+.1f} % |",
            flush=True,
        )
        results.append(row)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", default="16GiB", help="of each device")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--step", type=float, default=8.0, help="seconds that a step of Varuna's cuts is scaled to")
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    print("| model | beside | budget, ms | measured ratio (quartiles) | simulated | off by |")
    print("|---|---|---|---|---|---|")
    rows = []
    for model, profile in paper_profiles():
        rows += rows_of(model, profile, arguments)
    write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
