"""What a config without these keys means, for plans without a config, which importing `settings` would slow down."""

from __future__ import annotations

from typing import Final

__all__ = ["ALL", "FASTEST", "MEMORY", "MICROBATCHES_PER_DEVICE", "PLANNER", "SCHEDULE", "SMALLEST", "STAGES_PER_RANK"]

PLANNER: Final = "default"
"""`pipeline.planner`: FASTEST for every run that it can plan, else SMALLEST."""
FASTEST: Final = "budget"
"""The planner of the shortest step that fits."""
ALL: Final = "auto"
"""The planner that asks all others."""
SMALLEST: Final = "exact"
"""The planner of the smallest peak, which needs no seconds."""
MEMORY: Final = "auto"
"""`pipeline.memory`."""
SCHEDULE: Final = "auto"
"""`pipeline.schedule`."""
MICROBATCHES_PER_DEVICE: Final = 4
"""Microbatches of a step for each device of a pipeline, where no config says how many samples a step has."""
STAGES_PER_RANK: Final = 2
"""`pipeline.stages_per_rank` under schedule interleaved."""
