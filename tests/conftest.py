"""What holds for all tests."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from tests.skips import pytest_terminal_summary  # noqa: F401 (pytest calls it at the end of a run)

# A shell that starts the suite in the background makes it ignore Ctrl-C, and every process it starts inherits that; the
# tests that press Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that is killed on purpose makes stacks of C++

_SUITE, _end = os.getpid(), os._exit


def _end_of_a_child(status: int) -> NoReturn:
    """Code that ends its process at once would end the suite with that status, 0 included, and look like a pass."""
    if os.getpid() == _SUITE:
        raise AssertionError(f"os._exit({status}) in the process that runs the tests")
    _end(status)


os._exit = _end_of_a_child
