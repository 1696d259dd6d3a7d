"""`capslog script`: a supervisor around any program that supplies `state()`, `load()` and `step()`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands.shared import DryRun, HostName, Machines, StoreAddress, Wait, option, options_of, say
from varuna_capslog.commands.train import check_address, join_until_end

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Elastic

__all__ = ["elastic_settings", "refuse_chaos", "script"]


def refuse_chaos(wish: Any) -> None:
    """Raise CapslogError with the new command for fault injection, unless `wish` is None: the option is not given."""
    if wish is not None:
        raise CapslogError(
            "`capslog chaos` and `capslog script --chaos` are now `launch/chaos.sh [CONFIG]` and `launch/chaos.sh "
            "script FILE` of a clone of the repository, with the same options; see docs/chaos.md"
        )


Chaos = Annotated[str | None, typer.Option(hidden=True, is_eager=True, callback=refuse_chaos)]


@dataclass(frozen=True)
class ScriptOptions:
    """The command line of `script`."""

    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Program that calls elastic.script.train.", show_default=False)
    ]
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the program.")] = None
    nproc: Annotated[int, typer.Option("--nproc", "--devices", min=1, help="Workers of this machine.")] = 2
    run_dir: Annotated[Path | None, option("Folder for checkpoints, metrics and logs.", "runs/<name of FILE>")] = None
    elastic: Annotated[
        list[str] | None, option("Key of a config's section elastic; may be repeated.", metavar="KEY=VALUE")
    ] = None
    serve: Annotated[
        str | None,
        option(
            "Address HOST:PORT at which other machines reach the run's store, or etcd://HOST:PORT[,...]/PREFIX.",
            False,
            metavar="ADDRESS",
        ),
    ] = None
    store: StoreAddress = None
    nnodes: Machines = 1
    name: HostName = None
    wait: Wait = 600.0
    chaos: Chaos = None
    seed: Chaos = None
    mean: Chaos = None
    dry_run: DryRun = False


@options_of(ScriptOptions)
def script(options: ScriptOptions) -> None:
    """Run a data-parallel program on workers that may come and go.

    Ctrl-C stops after the step; the same command continues.
    """
    if options.serve is not None and options.store is not None:
        raise CapslogError("--serve and --store exclude each other; one machine serves, all others join")
    if options.store is None and options.serve is None and options.nnodes > 1:
        raise CapslogError(f"--nnodes {options.nnodes} needs --serve HOST:PORT here, --store HOST:PORT on the others")
    for address in (options.serve, options.store):
        if address is not None:
            check_address(address)
    if not options.file.is_file():
        raise CapslogError(f"there is no script {options.file}; check the path")
    folder, settings = options.run_dir or Path("runs") / options.file.stem, elastic_settings(options.elastic or [])
    if options.dry_run:
        part = (
            f"join the store at {options.store}"
            if options.store
            else f"serve the store at {options.serve or '127.0.0.1'}"
        )
        say(
            f"would {part}; {options.nproc} worker(s) here run {options.file}, run_dir {folder}, "
            f"{options.nnodes} machine(s) to begin"
        )
    else:
        _run(options, folder, settings)


def elastic_settings(pairs: list[str]) -> Elastic:
    """Return the section `elastic` of a config, with the keys of `KEY=VALUE` pairs."""
    from varuna_capslog.config.reading import assignments, section
    from varuna_capslog.config.settings import Elastic

    keys = assignments((pair.removeprefix("elastic.") for pair in pairs), "--elastic")
    return section(Elastic, {"enabled": True, **keys}, "elastic")


def _run(options: ScriptOptions, folder: Path, settings: Elastic) -> None:
    from varuna_capslog.base.supervisor import Interrupted
    from varuna_capslog.elastic.host.terminal import Terminal
    from varuna_capslog.elastic.host.workers import HostOptions
    from varuna_capslog.start.elastic_host import join_script, run_script

    file, arguments = options.file, options.arguments or []
    host_options = HostOptions(
        folder,
        num_workers=options.nproc,
        name=options.name,
        store=options.store,
        serve_at=options.serve or "127.0.0.1:0",
        hosts=options.nnodes,
        settings=settings,
    )
    if host_options.store is not None:
        join_until_end(host_options, lambda host_options: join_script(file, arguments, host_options, options.wait))
        return
    with Terminal(folder, None, host_options.name) as terminal:
        end = run_script(file, arguments, dataclasses.replace(host_options, say=terminal.say))
    if end.how == "left":
        raise Interrupted(f"all devices have left, the run is parked; the same command continues it in {folder}", 143)
