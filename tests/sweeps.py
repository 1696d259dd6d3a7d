"""A part of pytest's set-up: sweeps over cases. Every run tries a part of them, and one with `--deep` all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, islice, product
from typing import Any, TypeVar

import pytest

__all__ = ["crossed", "some"]

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


def crossed(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cases with each value of each axis at least once, in turn; all combinations in a run with `--deep`."""
    if _deep:
        return list(product(*axes))
    turns = [cycle(axis[shift:] + axis[:shift]) for shift, axis in enumerate(map(list, axes))]
    return [tuple(map(next, turns)) for _ in range(max(map(len, axes)))]
