"""Real members whose layers are compiled: a crash and a morph change no bit of the results of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.elastic.backend import nudged
from tests.elastic.live import Cradle
from tests.elastic.scenarios import crash_then_join

COMPILED: dict[str, Any] = {"train": {"compile": nudged.__name__}, "data": {"even": [4, 6]}}
"""Samples of one size, since every process compiles every layer for each size."""


def test_layers_that_move_are_compiled_where_they_come_to(cradle: Cradle, tmp_path: Path) -> None:
    """The remaining member, and then the newcomer, get layers that they had not compiled."""
    crash_then_join(cradle, tmp_path, **COMPILED)
