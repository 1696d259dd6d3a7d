"""Steps of planner `budget` over rising budgets: with more memory a proven plan is never slower, and any other plan is
slower by at most the printed gap. The paper's six models on 8 devices. Prints README.md's table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from common import plan, write_json
from paper_models import paper_profiles

from varuna_capslog.base.units import format_bytes
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

DEVICES = 8
SAME = 1e-9


def budgets(profile: Profile, run: RunShape, count: int) -> list[int]:
    """Return budgets from 0.9 times the peak of the plan of the smallest peak to 1.43 times that of the plan that keeps
    all activations.
    """
    least = plan(profile, DEVICES, "exact", run=RunShape(run.microbatches, "varuna", True, num_blocks=1)).peak_bytes
    most = max(rank.bytes or 0 for rank in plan(profile, DEVICES, "budget", run=run).ranks)
    low, high = 0.9 * float(least or 1), 1.1 * 1.3 * most
    return [int(low * (high / low) ** (number / (count - 1))) for number in range(count)]


def steps_of(model: str, profile: Profile, run: RunShape, count: int) -> dict[str, Any]:
    """Print and return the plans that are slower than one for less memory: by how much, and whether within the gap."""
    rows: list[dict[str, Any]] = []
    for capacity in budgets(profile, run, count):
        candidate = plan(profile, DEVICES, "budget", capacity=capacity, run=run)
        if candidate.fits and candidate.step_seconds is not None and candidate.bound_seconds is not None:
            gap = candidate.step_seconds / candidate.bound_seconds - 1
            rows.append(
                {"capacity": capacity, "step": candidate.step_seconds, "gap": gap, "proven": bool(candidate.proven)}
            )
    slower = []
    for number, row in enumerate(rows):
        best = min((smaller["step"] for smaller in rows[:number]), default=row["step"])
        if row["step"] > best * (1 + SAME):
            more = row["step"] / best - 1
            slower.append({**row, "more": more, "within": more <= row["gap"] + SAME and not row["proven"]})
    worst = max((row["more"] for row in slower), default=0.0)
    gaps = sorted(row["gap"] for row in rows)
    cells = (
        model,
        f"{format_bytes(rows[0]['capacity'])} to {format_bytes(rows[-1]['capacity'])}",
        f"{len(rows)} of {count}",
        sum(row["proven"] for row in rows),
        f"{100 * gaps[len(gaps) // 2]:.2f} %",
        len(slower),
        f"{100 * worst:.2f} %",
        sum(not row["within"] for row in slower),
    )
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return {"model": model, "rows": rows, "slower": slower}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, default=50, help="per model")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    print("| model | budgets | fit | proven | gap, median | slower than with less | by at most | beyond the gap |")
    print("|---|---|---|---|---|---|---|---|")
    models = []
    run = RunShape(arguments.microbatches, arguments.schedule, True, num_blocks=1)
    for model, profile in paper_profiles():
        models.append(steps_of(model, profile, run, arguments.budgets))
    write_json(arguments.json, {"models": models})


if __name__ == "__main__":
    main()
