"""DETR object detection as a pipeline workload: `workload: detr_pipeline:workload` in a run's YAML calls `workload`,
which does the heavy imports; nothing here may import the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from detr_pipeline.task import DetrWorkload
    from varuna_capslog.config.settings import Config

__all__ = ["workload"]

PRELOADED = ("detr_pipeline.task",)
"""Modules that a process imports before it forks workers."""


def workload(config: Config) -> DetrWorkload:
    """Return the DETR workload of a resolved config; opens no data. Raises ConfigError for a wrong key or value under
    `model` or `data`.
    """
    from detr_pipeline.task import DetrWorkload

    return DetrWorkload(config)
