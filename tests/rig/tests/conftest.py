"""A relay for a module's tests."""

from __future__ import annotations

import pytest

from tests.rig.relay import Line, Relay
from tests.secret import SECRET


@pytest.fixture(scope="module")
def relay():
    found = Relay(SECRET)
    yield found
    found.close()


@pytest.fixture
def line(relay):
    found = Line(relay.address, SECRET)
    yield found
    found.close()
