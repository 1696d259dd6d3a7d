"""Report page of a run with drawn samples, and drawn predictions."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError, needed

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.model.chain import Chain
    from varuna_capslog.model.workload import Workload
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.reports.run import RunRecord

__all__ = ["draw_predictions", "peaks_of_stages", "write_run_report"]

_NUM_SAMPLES = 8


def write_run_report(config: Config, refusal: str | None = None) -> tuple[Path, str | None, RunRecord]:
    """Write the report page into the folder of a run. Returns its path, a sentence on what is missing in it (else
    None), and the folder's record.

    refusal: why the code that the config names may not run; the page is then made of the folder's data alone. Raises
    CapslogError where matplotlib or plotly is not installed (the extra `report` brings them), or the folder cannot be
    read or written.
    """
    with needed("a report"):
        from varuna_capslog.reports.page import write_report
        from varuna_capslog.reports.run import read_run

    problems = []

    def rehearse(config: Config, plan: Plan, shapes: Mapping[str, Sequence[int]]) -> list[int]:
        try:
            return peaks_of_stages(config, plan, shapes)
        except (CapslogError, OSError) as error:
            problems.append(f"no peaks predicted at the measured sizes: {error}")
            raise

    try:
        if refusal is None:
            _draw_samples(config)
        else:
            problems.append(f"no new sample predictions, and no peaks predicted at the measured sizes: {refusal}")
    except CapslogError as error:
        problems.append(f"no sample predictions: {error}")  # a page without pictures is better than none
    run = read_run(config.run_dir)
    page = write_report(run, rehearse if refusal is None else None)
    return page, "; ".join(problems) or None, run


def peaks_of_stages(config: Config, plan: Plan, shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the peak bytes of every stage of a run's plan for inputs of these shapes, by a rehearsal of every rank.
    The plan decides choices that the config leaves to its planner, such as the schedule. Raises as
    `profiling/rehearsal.rehearse_plan`.
    """
    from varuna_capslog.profiling.rehearsal import rehearse_plan
    from varuna_capslog.start.ordinary import with_choices_of

    peaks = rehearse_plan(with_choices_of(config, plan), plan, shapes)
    return [peaks[rank] for rank in plan.placement()]


def draw_predictions(config: Config, images: Sequence[Path], out: Path) -> list[Path]:
    """Run the best checkpoint (the newest, if the run was never evaluated) on pictures; return the drawn pictures in
    `out`. Raises CapslogError for no checkpoint, one of another model, or a picture that cannot be read.
    """
    from varuna_capslog.model.workload import load_workload

    workload = load_workload(config)
    return workload.predict(_trained(config, workload), images, out)


def _trained(config: Config, workload: Workload) -> Chain:
    from varuna_capslog.training.checkpoint import best_checkpoint
    from varuna_capslog.training.stored_layers import load_chain

    checkpoint = best_checkpoint(config.run_dir / "checkpoints")
    chain = workload.chosen_chain()
    load_chain(checkpoint, chain)
    return chain


def _draw_samples(config: Config) -> None:
    """Draw a few validation pictures into `predictions/`, replacing older ones, where the run has a checkpoint and its
    workload has such pictures.
    """
    from varuna_capslog.model.workload import load_workload

    if not any((config.run_dir / "checkpoints").glob("step-*")):
        return
    workload, folder = load_workload(config), config.run_dir / "predictions"
    samples = workload.sample_files(_NUM_SAMPLES)
    files.refuse_link(folder)
    if samples:
        shutil.rmtree(folder, ignore_errors=True)
        draw_predictions(config, samples, folder)
    elif (text := workload.sample_text(lambda: _trained(config, workload))) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        files.write_text(folder / "sample.txt", text)
