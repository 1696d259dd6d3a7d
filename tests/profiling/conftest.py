"""Fixtures of the tests of profiles."""

from __future__ import annotations

from multiprocessing import forkserver

import pytest

from tests.forks import prepared_context


@pytest.fixture(scope="session")
def imported_once() -> None:
    """Start a process server that has already imported an optimizer's modules, which takes each process two seconds."""
    prepared_context()
    forkserver.ensure_running()
