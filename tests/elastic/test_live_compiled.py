"""Real members whose layers are compiled: a crash and a morph change no bit of what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.elastic.backend import nudged
from tests.elastic.live import Cradle
from tests.elastic.scenarios import crash_then_join

COMPILED: dict[str, Any] = {"train": {"compile": nudged.__name__}, "data": {"even": [4, 6]}}
"""Of one size, since every process compiles every layer for each."""


def test_layers_that_move_are_compiled_where_they_come_to(cradle: Cradle, tmp_path: Path) -> None:
    """Who is left, and then the newcomer, have layers that they had not compiled."""
    crash_then_join(cradle, tmp_path, **COMPILED)
