"""`capslog evaluate`, `predict` and `report`: scores, predictions and the report of a run, from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from varuna_capslog.base.errors import CapslogError, needed
from varuna_capslog.commands import shared

if TYPE_CHECKING:
    from varuna_capslog.base.tables import Table
    from varuna_capslog.config.settings import Config

__all__ = ["evaluate", "predict", "report"]


def evaluate(run_dir: shared.RunDirectory, as_json: shared.AsJson = False, trust: shared.Trust = False) -> None:
    """Score the best checkpoint of a run; RUN_DIR/evaluation.json gets the scores."""
    from varuna_capslog.base import files
    from varuna_capslog.base.supervisor import reserve
    from varuna_capslog.start.local_run import run_workers, worker_starter

    settings = shared.trusted_config(run_dir, trust)
    path = run_dir / "evaluation.json"
    with reserve(run_dir), worker_starter(settings, "--evaluate") as starter:
        path.unlink(missing_ok=True)
        run_workers(settings, shared.tell, starter, _ranks_of(settings))
    scores = files.read_json(path)
    if as_json:
        shared.print_json(scores)
        return
    _scores_table(f"scores of {run_dir}", scores).print()


def _scores_table(title: str, scores: Mapping[str, Any]) -> Table:
    """Return a table of the scores, without those per class. A score of None is undefined on the data."""
    from varuna_capslog.base.tables import Table

    single = {name: value for name, value in scores.items() if not isinstance(value, (dict, list))}
    rows = [[name, _score(value)] for name, value in single.items()]
    unknown = any(value is None for value in single.values())
    notes = ["-: no value on this data; for a COCO score of one size, it has no object of this size"] if unknown else []
    return Table(title, ("score", "value"), rows, left=(0, 1), notes=notes)


def _score(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _ranks_of(settings: Config) -> int | None:
    """Return the number of ranks of the run's newest plan, if any: an elastic run may end with another number."""
    from varuna_capslog.plans.plan import latest_plan

    newest = latest_plan(settings.run_dir)
    if newest is None:
        return None
    return newest[1].num_ranks * (settings.pipeline.replicas if newest[1].short else 1)


def predict(
    run_dir: shared.RunDirectory,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files.", show_default=False)],
    output: Annotated[Path | None, shared.output_option("Folder for the pictures.", "RUN_DIR/predictions")] = None,
    as_json: shared.AsJson = False,
    trust: shared.Trust = False,
) -> None:
    """Draw the predictions of a run's best checkpoint on images; of the newest one if none was evaluated."""
    from varuna_capslog.api.training import draw_predictions

    for image in images:
        if not image.is_file():
            raise CapslogError(f"image {str(image)!r} is not a file; check the path")
    settings = shared.trusted_config(run_dir, trust)
    pictures = draw_predictions(settings, images, output or run_dir / "predictions")
    if as_json:
        shared.print_json([str(picture) for picture in pictures])
        return
    for picture in pictures:
        shared.say(str(picture))


def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR", help="The folder of a run, or of several.", show_default=False)
    ],
    as_json: shared.AsJson = False,
    trust: shared.Trust = False,
) -> None:
    """Write a page on a run: curves, scores, samples, time, peaks predicted and measured. It lies in RUN_DIR/report.
    Of several runs: their curves over one another, in the first one's folder. Without --trust, the page of a run that
    somebody else started is made of its data alone.
    """
    run_dir, *others = run_dirs
    settings = shared.run_config(run_dir)  # raises CapslogError where this is no run
    if others:
        _compare(run_dirs, as_json)
        return

    from varuna_capslog.api.training import write_run_report
    from varuna_capslog.reports.changes import account_of
    from varuna_capslog.start.named_code import check_run

    refusal = None
    try:
        check_run(run_dir, settings, trust)
    except CapslogError as error:
        refusal = str(error)
    page, problem, run = write_run_report(settings, refusal)
    account = account_of(run)
    if problem is not None:
        shared.say(f"note: {problem}", err=True)
    if as_json:
        seconds = None if account is None else dict(account.seconds)
        shared.print_json({"report": str(page), "seconds": seconds})
    else:
        if account is not None:
            shared.say(f"productive: {account.sentence()}")
        shared.say(f"report: {page}")


def _compare(run_dirs: list[Path], as_json: bool) -> None:
    with needed("a report"):
        from varuna_capslog.reports.page import write_comparison
        from varuna_capslog.reports.run import read_run

    page = write_comparison([read_run(folder) for folder in run_dirs])
    if as_json:
        shared.print_json({"report": str(page)})
    else:
        shared.say(f"report: {page}")
