"""What the tests of profiles share."""

from __future__ import annotations

from multiprocessing import forkserver

import pytest

from tests.forks import prepared_context


@pytest.fixture(scope="session")
def imported_once() -> None:
    """A server for the processes that has imported what an optimizer does, which takes each of them two seconds."""
    prepared_context()
    forkserver.ensure_running()
