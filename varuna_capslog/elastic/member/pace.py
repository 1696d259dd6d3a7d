"""The step time that each generation's plan predicts, beside that of the plan before."""

from __future__ import annotations

from typing import Any

from varuna_capslog.planning.keeping import treatments
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules import RunShape

__all__ = ["Pace"]


class Pace:
    """The plans of the generations that one member trained in.

    Args:
        run: the whole step; what plans leave open. device: cpu or cuda.

    Attributes:
        told: entries on its plan in the event of the newest generation.
    """

    def __init__(self, run: RunShape, device: str) -> None:
        self._run, self._device = run, device
        self._before: float | None = None
        self.told: dict[str, Any] = {}

    def begin(self, plan: Plan) -> None:
        """A generation begins to train by this plan."""
        self.told = self._of(plan)

    def _of(self, plan: Plan) -> dict[str, Any]:
        """The entries on a plan; none where it does not predict its step.

        Returns:
            "planned_step_seconds"; "planned_step_ratio", to the plan before, where that is known;
            "recomputed_layers" and "offloaded_layers", their numbers.
        """
        seconds, before = plan.step_seconds, self._before
        self._before = seconds
        if not seconds:
            return {}
        ratio = {"planned_step_ratio": seconds / before} if before else {}
        stages = treatments(plan, self._run, self._device)
        again = sum(end - first for stage in stages for first, end in stage.recomputed)
        away = sum(end - first for stage in stages for first, end in (*stage.offloaded, *stage.inputs_offloaded))
        return {"planned_step_seconds": seconds, **ratio, "recomputed_layers": again, "offloaded_layers": away}
