"""`capslog train`: profile, plan, then start and watch the workers of one run on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from varuna_capslog.commands.arguments import ConfigFile, Overrides, print_plan

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config

__all__ = ["train"]


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            min=1,
            help="Workers to start here; the pipeline gets as many devices as replicas leave.",
            show_default="pipeline.devices x pipeline.replicas",
        ),
    ] = None,
) -> None:
    """Train over the planned pipeline. Ctrl-C stops after the step; the same command continues."""
    from varuna_capslog.base.errors import CapslogError
    from varuna_capslog.base.supervisor import Supervisor, reserve
    from varuna_capslog.config.reading import load_config
    from varuna_capslog.elastic.member.held_state import recover
    from varuna_capslog.profiles.record import read_profile
    from varuna_capslog.start.prepare import prepare_run

    settings = load_config(config, overrides or ())
    if nproc is not None and nproc != settings.world_size:
        replicas = settings.pipeline.replicas
        if nproc % replicas:
            raise CapslogError(
                f"--nproc {nproc} is not divisible by pipeline.replicas={replicas}; replicas have equally many workers"
            )
        settings = load_config(config, [*(overrides or ()), f"pipeline.devices={nproc // replicas}"])
    with reserve(settings.run_dir):  # from here on: another run's plan must not change under its workers
        plan = prepare_run(settings)
        profile_path = settings.run_dir / "profile.json"
        print_plan(plan, read_profile(profile_path) if plan.profile_digest else None)
        for note in plan.notes:
            typer.echo(f"note: {note}", err=True)
        if settings.elastic.enabled:
            _train_elastic(settings)
            return
        if settings.resume == "auto":
            recover(settings.run_dir)  # an elastic run may have stopped here between two checkpoints
        Supervisor(
            settings.run_dir,
            [sys.executable, "-m", "varuna_capslog.start.worker", str(settings.run_dir)],
            settings.world_size,
            environment={"OMP_NUM_THREADS": str(settings.train.threads)},
            say=lambda line: typer.echo(f"capslog: {line}", err=True),
        ).run()


def _train_elastic(settings: Config) -> None:
    from varuna_capslog.base.supervisor import Interrupted
    from varuna_capslog.elastic.host.options import HostOptions
    from varuna_capslog.elastic.host.terminal import Terminal
    from varuna_capslog.start.elastic_host import run_here

    with Terminal(settings.run_dir, settings.train.max_steps) as terminal:
        end = run_here(settings, HostOptions(settings.run_dir, num_workers=settings.world_size, say=terminal.say))
    if end.how == "left":
        where = f"the same command continues the run in {settings.run_dir}"
        raise Interrupted(f"all devices have left, and the run is parked; {where}", 143)
