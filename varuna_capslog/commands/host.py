"""`capslog host`: this machine's part of an elastic run over several machines, one such command on each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands.arguments import (
    ConfigFile,
    DryRun,
    HostName,
    Machines,
    Overrides,
    StoreAddress,
    Wait,
    option,
    options_of,
    print_plan,
)

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.elastic.host.host import HostEnd
    from varuna_capslog.elastic.host.options import HostOptions

__all__ = ["check_address", "host", "join_until_end", "prepare_and_print", "run_elastic"]


@dataclass(frozen=True)
class HostFlags:
    """The command line of `host`."""

    config: ConfigFile
    overrides: Overrides = None
    serve: Annotated[
        str | None,
        option(
            "Begin the run: profile and plan it here, and serve its store at HOST:PORT, as the others reach it; "
            "etcd://HOST:PORT[,HOST:PORT...]/PREFIX: keep the store in etcd.",
            False,
            metavar="ADDRESS",
        ),
    ] = None
    store: StoreAddress = None
    nnodes: Machines = 1
    nproc: Annotated[
        int | None, option("Workers of this machine.", "the config's workers, spread evenly over --nnodes", min=1)
    ] = None
    name: HostName = None
    wait: Wait = 600.0
    dry_run: DryRun = False


@options_of(HostFlags)
def host(given: HostFlags) -> None:
    """Train on several machines that may come and go: the same command on each, one with --serve."""
    from varuna_capslog.base.supervisor import reserve
    from varuna_capslog.elastic.host.options import HostOptions
    from varuna_capslog.start.elastic_host import check_elastic, join_run

    serve, store = given.serve, given.store
    if (serve is None) == (store is None):
        raise CapslogError("give either --serve ADDRESS (on one machine) or --store ADDRESS (on all others)")
    check_address(serve or store or "")
    settings, workers = _spread(given)
    check_elastic(settings)
    if given.dry_run:
        part = f"join the store at {store}" if store else f"profile, plan and {_begin(serve)}"
        typer.echo(
            f"would {part}; {workers} worker(s) here, run_dir {settings.run_dir}, {given.nnodes} machine(s) to begin"
        )
        return
    options = HostOptions(settings.run_dir, num_workers=workers, name=given.name)
    if store is not None:
        options = dataclasses.replace(options, store=store)
        join_until_end(options, lambda options: join_run(settings, options, wait_seconds=given.wait))
        return
    assert serve is not None
    with reserve(settings.run_dir):
        prepare_and_print(settings)
        options = dataclasses.replace(options, serve_at=serve, hosts=given.nnodes)
        run_elastic(settings, options, "the same commands continue")


def _begin(serve: str | None) -> str:
    from varuna_capslog.elastic.network import SCHEME

    return f"begin a run in the store at {serve}" if str(serve).startswith(SCHEME) else f"serve the store at {serve}"


def join_until_end(options: HostOptions, join: Callable[[HostOptions], HostEnd]) -> None:
    """Joins a run from this machine and says when it has ended. Raises Interrupted when this machine's workers left."""
    from varuna_capslog.base.supervisor import Interrupted

    say = lambda line: typer.echo(f"capslog: {line}")  # noqa: E731
    end = join(dataclasses.replace(options, say=say))
    if end.how == "left":
        raise Interrupted("all workers of this machine have left; the same command joins the run again", 143)
    say("the run has ended")


def prepare_and_print(settings: Config) -> None:
    """Profiles and plans a run, and prints its plan."""
    from varuna_capslog.profiles.record import read_profile
    from varuna_capslog.start.prepare import prepare_run

    plan = prepare_run(settings)
    print_plan(plan, read_profile(settings.run_dir / "profile.json") if plan.profile_digest else None)
    for note in plan.notes:
        typer.echo(f"note: {note}", err=True)


def run_elastic(settings: Config, options: HostOptions, continued: str) -> None:
    """Trains as the host that begins the run. Raises Interrupted when all devices left; `continued`: what goes on."""
    from varuna_capslog.base.supervisor import Interrupted
    from varuna_capslog.elastic.host.terminal import Terminal
    from varuna_capslog.start.elastic_host import run_here

    with Terminal(settings.run_dir, settings.train.max_steps, options.name) as terminal:
        end = run_here(settings, dataclasses.replace(options, say=terminal.say))
    if end.how == "left":
        where = f"{continued} the run in {settings.run_dir}"
        raise Interrupted(f"all devices have left, and the run is parked; {where}", 143)


def _spread(given: HostFlags) -> tuple[Config, int]:
    """The config for all machines that begin, and the workers of this one."""
    from varuna_capslog.config.reading import load_config

    overrides, nnodes, nproc = [*(given.overrides or ()), "elastic.enabled=true"], given.nnodes, given.nproc
    settings = load_config(given.config, overrides)
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
    return load_config(given.config, [*overrides, f"pipeline.devices={nproc * nnodes // replicas}"]), nproc


def check_address(address: str) -> None:
    """Raises CapslogError unless it is HOST:PORT, or that of a store in etcd."""
    from varuna_capslog.elastic.network import SCHEME, parse_address

    if address.startswith(SCHEME):
        parse_address(address)
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise CapslogError(f"{address!r} is not HOST:PORT, nor {SCHEME}HOST:PORT[,HOST:PORT...]/PREFIX")
