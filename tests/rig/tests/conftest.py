"""A relay for a module's tests."""

from __future__ import annotations

import pytest

from tests.rig.relay import Line, Relay
from tests.secret import SECRET


@pytest.fixture(scope="module")
def relay():
    relay_process = Relay(SECRET)
    yield relay_process
    relay_process.close()


@pytest.fixture
def line(relay):
    relay_line = Line(relay.address, SECRET)
    yield relay_line
    relay_line.close()
