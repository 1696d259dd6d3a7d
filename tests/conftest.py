"""What holds for all tests."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

import pytest

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

LONGEST = (
    "tests/test_faults.py",
    "tests/commands/test_chaos.py",
    "tests/profiling/test_estimate.py",
    "tests/profiling/test_trim.py",
    "tests/start/test_elastic_host.py",
    "tests/rig/search/test_forgetting.py",
    "tests/profiling/test_measure.py",
    "tests/engine/test_detr.py",
    "tests/start/test_joint_start.py",
    "tests/elastic/host/test_host.py",
    "tests/elastic/test_live.py",
    "tests/elastic/test_launchers.py",
    "tests/elastic/store/test_etcd_store.py",
    "tests/profiling/test_rehearsal.py",
    "tests/engine/test_step.py",
    "tests/test_torchrun.py",
    "tests/start/test_given_plan.py",
    "tests/profiling/test_launches.py",
    "tests/memory/test_truth.py",
    "tests/model/test_interop.py",
)
"""Files of more than 20 seconds: they come first, so that no process of a parallel run is left alone with one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONGEST)))
