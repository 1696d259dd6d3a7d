"""`capslog predict`: run a trained model on files of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands.arguments import AsJson, RunDirectory, print_json, run_config

__all__ = ["predict"]


def predict(
    run_dir: RunDirectory,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the pictures.", show_default="RUN_DIR/predictions")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw what a run's best checkpoint (the newest one, if it was never evaluated) sees on images."""
    for image in images:
        if not image.is_file():
            raise CapslogError(f"image {str(image)!r} is not a file; check the path")
    settings = run_config(run_dir)

    from varuna_capslog.reports.predictions import draw

    pictures = draw(settings, images, output or run_dir / "predictions")
    if as_json:
        print_json([str(picture) for picture in pictures])
        return
    for picture in pictures:
        typer.echo(str(picture))
