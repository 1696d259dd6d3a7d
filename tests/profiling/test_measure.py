"""Whole profiles: all runs in one launch, memory limits kept, failures named, no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.profiling.workloads import Deadly, Equal, Megabytes, Unlucky
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.config.reading import load_config
from varuna_capslog.model.layer import low_bytes
from varuna_capslog.model.trace import ShapeTable
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.runs import stage_runs
from varuna_capslog.profiling import cache, launches
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.launches import BoundTable
from varuna_capslog.profiling.measure import profile_config, profile_workload
from varuna_capslog.profiling.trim import skeleton
from varuna_capslog.profiling.worker import WorkerGroup

SIZE = 4

pytestmark = pytest.mark.usefixtures("imported_once")


@pytest.fixture(scope="module")
def measured() -> tuple[Profile, list[tuple[int, int, str]]]:
    calls: list[tuple[int, int, str]] = []
    profile = profile_workload(
        Megabytes(),
        RunConditions(microbatch_size=SIZE),
        workers=2,
        progress=lambda done, total, text: calls.append((done, total, text)),
    )
    return profile, calls


def test_one_launch_carries_out_all_runs(measured: tuple[Profile, list[tuple[int, int, str]]]) -> None:
    profile, calls = measured
    assert sorted(row.layers for row in profile.observations) == sorted(stage_runs(7))
    peak = {row.layers: row.peak_bytes for row in profile.observations}
    assert [layer.isolated_bytes for layer in profile.layers] == [peak[i, i + 1] for i in range(7)]
    assert [layer.added_bytes for layer in profile.layers[1:]] == [
        peak[i - 1, i + 1] - peak[i - 1, i] for i in range(1, 7)
    ]
    assert [(done, total) for done, total, _ in calls] == [(done, 13) for done in range(14)]
    assert "attend.0 + feed.0" in [text for _, _, text in calls]
    assert all(layer.forward_seconds and layer.backward_seconds is not None for layer in profile.layers)


def test_a_profile_says_what_it_holds_for(measured: tuple[Profile, list[tuple[int, int, str]]]) -> None:
    profile, _ = measured
    conditions = profile.conditions
    expected = {
        "device": "cpu",
        "dtype": "float32",
        "microbatch_size": SIZE,
        "input": {"tokens": [SIZE, 96]},
        "optimizer": "adamw",
        "schedule": "varuna",
        "recompute": True,
        "stage_inputs": "host",
        "peak_source": "cpu allocator events",
        "torch": torch.__version__,
    }
    assert expected.items() <= conditions.items()
    assert profile.source == "measured"
    assert profile.model == "megabytes"
    (shared,) = profile.shared
    assert (shared.name, shared.bytes, shared.layers) == ("embed.table", 512 * 192 * 4, (0, 6))
    assert Profile.from_json(profile.to_json()) == profile


def test_bounds_are_above_what_runs_take(measured: tuple[Profile, list[tuple[int, int, str]]]) -> None:
    profile, _ = measured
    chain = skeleton(Megabytes())
    table = BoundTable(chain, ShapeTable(chain).boundaries(Megabytes().profile_inputs(SIZE)), "cpu", "float32")
    for row in profile.observations:
        assert row.peak_bytes <= table.bound_bytes(*row.layers) <= 6 * row.peak_bytes, row.layers


def test_bounds_count_weights_of_16_bits_beside_their_masters() -> None:
    chain, inputs = skeleton(Megabytes()), Megabytes().profile_inputs(SIZE)
    wide, low = (
        BoundTable(chain, ShapeTable(chain).boundaries(inputs), "cpu", "bfloat16", weights=weights).bound_bytes(0, 7)
        for weights in ("float32", "bfloat16")
    )
    modules = [layer.module for layer in chain.layers]
    assert low - wide == sum(low_bytes(module, "bfloat16")[0] for module in modules) > 0


def test_runs_that_may_not_fit_are_named_and_nothing_is_tried() -> None:
    chain = skeleton(Megabytes())
    table = BoundTable(chain, ShapeTable(chain).boundaries(Megabytes().profile_inputs(SIZE)), "cpu", "float32")
    bounds = {run: table.bound_bytes(*run) for run in stage_runs(7)}
    largest, second = sorted(bounds.values(), reverse=True)[:2]
    assert bounds[3, 5] == largest
    done = []
    with pytest.raises(DoesNotFit, match=r"none was tried: feed\.0 \+ feed\.1 \(up to .*\); free memory"):
        profile_workload(
            Megabytes(),
            RunConditions(microbatch_size=SIZE),
            progress=lambda count, total, text: done.append(count),
            free_bytes=lambda device: second,
        )
    assert done == []


def test_only_as_many_runs_are_under_way_as_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Equal(length=3, width=256)
    chain = skeleton(workload)
    table = BoundTable(chain, ShapeTable(chain).boundaries(workload.profile_inputs(8)), "cpu", "float32")
    largest = max(table.bound_bytes(*run) for run in stage_runs(3))
    under_way: list[int] = []
    original = WorkerGroup.start

    def start(group: Any, worker: int, task: Any) -> None:
        original(group, worker, task)
        under_way.append(sum(bound for _, bound in group._doing.values()))

    monkeypatch.setattr(WorkerGroup, "start", start)
    profile_workload(workload, RunConditions(microbatch_size=8), workers=2, free_bytes=lambda device: largest)
    assert len(under_way) == 5
    assert max(under_way) <= largest


def test_a_worker_that_dies_names_its_run() -> None:
    with pytest.raises(
        CapslogError, match=r"the run of (layer\.2 \+ )?deadly failed: its process was killed by SIGKILL"
    ):
        profile_workload(Deadly(), RunConditions(microbatch_size=2))


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(CapslogError, match=r"the run of .*layer\.1 failed: RuntimeError: no loss today"):
        profile_workload(Unlucky(length=2), RunConditions(microbatch_size=2))


LOCAL = """
import threading
from multiprocessing import forkserver
from tests.profiling.workloads import Equal
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.measure import profile_workload

