"""`capslog train` and `capslog host` start and watch the workers of a run on this machine; with `capslog morph` and
`capslog notice` people and schedulers change a running elastic run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.fork_server import begun_early
from varuna_capslog.commands import shared
from varuna_capslog.commands.shared import option

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.elastic.host.host import HostEnd
    from varuna_capslog.elastic.host.workers import HostOptions
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile

__all__ = ["check_address", "host", "join_until_end", "morph", "notice", "train"]


def train(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    nproc: Annotated[
        int | None,
        option(
            "Workers to start here, all replicas together.",
            "pipeline.devices x pipeline.replicas",
            "--nproc",
            min=1,
        ),
    ] = None,
    trust: shared.Trust = False,
) -> None:
    """Train with the planned pipeline. Ctrl-C stops after the step; the same command continues."""
    with begun_early():
        from varuna_capslog.start.local_run import train_here

        settings = shared.load(config, overrides, trust=trust)
        if nproc is not None:
            settings = _of_workers(settings, nproc, f"--nproc {nproc}", config, overrides)
        train_here(settings, _show_plan, shared.tell)


@dataclass(frozen=True)
class HostFlags:
    """The command line of `host`."""

    config: shared.ConfigFile
    overrides: shared.Overrides = None
    serve: Annotated[
        str | None,
        option(
            "Address HOST:PORT at which this machine begins the run and serves its store to the others; "
            "etcd://HOST:PORT[,HOST:PORT...]/PREFIX keeps the store in etcd.",
            False,
            metavar="ADDRESS",
        ),
    ] = None
    store: shared.StoreAddress = None
    nnodes: shared.Machines = 1
    nproc: Annotated[
        int | None, option("Workers of this machine.", "the config's workers, spread evenly over --nnodes", min=1)
    ] = None
    name: shared.HostName = None
    wait: shared.Wait = 600.0
    dry_run: shared.DryRun = False
    trust: shared.Trust = False


@shared.options_of(HostFlags)
def host(flags: HostFlags) -> None:
    """Train on several machines that may come and go. Run it on each machine, on one of them with --serve."""
    from varuna_capslog.base.supervisor import reserve
    from varuna_capslog.elastic.host.workers import HostOptions
    from varuna_capslog.start.elastic_host import check_elastic, join_run, server_of
    from varuna_capslog.start.local_run import prepared_run, run_elastic

    serve, store = flags.serve, flags.store
    if (serve is None) == (store is None):
        raise CapslogError("give either --serve ADDRESS (on one machine) or --store ADDRESS (on all others)")
    check_address(serve or store or "")
    settings, workers = _spread(flags)
    check_elastic(settings)
    if flags.dry_run:
        part = f"join the store at {store}" if store else f"profile, plan and {_begin(serve)}"
        shared.say(
            f"would {part}; {workers} worker(s) here, run_dir {settings.run_dir}, {flags.nnodes} machine(s) to begin"
        )
        return
    options = HostOptions(settings.run_dir, num_workers=workers, name=flags.name)
    if store is not None:
        options = dataclasses.replace(options, store=store)
        join_until_end(options, lambda options: join_run(settings, options, wait_seconds=flags.wait))
        return
    assert serve is not None
    with reserve(settings.run_dir), server_of(settings) as server:
        _show_plan(*prepared_run(settings, server=server))
        options = dataclasses.replace(options, serve_at=serve, hosts=flags.nnodes, fork_server=server)
        run_elastic(settings, options, "the same commands continue")


def _begin(serve: str | None) -> str:
    from varuna_capslog.elastic.network import SCHEME

    return f"begin a run in the store at {serve}" if str(serve).startswith(SCHEME) else f"serve the store at {serve}"


def join_until_end(options: HostOptions, join: Callable[[HostOptions], HostEnd]) -> None:
    """Join a run from this machine, print when it has ended. Raises Interrupted when this machine's workers left."""
    from varuna_capslog.base.supervisor import Interrupted

    say = lambda line: shared.say(f"capslog: {line}")  # noqa: E731
    end = join(dataclasses.replace(options, say=say))
    if end.how == "left":
        raise Interrupted("all workers of this machine have left; the same command joins the run again", 143)
    say("the run has ended")


