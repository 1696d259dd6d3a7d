"""`engine: varuna`: DETR's step equals the unsplit model's, and a run is the same run on either engine."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.engine import detr
from tests.engine.compare import gradient_error, merged
from tests.engine.layouts import Cuts
from tests.engine.pool import WorkerPool
from tests.varuna_plugin import engines

oracle = functools.cache(functools.partial(detr.plain, seed=7))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("shared heads", Cuts((0, 8, 9, 10), (0, 1, 2, 3))),
        ("shared heads", Cuts((0, 7), (0, 1), 2)),
        ("dilated", Cuts((0, 1, 5), (0, 1, 2))),
        ("batch norm", Cuts((0, 1, 2), (0, 1, 2))),
    ],
)
def test_a_detr_step_equals_the_unsplit_models(pool: WorkerPool, model: str, layout: Cuts) -> None:
    results = pool.run(engines.detr_step, layout.world_size, model, layout)
    loss, gradients = oracle(model)
    assert [result["loss"] for result in results] == [pytest.approx(loss, rel=1e-5)] * layout.world_size
    norm = sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5
    assert results[0]["norm"] == pytest.approx(norm, rel=1e-5)
    error, worst = gradient_error(merged(results, "gradients"), gradients)
    assert error <= 1e-5, f"{worst}: {error:.2e}"


def config(folder: Path, engine: str, steps: int) -> dict[str, Any]:
    return {
        "workload": "tests.engine.workload:workload",
        "engine": engine,
        "run_dir": str(folder),
        "data": {"samples": 12},
        "model": {"dropout": 0.2},
        "train": {"max_steps": steps, "minibatch_size": 6, "microbatch_size": 2, "lr": 1e-3, "checkpoint_every": 2},
        "pipeline": {"devices": 3},
    }


def test_a_run_goes_on_with_the_other_engine(pool: WorkerPool, tmp_path: Path) -> None:
    """Four steps on ours; two on Varuna and, from its checkpoint, two on ours under other cuts: the same losses."""
    uninterrupted = pool.run(engines.run, 3, config(tmp_path / "ours", "capslog", 4), [0, 3, 8])[0]
    half = pool.run(engines.run, 3, config(tmp_path / "mixed", "varuna", 2), [0, 4, 9])[0]
    assert half["first"] == 1
    continued = pool.run(engines.run, 3, config(tmp_path / "mixed", "capslog", 4), [0, 6, 7])[0]
    assert continued["first"] == 3
    assert len(continued["losses"]) == 4
    assert continued["losses"] == pytest.approx(uninterrupted["losses"], rel=1e-5)
    assert continued["scores"]["mean"] == pytest.approx(uninterrupted["scores"]["mean"], rel=1e-5)


def test_varuna_continues_what_our_engine_wrote(pool: WorkerPool, tmp_path: Path) -> None:
    uninterrupted = pool.run(engines.run, 3, config(tmp_path / "ours", "capslog", 4), [0, 3, 8])[0]
    pool.run(engines.run, 3, config(tmp_path / "mixed", "capslog", 2), [0, 3, 8])
    continued = pool.run(engines.run, 3, config(tmp_path / "mixed", "varuna", 4), [0, 8, 10])[0]
    assert continued["first"] == 3
    assert continued["losses"] == pytest.approx(uninterrupted["losses"], rel=1e-5)
    assert continued["scores"]["mean"] == pytest.approx(uninterrupted["scores"]["mean"], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "gpipe"}, "has its own schedule"),
        ({"recompute": False}, "always recomputes"),
        ({"stage_inputs": "device"}, "by host memory"),
    ],
)
def test_what_varuna_cannot_do_is_refused(
    pool: WorkerPool, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    values = config(tmp_path, "varuna", 1)
    values["pipeline"] |= change
    with pytest.raises(RuntimeError, match=message):
        pool.run(engines.run, 3, values, [0, 4, 9])
