"""Compares simulated steps of planner `budget` with those of other planners, for the paper's six models on 8 devices.

Costs are estimates for CUDA. Varuna's cuts recompute everything under Varuna's schedule, for any capacity. The
others keep within the capacity under 1F1B. Prints README.md's tables.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from common import plan, write_json
from paper_models import paper_profiles
from questions import link_of, questions

from varuna_capslog.base.units import format_bytes, parse_bytes
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

DEVICES = 8
PLANNERS = ("throughput", "vpipe", "dawnpiper", "budget")


def row(profile: Profile, capacity: int, link: Link, microbatches: int) -> dict[str, Any]:
    """Return Varuna's step in seconds, and each planner's speed-up over it; None where nothing fits."""
    run = RunShape(microbatches, "varuna", True, num_blocks=1)
    base = simulate_plan(profile, plan(profile, DEVICES, "varuna", run=run, link=link), link=link).step_seconds
    answers: dict[str, Any] = {"varuna": base}
    run = RunShape(microbatches, "1f1b", True, num_blocks=1)
    for name in PLANNERS:
        candidate = plan(profile, DEVICES, name, capacity=capacity, run=run, link=link)
        answers[name] = base / simulate_plan(profile, candidate, link=link).step_seconds if candidate.fits else None
        if name == "budget":
            answers["search"] = candidate.search_seconds
    return answers


def main() -> None:
    arguments = questions(__doc__ or "").parse_args()
    profiles = dict(paper_profiles())
    results = []
    for capacity in map(parse_bytes, arguments.capacities.split(",")):
        for text in arguments.bandwidths.split(","):
            link = link_of(text)
            print(f"\n{format_bytes(capacity)} per device, links and host: {text}\n")
            print(f"| model | Varuna, s | {' | '.join(PLANNERS)} | search, s |")
            print("|---" * (len(PLANNERS) + 3) + "|")
            rows = {}
            for model, profile in profiles.items():
                rows[model] = answers = row(profile, capacity, link, arguments.microbatches)
                ratios = " | ".join("-" if answers[name] is None else f"{answers[name]:.2f}" for name in PLANNERS)
                print(f"| {model} | {answers['varuna']:.2f} | {ratios} | {answers['search']:.1f} |", flush=True)
            means = []
            for name in PLANNERS:
                feasible = [answers[name] for answers in rows.values() if answers[name] is not None]
                means.append(f"{statistics.geometric_mean(feasible):.2f} of {len(feasible)}" if feasible else "-")
            print(f"| geometric mean | | {' | '.join(means)} | |")
            results.append({"capacity_bytes": capacity, "bandwidth": text, "rows": rows})
    write_json(arguments.json, {"results": results})


if __name__ == "__main__":
    main()
