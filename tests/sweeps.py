"""A part of pytest's set-up: sweeps over drawn cases. Every run tries the first of them, and one with `--deep` all."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TypeVar

import pytest

__all__ = ["some"]

Case = TypeVar("Case")
_deep = False


def pytest_addoption(parser: pytest.Parser) -> None:
    """Called by pytest before it reads its command line."""
    parser.addoption("--deep", action="store_true", help="try all cases of the sweeps (tests/sweeps.py), not a few")


def choose_cases(config: pytest.Config) -> None:
    """Take the option, before any test module is imported."""
    global _deep
    _deep = config.getoption("--deep")


def some(cases: Iterable[Case], count: int) -> list[Case]:
    """Return the first `count` cases for `pytest.mark.parametrize`; all of them in a run with `--deep`."""
    return list(cases if _deep else islice(cases, count))
