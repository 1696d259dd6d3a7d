"""Fixtures and settings of all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.forks import (
    forked_servers,  # noqa: F401 (a fixture)
    programs,  # noqa: F401 (a fixture)
    server_for_all,
    take_server,
)
from tests.skips import pytest_terminal_summary  # noqa: F401 (pytest calls it at the end of a run)
from tests.sweeps import (
    choose_cases,
    pytest_addoption,  # noqa: F401 (pytest calls it)
)

# A shell that starts the suite in the background makes it ignore Ctrl-C, and every process it starts inherits that; the
# tests that press Ctrl-C would never end.
signal.signal(signal.SIGINT, signal.default_int_handler)


os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that is killed on purpose makes stacks of C++

STATE = tempfile.TemporaryDirectory(prefix="capslog-state-")
"""For the key of the user's marks (`start/named_code`), which tests must not make in his own folder."""
os.environ.setdefault("XDG_STATE_HOME", STATE.name)
CACHE = tempfile.TemporaryDirectory(prefix="capslog-cache-")
"""For profiles: one that code of yesterday estimated would hide what the code of today does."""
if "PYTEST_XDIST_WORKER" not in os.environ:  # which shares the folder of the process that began the tests
    os.environ["XDG_CACHE_HOME"] = CACHE.name

LONGEST = (
    "profiling/test_estimate.py",
    "elastic/test_live_plans.py",
    "elastic/test_live.py",
    "model/capture/test_exporting.py",
    "profiling/test_rehearsal.py",
    "profiling/test_measure.py",
    "rig/tests/commands/test_program.py",
    "rig/tests/search/test_explore.py",
    "engine/test_grains_captured.py",
    "commands/test_largest.py",
    "test_faults.py",
    "test_fuzz.py",
    "rig/tests/commands/test_chaos.py",
    "test_second_device.py",
    "engine/test_graphs.py",
    "engine/test_detr.py",
    "test_recipes.py",
    "engine/test_step.py",
    "memory/test_truth.py",
    "elastic/host/test_host.py",
    "engine/test_parts.py",
    "test_cli.py",
    "model/test_capture.py",
    "training/test_run.py",
    "model/capture/test_assign.py",
    "engine/test_replicated_updates.py",
    "start/test_choices.py",
    "start/test_prepare.py",
    "elastic/store/test_etcd_store.py",
    "profiling/test_trim.py",
    "start/test_elastic_host.py",
    "training/test_checkpoint_writer.py",
    "api/test_planning.py",
    "fitting/test_module.py",
    "model/test_hugging_face_together.py",
    "engine/test_recipe_loss_scale.py",
    "profiling/test_inference.py",
    "profiling/estimation/test_divisible.py",
    "engine/test_stage_segments.py",
    "decoding/test_decoder.py",
    "base/test_supervisor.py",
    "model/capture/test_trial_step_memory.py",
    "test_notebook.py",
    "engine/test_captured.py",
    "api/test_fits.py",
    "test_gpu_script.py",
    "elastic/test_live_notices.py",
    "training/test_layer_state.py",
    "elastic/test_launchers.py",
)
"""Files that take most processor seconds, the longest first, and those that wait much. They come first, so that none of
them is what the end waits for."""


@pytest.fixture(autouse=True)
def _no_server_begun_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `capslog train` in the suite's process start its fork server when it needs one: most tests refuse a config,
    and each had another process import torch until then.
    """
    train = sys.modules.get("varuna_capslog.commands.train")
    if train is not None:
        monkeypatch.setattr(train, "begun_early", contextlib.nullcontext)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the controller's fork server to a worker of pytest-xdist, so that all workers fork from one process."""
    node.workerinput["fork_server"] = server_for_all()


def pytest_configure(config: pytest.Config) -> None:
    """Take the option of sweeps; in a worker of pytest-xdist also the controller's fork server."""
    choose_cases(config)
    if hasattr(config, "workerinput"):
        take_server(config.workerinput["fork_server"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of the longest files first."""
    first = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path, len(first)))


def pytest_sessionstart() -> None:
    """Disable garbage collection while tests are collected: what is made then lives as long as the session, and looking
    for garbage took a quarter of the collection's time.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    """Enable garbage collection for the test run, except for objects of the collected tests and imported libraries, and
    less often than by default.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


_SUITE, _end = os.getpid(), os._exit


def _end_of_a_child(status: int) -> NoReturn:
    """Refuse `os._exit` in the suite's process: it would end the suite with that status; 0 would look like a pass."""
    if os.getpid() == _SUITE:
        raise AssertionError(f"os._exit({status}) in the process that runs the tests")
    _end(status)


os._exit = _end_of_a_child
