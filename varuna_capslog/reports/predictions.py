"""Pictures with the predictions of a run's best checkpoint, on the user's files or on samples of the validation data.

`capslog predict` and `capslog report` call it. The model runs on one device here; nothing is
trained.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from varuna_capslog.config.settings import Config

__all__ = ["draw", "draw_samples"]

_SAMPLES = 8


def draw(config: Config, images: Sequence[Path], out: Path) -> list[Path]:
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


def draw_samples(config: Config) -> list[Path]:
    """Draws a few validation pictures into `predictions/`, replacing older ones; [] where there is nothing to draw
    on.
    """
    from varuna_capslog.model.workload import load_workload

    if not any((config.run_dir / "checkpoints").glob("step-*")):
        return []
    samples = load_workload(config).sample_files(_SAMPLES)
    if not samples:
        return []
    folder = config.run_dir / "predictions"
    shutil.rmtree(folder, ignore_errors=True)
    return draw(config, samples, folder)