def local():
    class Local(Equal):
        pass
    return Local(length=2, width=16)

def measured(workload):
    found = profile_workload(workload, RunConditions(microbatch_size=2))
    return [(row.layers, row.peak_bytes) for row in found.observations]

found = measured(local())
print(len(found))
assert found == measured(Equal(length=2, width=16))
assert forkserver._forkserver._forkserver_pid is None, "a process with one thread needs no server that imports torch"
thread = threading.Thread(target=threading.Event().wait, daemon=True)
thread.start()
assert measured(local()) == measured(Equal(length=2, width=16))
assert forkserver._forkserver._forkserver_pid is not None, "a thread would be missing in a fork"
"""


def test_a_workload_that_no_process_can_be_sent_is_measured_as_others_are() -> None:
    """Classes that are typed into an interpreter have no file.

    The test needs a separate process: torch refuses gradients to forks of a process that ever ran a backward on fake
    tensors, and the test failed after those of estimates.
    """
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", LOCAL], cwd=root, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout.split()) == (0, ["3"]), done.stderr


def test_cuda_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(CapslogError, match="for device cuda, but torch can use no such device here"):
        profile_workload(Equal(), RunConditions(device="cuda"))


def config_workload(config: Any) -> Equal:
    return Equal(length=2, width=int(config.model["width"]))


def test_a_configs_profile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "run.yaml"
    file.write_text(f"workload: {__name__}:config_workload\nmodel: {{width: 32}}\ndevice: cpu\n")
    calls: list[int] = []
    config = load_config(file)
    first = profile_config(config, workers=1, progress=lambda done, total, text: calls.append(done))
    assert calls == [0, 1, 2, 3]
    assert profile_config(config, workers=1, progress=lambda done, total, text: calls.append(done)) == first
    assert len(calls) == 4
    (kept,) = cache.folder().iterdir()
    kept.write_text("{")
    again = profile_config(config, workers=1, progress=lambda done, total, text: calls.append(done))
    assert len(calls) == 8
    assert again.column("isolated_bytes") == first.column("isolated_bytes")
    wider = profile_config(load_config(file, ["model.width=64"]), workers=1)
    assert wider.layers[0].isolated_bytes > first.layers[0].isolated_bytes


def test_what_is_free_is_a_number_of_this_machine() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < launches.free_bytes(torch.device("cpu")) <= total


@pytest.mark.parametrize(("number", "threads"), [(signal.SIGINT, 2), (signal.SIGKILL, 1)])
def test_no_process_outlives_an_interrupted_profile(tmp_path: Path, number: signal.Signals, threads: int) -> None:
    """Workers with one thread are forks of the process itself, those with more are forks of a server."""
    script = tmp_path / "script.py"
    script.write_text(
        "import threading\n"
        "from tests.profiling.workloads import Equal\n"
        "from varuna_capslog.profiling.conditions import RunConditions\n"
        "from varuna_capslog.profiling.measure import profile_workload\n"
        "if __name__ == '__main__':\n"
        f"    for _ in range({threads} - 1):\n"
        "        threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "    profile_workload(Equal(length=40, width=512), RunConditions(microbatch_size=256),\n"
        "                     progress=lambda done, total, text: print(done, flush=True))\n"
    )
    marker = f"{tmp_path.name}-{os.getpid()}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CAPSLOG_TEST_MARKER": marker}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == [b"0\n", b"1\n"]
    assert len(marked(marker)) >= 2 + threads  # the process itself, the server, a worker and its neighbour
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as the terminal sends it
    else:
        process.kill()
    process.wait(20)
    deadline = time.monotonic() + 10
    while marked(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked(marker) == []


def marked(marker: str) -> list[int]:
    """Return the processes whose environment holds the marker."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
        except OSError:
            continue
    return pids
