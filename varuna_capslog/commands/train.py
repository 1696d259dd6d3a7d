"""`capslog train`: profile, plan, then start and watch the workers of one run on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands.arguments import ConfigFile, Overrides, option
from varuna_capslog.commands.host import prepare_and_print, run_elastic

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config

__all__ = ["run_workers", "train"]


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None,
        option(
            "Workers to start here; the pipeline gets as many devices as replicas leave.",
            "pipeline.devices x pipeline.replicas",
            "--nproc",
            min=1,
        ),
    ] = None,
) -> None:
    """Train over the planned pipeline. Ctrl-C stops after the step; the same command continues."""
    from varuna_capslog.base.supervisor import reserve
    from varuna_capslog.config.reading import load_config
    from varuna_capslog.elastic.host.options import HostOptions
    from varuna_capslog.elastic.member.held_state import recover

    settings = load_config(config, overrides or ())
    if nproc is not None and nproc != settings.world_size:
        replicas = settings.pipeline.replicas
        if nproc % replicas:
            raise CapslogError(
                f"--nproc {nproc} is not divisible by pipeline.replicas={replicas}; replicas have equally many workers"
            )
        settings = load_config(config, [*(overrides or ()), f"pipeline.devices={nproc // replicas}"])
    with reserve(settings.run_dir):  # from here on: another run's plan must not change under its workers
        prepare_and_print(settings)
        if settings.elastic.enabled:
            options = HostOptions(settings.run_dir, num_workers=settings.world_size)
            run_elastic(settings, options, "the same command continues")
            return
        if settings.resume == "auto":
            recover(settings.run_dir)  # an elastic run may have stopped here between two checkpoints
        run_workers(settings)


def run_workers(settings: Config, *flags: str) -> None:
    """Starts the workers of a run here, with these flags, and watches them until they end."""
    from varuna_capslog.base.supervisor import Supervisor

    Supervisor(
        settings.run_dir,
        [sys.executable, "-m", "varuna_capslog.start.worker", str(settings.run_dir), *flags],
        settings.world_size,
        environment={"OMP_NUM_THREADS": str(settings.train.threads)},
        say=lambda line: typer.echo(f"capslog: {line}", err=True),
    ).run()
