"""The three orders of launches: their runs, their counts, and their ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.profiling.workloads import Deadly, Equal, Unlucky
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.config.reading import load_config
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.runs import capslog_partitionings, mcap_partitionings, stage_runs
from varuna_capslog.profiling import worker as worker_module
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.launches import LaunchTimes, in_capslog_order
from varuna_capslog.profiling.measure import profile_workload
from varuna_capslog.profiling.trim import TrimmedRun
from varuna_capslog.profiling.worker import Task, WorkerGroup, Workers

LAYERS, GPUS, WIDTH, SAMPLES = 3, 3, 64, 2048
BOUNDARY = SAMPLES * WIDTH * 4


class Wide(Equal):
    """A cut's activations are 32 times a layer's weights: the backward of a stage is its peak."""

    def __init__(self) -> None:
        super().__init__(LAYERS, WIDTH)


class Staggered(WorkerGroup):
    """Worker group without processes: a run ends at once, and the next worker is ready only after it."""

    def __enter__(self) -> Staggered:
        self._processes = [None] * self._count  # type: ignore[list-item]
        self._to_come = list(range(len(self._processes)))
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, worker: int, task: Task) -> None:
        self.idle.remove(worker)
        self._doing[worker] = task

    def finished(self) -> Iterator[tuple[int, Task, Any]]:
        if not self._doing:
            self.idle.append(self._to_come.pop(0))
        for worker, task in list(self._doing.items()):
            del self._doing[worker]
            self.idle.append(worker)
            yield worker, task, task[0]


@pytest.fixture(scope="module")
def orders() -> dict[str, Profile]:
    return {
        order: profile_workload(Wide(), RunConditions(microbatch_size=SAMPLES), workers=GPUS, order=order)
        for order in ("packed", "capslog", "mcap")
    }


def test_capslogs_launches_read_the_same_bytes_as_one_launch(orders: dict[str, Profile]) -> None:
    packed, capslog = orders["packed"], orders["capslog"]
    for column in ("isolated_bytes", "added_bytes", "static_bytes", "saved_bytes"):
        assert [getattr(layer, column) for layer in capslog.layers] == [
            getattr(layer, column) for layer in packed.layers
        ]
    assert [row.layers for row in capslog.observations] == [row.layers for row in packed.observations]


def test_mcaps_whole_pipelines_read_the_same_but_for_messages_under_way(orders: dict[str, Profile]) -> None:
    """On a CPU messages count. A trimmed stage's neighbour runs ahead, so that one more gradient travels to it; only
    the stage with neighbours on both sides sends any. The last layer's M_a is read from a stage that has no neighbour
    at all, and lacks two.
    """
    packed, mcap = orders["packed"], orders["mcap"]
    weights = WIDTH * (WIDTH + 1) * 4
    alone = [
        mcap_bytes - packed_bytes
        for mcap_bytes, packed_bytes in zip(mcap.column("isolated_bytes"), packed.column("isolated_bytes"), strict=True)
    ]
    assert alone[1:-1] == [-BOUNDARY] * (LAYERS - 2)
    assert abs(alone[0]) <= weights
    assert abs(alone[-1]) <= 8
    added = [
        mcap_bytes - packed_bytes
        for mcap_bytes, packed_bytes in zip(
            mcap.column("added_bytes")[1:], packed.column("added_bytes")[1:], strict=True
        )
    ]
    assert all(abs(difference) <= 4 * weights for difference in added[:-1])
    assert abs(added[-1] + 2 * BOUNDARY) <= 4 * weights
    assert [row.layers for row in mcap.observations if row.layers[0] == 0] == [(0, end) for end in range(1, LAYERS + 1)]


def test_launches_are_counted_and_timed(orders: dict[str, Profile]) -> None:
    told = {order: profile.conditions["profiling"] for order, profile in orders.items()}
    assert told["packed"]["launches"] == 1
    assert told["capslog"]["launches"] == told["capslog"]["rounds"] == len(capslog_partitionings(LAYERS, GPUS))
    assert told["mcap"]["launches"] == told["mcap"]["rounds"] == len(mcap_partitionings(LAYERS, GPUS)) == LAYERS
    assert told["packed"]["stage_runs"] == told["capslog"]["stage_runs"] == 2 * LAYERS - 1
    assert -(-told["packed"]["stage_runs"] // GPUS) <= told["packed"]["rounds"]
    for order, report in told.items():
        assert report["order"] == order
        assert report["workers"] == GPUS
        assert report["mean_seconds"] * report["rounds"] == pytest.approx(report["total_seconds"], abs=0.01)
        assert 0 < report["total_seconds"] <= report["end_to_end_seconds"]
    assert [profile.conditions["order"] for profile in orders.values()] == list(orders)


def test_a_worker_that_is_ready_early_leaves_the_others_their_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "WorkerGroup", Staggered)
    conditions = RunConditions("cpu", 1, {})
    workers = Workers(Wide, [torch.device("cpu")] * GPUS, 1, (), conditions, lambda device: 1 << 30, "abc")
    tasks = [(TrimmedRun(first, end, LAYERS, ()), 1) for first, end in stage_runs(LAYERS)]
    clock = LaunchTimes()
    measured = in_capslog_order(tasks, workers, clock, lambda *told: None)
    assert sorted(measured) == sorted((*run, None) for run in stage_runs(LAYERS))
    assert [len({worker for worker, _, _ in runs}) for runs in clock.launches] == [
        len(launch.measured) for launch in capslog_partitionings(LAYERS, GPUS)
    ]


def test_the_clock_adds_launches_up() -> None:
    clock = LaunchTimes()
    clock.launches = [[(0, 1.0, 2.0), (1, 1.5, 4.0)], [(0, 10.0, 11.0), (0, 11.0, 12.0), (1, 10.0, 10.5)]]
    report = clock.report("packed", 2)
    assert (report["launches"], report["stage_runs"], report["rounds"]) == (2, 5, 3)
    assert (report["total_seconds"], report["mean_seconds"]) == (5.0, pytest.approx(5 / 3, abs=1e-3))


def test_what_an_order_cannot_do_is_said_before_anything_starts() -> None:
    for order in ("capslog", "mcap"):
        with pytest.raises(CapslogError, match="use at least 3, or the packed runs"):
            profile_workload(Wide(), workers=2, order=order)
    with pytest.raises(DoesNotFit, match=r"whole pipeline .* profile\.order=capslog or packed keeps"):
        profile_workload(Wide(), workers=GPUS, order="mcap", free_bytes=lambda device: 1000)
    with pytest.raises(CapslogError, match="order is 'capslg'"):
        profile_workload(Wide(), order="capslg")


def test_a_stage_that_dies_is_named() -> None:
    with pytest.raises(CapslogError, match=r"a profiling worker failed: (stage 2:|the process of stage 2 died)"):
        profile_workload(Deadly(), RunConditions(microbatch_size=2), workers=GPUS, order="mcap")


def test_the_stage_that_failed_is_told_and_not_those_that_lost_it() -> None:
    with pytest.raises(CapslogError, match=r"a profiling worker failed: stage 2: RuntimeError: no loss today; nothing"):
        profile_workload(Unlucky(LAYERS), RunConditions(microbatch_size=2), workers=GPUS, order="mcap")


def test_the_order_is_a_key_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("workload: a:b\n")
    assert load_config(path).profile.order == "packed"
    assert load_config(path, ["profile.order=mcap"]).profile.order == "mcap"
    with pytest.raises(CapslogError, match=r"profile\.order"):
        load_config(path, ["profile.order=sorted"])
