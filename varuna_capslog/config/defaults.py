"""What a config without these keys means, for a plan that is made without a config: importing `settings` would take longer
than such a plan.
"""

from __future__ import annotations

__all__ = ["MEMORY", "PLANNER", "SCHEDULE"]

PLANNER = "exact"
"""`pipeline.planner`."""
MEMORY = "auto"
"""`pipeline.memory`."""
SCHEDULE = "varuna"
"""`pipeline.schedule`."""
