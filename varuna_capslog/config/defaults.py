"""What a config without these keys means, for plans without a config, which importing `settings` would slow down."""

from __future__ import annotations

from typing import Final

__all__ = ["MEMORY", "PLANNER", "SCHEDULE"]

PLANNER: Final = "exact"
"""`pipeline.planner`."""
MEMORY: Final = "auto"
"""`pipeline.memory`."""
SCHEDULE: Final = "auto"
"""`pipeline.schedule`."""
