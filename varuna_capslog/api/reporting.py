"""The report page of a run with drawn samples, and drawn predictions: `capslog report` and `predict`, and
`TrainedRun.report`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.extras import needed

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config

__all__ = ["draw_predictions", "write_run_report"]

_NUM_SAMPLES = 8


def write_run_report(config: Config) -> tuple[Path, str | None]:
    """Writes the page into the folder of a run: its path, and a sentence where sample predictions are missing.

    Raises:
        CapslogError: matplotlib is not installed (the extra `report` brings it); the folder cannot be read or written.
    """
    with needed("a report"):
        from varuna_capslog.reports.page import write_report

    problem = None
    try:
        _draw_samples(config)
    except CapslogError as error:
        problem = f"no sample predictions: {error}"  # a page without pictures is better than none
    return write_report(config.run_dir, _rehearse), problem


def _rehearse(config: Config, cuts: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> list[int]:
    from varuna_capslog.profiling.rehearsal import rehearse_config

    return rehearse_config(config, cuts, shapes)


def draw_predictions(config: Config, images: Sequence[Path], out: Path) -> list[Path]:
    """Runs the best checkpoint (the newest, if the run was never evaluated) on pictures; returns the drawn ones in
    `out`.

    Raises:
        CapslogError: no checkpoint, one of another model, or a picture that cannot be read.
    """
    from varuna_capslog.model.workload import load_workload
    from varuna_capslog.training.checkpoint import best_checkpoint, load_chain

    workload = load_workload(config)
    checkpoint = best_checkpoint(config.run_dir / "checkpoints")
    chain = workload.build_chain()
    load_chain(checkpoint, chain)
    return workload.predict(chain, images, out)


def _draw_samples(config: Config) -> None:
    """Draws a few validation pictures into `predictions/`, replacing older ones, where the run has a checkpoint and
    its workload has such pictures.
    """
    from varuna_capslog.model.workload import load_workload

    if not any((config.run_dir / "checkpoints").glob("step-*")):
        return
    samples = load_workload(config).sample_files(_NUM_SAMPLES)
    if samples:
        folder = config.run_dir / "predictions"
        shutil.rmtree(folder, ignore_errors=True)
        draw_predictions(config, samples, folder)