def _show_plan(plan: Plan, profile: Profile | None) -> None:
    shared.print_plan(plan, profile)
    for note in plan.notes:
        shared.say(f"note: {note}", err=True)


def _spread(flags: HostFlags) -> tuple[Config, int]:
    """Return the config for all machines that begin, and the number of workers of this machine."""
    overrides, nnodes, nproc = [*(flags.overrides or ()), "elastic.enabled=true"], flags.nnodes, flags.nproc
    if flags.store is not None and nproc is not None:
        overrides.append("pipeline.plan=null")  # a machine may join with any number; the serving machine has the plan
    if flags.store is not None:
        overrides.append("variants={}")  # the variants that passed their check are in the folder of the run
    settings = shared.load(flags.config, overrides, trust=flags.trust)
    wanted = settings.world_size
    if nproc is None:
        if wanted % nnodes:
            raise CapslogError(f"{wanted} workers cannot be spread evenly over --nnodes {nnodes}; give --nproc")
        return settings, wanted // nnodes
    flags_text = f"--nnodes {nnodes} x --nproc {nproc}"
    return _of_workers(settings, nproc * nnodes, flags_text, flags.config, overrides), nproc


def _of_workers(settings: Config, workers: int, flags: str, path: Path, overrides: Sequence[str] | None) -> Config:
    """Return the config with `pipeline.devices` for this total number of workers; flags: the options that set it."""
    pipeline = settings.pipeline
    if workers == settings.world_size:
        return settings
    if pipeline.plan is not None:
        raise CapslogError(
            f"{flags} is given, but pipeline.plan={pipeline.plan} runs on {settings.world_size} ranks; make the two "
            "agree, or leave --nproc out"
        )
    if any(override.partition("=")[0].strip() == "pipeline.devices" for override in overrides or ()):
        raise CapslogError(
            f"{flags} is given, but pipeline.devices={pipeline.devices} makes {settings.world_size} workers; give one "
            "of the two, or make them agree"
        )
    if workers % pipeline.replicas:
        raise CapslogError(
            f"{flags} is not divisible by pipeline.replicas={pipeline.replicas}; replicas have equally many workers"
        )
    return shared.load(path, overrides, f"pipeline.devices={workers // pipeline.replicas}", trust=True)


def check_address(address: str) -> None:
    """Raise CapslogError unless the address is HOST:PORT, or that of a store in etcd."""
    from varuna_capslog.elastic.network import SCHEME, parse_address

    if address.startswith(SCHEME):
        parse_address(address)
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise CapslogError(f"{address!r} is not HOST:PORT, nor {SCHEME}HOST:PORT[,HOST:PORT...]/PREFIX")


def morph(
    run_dir: shared.RunDirectory,
    devices: Annotated[int, option("New number of workers.", False, min=1)],
) -> None:
    """Change the number of devices of a running elastic training."""
    from varuna_capslog.elastic import request_morph
    from varuna_capslog.elastic.host.hooks import outlook

    prospect = outlook(devices, run_dir)
    request_morph(devices, run_dir)
    shared.say(f"asked for {devices} device(s): {prospect}; {run_dir}/events.jsonl tells what comes of it")


def notice(
    run_dir: shared.RunDirectory,
    host: Annotated[str | None, option("Host that will leave.", "the only one")] = None,
    member: Annotated[str | None, option("Worker that will leave, instead of a whole host.", False)] = None,
    seconds: Annotated[float | None, option("Seconds until then.", "no deadline", min=0)] = None,
    urgent: Annotated[
        bool, typer.Option("--urgent", help="Leave at the next step, without waiting for copies.")
    ] = False,
    hint: Annotated[
        bool, typer.Option("--hint", help="A warning alone: state is copied ahead, nobody leaves yet.")
    ] = False,
) -> None:
    """Announce to a running elastic training that a host or a worker will leave."""
    from varuna_capslog.elastic.host.hooks import give_notice

    if urgent and hint:
        raise CapslogError("--urgent and --hint exclude each other; a hint moves nobody")
    if host is not None and member is not None:
        raise CapslogError("--host and --member exclude each other; name one")
    target = give_notice(run_dir, host, member, urgent, seconds, hint)
    shared.say(f"told that {target} {'may have' if hint else 'is'} to leave")
