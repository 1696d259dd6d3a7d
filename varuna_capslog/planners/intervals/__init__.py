"""Cheapest memory intervals of a stage, for planners that choose cuts and intervals together."""

from varuna_capslog.planners.intervals.interval_search import (
    DEFAULT_LABELS,
    EXACT_LAYERS,
    IntervalSearch,
    resident_bytes,
)
from varuna_capslog.planners.intervals.tables import (
    Handling,
    IntervalChoice,
    again_seconds,
    combined_seconds,
    stage_bytes,
)

__all__ = [
    "DEFAULT_LABELS",
    "EXACT_LAYERS",
    "Handling",
    "IntervalChoice",
    "IntervalSearch",
    "again_seconds",
    "combined_seconds",
    "resident_bytes",
    "stage_bytes",
]
