"""RT-DETR of transformers (the extra `hf`) as a workload: `workload: detr_pipeline.rt_detr:workload` in a run's YAML
calls `workload`. Data, evaluation and drawing are those of DETR. Nothing here may import the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from detr_pipeline.rt_detr.task import RtDetrWorkload
    from varuna_capslog.config.settings import Config

__all__ = ["workload"]

PRELOADED = ("detr_pipeline.rt_detr.task",)
"""Modules that a process imports before it forks workers."""


def workload(config: Config) -> RtDetrWorkload:
    """Return the RT-DETR workload of a resolved config; opens no data. Raises ConfigError for a wrong key or value
    under `model` or `data`, and CapslogError where `model.folder` cannot be read.
    """
    from detr_pipeline.rt_detr.task import RtDetrWorkload

    return RtDetrWorkload(config)
