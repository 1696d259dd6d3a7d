"""Defaults of keys, also for plans without a config, which importing `settings` would slow down."""

from __future__ import annotations

from typing import Final

__all__ = [
    "ALL",
    "FASTEST",
    "MEMORY",
    "MICROBATCHES_PER_DEVICE",
    "OWN_MICROBATCH",
    "OWN_MINIBATCH",
    "OWN_TRAIN",
    "PLANNER",
    "SCHEDULE",
    "SMALLEST",
    "STAGES_PER_RANK",
]

PLANNER: Final = "default"
"""`pipeline.planner`: FASTEST for every run that it can plan, else SMALLEST."""
FASTEST: Final = "budget"
"""The planner of the shortest step that fits."""
ALL: Final = "auto"
"""Another word for FASTEST."""
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

OWN_TRAIN: Final = {"optimizer": "adamw", "lr": 1e-3, "clip_norm": 0.0}
"""`train` of a run on the user's model and data set: no clipping. The defaults in `config/settings.py` are DETR's."""
OWN_MINIBATCH: Final = 32
"""`train.minibatch_size` of own data, or all samples where there are fewer."""
OWN_MICROBATCH: Final = 8
"""`train.microbatch_size` of own data, or the largest size below that divides the minibatch and fills from the
validation data."""
