"""The plan files of a run's folder: plan-<generation>.json, one for each plan that the run has had."""

from __future__ import annotations

from pathlib import Path

from varuna_capslog.plans.plan import Plan, read_plan

__all__ = ["latest_plan", "plan_path"]


def latest_plan(run_dir: Path) -> tuple[int, Plan] | None:
    """Generation and plan of a run's newest plan file, or None where there is none yet."""
    generations = [
        int(number) for path in run_dir.glob("plan-*.json") if (number := path.stem.removeprefix("plan-")).isdigit()
    ]
    if not generations:
        return None
    return max(generations), read_plan(plan_path(run_dir, max(generations)))


def plan_path(run_dir: Path, generation: int) -> Path:
    """The file that holds the plan of a generation."""
    return run_dir / f"plan-{generation}.json"
