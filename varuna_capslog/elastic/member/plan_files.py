"""The files `plan-<generation>.json` of a run whose pipeline changes, one for every generation.

A run that goes on later counts its generations from the newest of them, so that a generation that never trained has
one, too.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from varuna_capslog.config.settings import Config
from varuna_capslog.engine.options import Layout
from varuna_capslog.planning.search import plan as planned
from varuna_capslog.plans.folder import latest_plan, plan_path
from varuna_capslog.plans.plan import Plan, write_plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["PlanFiles"]


class PlanFiles:
    """Writes the plans of one run.

    Args:
        plan: the run's first one, which the others are like where there is no profile.
        profile: what the predictions in the files are made from.
    """

    def __init__(self, config: Config, plan: Plan, profile: Profile | None) -> None:
        self._config, self._plan, self._profile = config, plan, profile

    def write(self, number: int, layout: Layout) -> None:
        """The plan of a generation that trains; what is there stays."""
        path = self._path(number)
        if path.exists():
            return
        pipeline, count = self._config.pipeline, self._config.num_microbatches // layout.replicas
        if self._profile is None:
            plan = dataclasses.replace(self._plan, cuts=layout.cuts, num_microbatches=count, placed=None, actions=None)
        else:
            plan = planned(
                self._profile,
                layout.devices,
                planner=pipeline.planner,
                memory=pipeline.memory,
                run=dataclasses.replace(RunShape.of_config(self._config), num_microbatches=count, num_blocks=1),
                cuts=layout.cuts,
            )
        write_plan(path, plan)

    def keep(self, number: int) -> None:
        """The plan before stands for a generation that waits or is parked."""
        last = latest_plan(self._config.run_dir)
        if last is not None and last[0] < number:
            write_plan(self._path(number), last[1])

    def _path(self, number: int) -> Path:
        return plan_path(Path(self._config.run_dir), number)
