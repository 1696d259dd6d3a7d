"""`capslog report`: one page on what a run did."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from varuna_capslog.commands.arguments import AsJson, RunDirectory, print_json, run_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from varuna_capslog.config.reading import Config

__all__ = ["report"]


def report(run_dir: RunDirectory, as_json: AsJson = False) -> None:
    """Write RUN_DIR/report: peaks predicted and measured, the schedule, curves and sample predictions."""
    settings = run_config(run_dir)  # says so in one sentence where this is no run

    from varuna_capslog.base.errors import CapslogError
    from varuna_capslog.reports import write_report
    from varuna_capslog.reports.predictions import draw_samples

    try:
        draw_samples(settings)
    except CapslogError as error:
        # a page without pictures is better than none, and says that they are missing
        typer.echo(f"note: no sample predictions: {error}", err=True)
    page = write_report(run_dir, _rehearse)
    if as_json:
        print_json({"report": str(page)})
    else:
        typer.echo(f"report: {page}")


def _rehearse(config: Config, cuts: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> list[int]:
    from varuna_capslog.profiling.rehearsal import rehearse_config

    return rehearse_config(config, cuts, shapes)
