"""`capslog host`: this machine's part of an elastic run over several machines, one such command on each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna_capslog.commands.arguments import (
    ConfigFile,
    DryRun,
    HostName,
    Machines,
    Overrides,
    StoreAddress,
    Wait,
    print_plan,
)

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config

__all__ = ["check_address", "host"]


def host(
    config: ConfigFile,
    overrides: Overrides = None,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Begin the run: profile and plan it here, and serve its store at HOST:PORT, as the others reach it; "
            "etcd://HOST:PORT[,HOST:PORT...]/PREFIX: keep the store in etcd.",
            show_default=False,
        ),
    ] = None,
    store: StoreAddress = None,
    nnodes: Machines = 1,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="Workers of this machine.", show_default="the config's workers, spread evenly over --nnodes"
        ),
    ] = None,
    name: HostName = None,
    wait: Wait = 600.0,
    dry_run: DryRun = False,
) -> None:
    """Train on several machines that may come and go: the same command on each, one with --serve."""
    from varuna_capslog.base.errors import CapslogError
    from varuna_capslog.base.supervisor import Interrupted
    from varuna_capslog.elastic.host.options import HostOptions
    from varuna_capslog.start.elastic_host import check_elastic, join_run

    if (serve is None) == (store is None):
        raise CapslogError("give either --serve ADDRESS (on one machine) or --store ADDRESS (on all others)")
    check_address(serve or store or "")
    settings, workers = _spread(config, [*(overrides or ()), "elastic.enabled=true"], nnodes, nproc)
    check_elastic(settings)
    if dry_run:
        part = f"join the store at {store}" if store else f"profile, plan and {_begin(serve)}"
        typer.echo(f"would {part}; {workers} worker(s) here, run_dir {settings.run_dir}, {nnodes} machine(s) to begin")
        return
    if store is not None:
        say = lambda line: typer.echo(f"capslog: {line}")  # noqa: E731
        options = HostOptions(settings.run_dir, num_workers=workers, name=name, store=store, say=say)
        end = join_run(settings, options, wait_seconds=wait)
        if end.how == "left":
            raise Interrupted("all workers of this machine have left; the same command joins the run again", 143)
        say("the run has ended")
        return
    assert serve is not None
    _serve(settings, workers, nnodes, serve, name)


def _begin(serve: str | None) -> str:
    from varuna_capslog.elastic.network import SCHEME

    return f"begin a run in the store at {serve}" if str(serve).startswith(SCHEME) else f"serve the store at {serve}"


def _serve(settings: Config, workers: int, nnodes: int, serve: str, name: str | None) -> None:
    from varuna_capslog.base.supervisor import Interrupted, reserve
    from varuna_capslog.elastic.host.options import HostOptions
    from varuna_capslog.elastic.host.terminal import Terminal
    from varuna_capslog.profiles.record import read_profile
    from varuna_capslog.start.elastic_host import run_here
    from varuna_capslog.start.prepare import prepare_run

    with reserve(settings.run_dir):
        plan = prepare_run(settings)
        print_plan(plan, read_profile(settings.run_dir / "profile.json") if plan.profile_digest else None)
        for note in plan.notes:
            typer.echo(f"note: {note}", err=True)
        with Terminal(settings.run_dir, settings.train.max_steps, name) as terminal:
            options = HostOptions(
                settings.run_dir, num_workers=workers, name=name, serve_at=serve, hosts=nnodes, say=terminal.say
            )
            end = run_here(settings, options)
    if end.how == "left":
        where = f"the same commands continue the run in {settings.run_dir}"
        raise Interrupted(f"all devices have left, and the run is parked; {where}", 143)


def _spread(config: Path, overrides: list[str], nnodes: int, nproc: int | None) -> tuple[Config, int]:
    """The config for all machines that begin, and the workers of this one."""
    from varuna_capslog.base.errors import CapslogError
    from varuna_capslog.config.reading import load_config

    settings = load_config(config, overrides)
    replicas, wanted = settings.pipeline.replicas, settings.world_size
    if nproc is None:
        if wanted % nnodes:
            raise CapslogError(f"{wanted} workers cannot be spread evenly over --nnodes {nnodes}; give --nproc")
        return settings, wanted // nnodes
    if nproc * nnodes % replicas:
        raise CapslogError(
            f"--nnodes {nnodes} x --nproc {nproc} is not divisible by pipeline.replicas={replicas}; replicas have "
            "equally many workers"
        )
    return load_config(config, [*overrides, f"pipeline.devices={nproc * nnodes // replicas}"]), nproc


def check_address(address: str) -> None:
    """Raises CapslogError unless it is HOST:PORT, or that of a store in etcd."""
    from varuna_capslog.base.errors import CapslogError
    from varuna_capslog.elastic.network import SCHEME, parse_address

    if address.startswith(SCHEME):
        parse_address(address)
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise CapslogError(f"{address!r} is not HOST:PORT, nor {SCHEME}HOST:PORT[,HOST:PORT...]/PREFIX")
