"""What is asked of a config before anything is built: names, the optimizer, data and weights.

`prepare.prepare_run` and `readiness` ask it, so that `capslog train` and `capslog check` find the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from varuna_capslog.base import fields
from varuna_capslog.base.findings import Finding, findings_of
from varuna_capslog.config.settings import Config
from varuna_capslog.memory import AUTO, MEMORY_MODELS
from varuna_capslog.planners import AUTOMATIC, EVERY_PLANNER, JOINT
from varuna_capslog.start import ENGINES
from varuna_capslog.training.constants import check_samples

if TYPE_CHECKING:
    from varuna_capslog.model.workload import Workload

__all__ = ["check_names", "check_optimizer", "data_findings"]


def check_names(config: Config) -> None:
    """Raises CapslogError where the config names a planner, memory model or engine that is unknown; needs no torch."""
    fields.refuse_unknown([config.pipeline.planner], [*EVERY_PLANNER, JOINT, AUTOMATIC], "planner")
    fields.refuse_unknown([config.pipeline.memory], [AUTO, *MEMORY_MODELS], "memory model")
    ENGINES[config.engine].check()


def check_optimizer(config: Config) -> None:
    """Raises CapslogError where the config's optimizer cannot step a part of the parameters by itself."""
    from varuna_capslog.engine.recipe import Recipe  # imports torch, which planning from a profile does without

    Recipe.of_config(config.train).check_optimizer()


def data_findings(config: Config, workload: Workload) -> list[Finding]:
    """What the user should know of data and weights, and what the run would stop at or learn wrong things from."""

    def enough() -> tuple[Finding, ...]:
        facts = workload.data_facts()
        if "number of samples" in facts:
            check_samples(facts["number of samples"], config.train.minibatch_size)
        return ()

    return list(findings_of(enough, workload.check))
