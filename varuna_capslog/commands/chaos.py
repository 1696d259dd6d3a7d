"""`capslog chaos`: a training whose workers, hosts, network and store are disturbed at random, and the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands.arguments import AsJson, Overrides, print_json

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.rig.chaos import Outcome

__all__ = ["chaos"]


def chaos(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default="a built-in training"),
    ] = None,
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(help="Of the schedule of faults.")] = 0,
    faults: Annotated[int, typer.Option(min=1, help="How many.")] = 20,
    duration: Annotated[
        str | None,
        typer.Option(help="No fault is begun after so long, such as 10min; of --trace's own time.", show_default="all"),
    ] = None,
    mean: Annotated[str, typer.Option(help="Mean time between a recovery and the next fault.")] = "500ms",
    kinds: Annotated[
        str | None,
        typer.Option(help="Fault classes and shares, such as kill=3,notice.", show_default="all but store"),
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, max=26, help="Supervisors, each as a machine of its own.")] = 2,
    workers: Annotated[int, typer.Option(min=1, help="Of each host.")] = 2,
    network: Annotated[
        str,
        typer.Option(
            help="loopback, or relay: cuts, half-open links and delays too, or namespaces: real networks, no delays."
        ),
    ] = "relay",
    store: Annotated[
        str, typer.Option(help="tcp, or etcd: three servers, of which the class store kills one; with loopback.")
    ] = "tcp",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder of the run.", show_default="a temporary one")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="File that gets one line of JSON more.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay these preemptions instead; lines of milliseconds,add|remove,node.", show_default=False
        ),
    ] = None,
    scale: Annotated[float, typer.Option(help="--trace: by how much faster.")] = 60.0,
    notice: Annotated[
        str, typer.Option(help="--trace: how long before a leave it is announced; AWS's 2 min.")
    ] = "120s",
    as_json: AsJson = False,
) -> None:
    """Disturb a training and judge it: all losses, gradient norms and weights must be as if nothing had been."""
    import shutil
    import sys
    import tempfile

    from varuna_capslog.base import fields, files, units
    from varuna_capslog.rig.chaos import Chaos, Options
    from varuna_capslog.rig.namespaces import enter
    from varuna_capslog.rig.schedule import weights_of

    fields.choice(network, "network", ("loopback", "relay", "namespaces"))
    fields.choice(store, "store", ("tcp", "etcd"))
    if trace is not None:
        hosts, network = 1, "loopback"
    if store == "etcd" and network != "loopback":
        raise CapslogError(f"{network} does not reach etcd's servers; give --network loopback with --store etcd")
    weights = weights_of(kinds, network != "loopback")
    if network == "namespaces":
        if kinds is not None and weights.get("delay"):
            raise CapslogError("fault class 'delay' needs --network relay: namespaces cut ways, but delay nothing")
        weights.pop("delay", None)
        enter(sys.argv[1:])
    folder = output or Path(tempfile.mkdtemp(prefix="capslog-chaos-"))
    changes = list(overrides or ())
    if config is not None and "=" in config:
        changes.insert(0, config)
        config = None
    settings = _settings(config, changes, folder, hosts * workers)
    options = Options(
        seed,
        faults,
        None if duration is None else units.parse_seconds(duration, "duration"),
        units.parse_seconds(mean, "mean"),
        weights,
        hosts,
        workers,
        network,
        store,
    )
    say = lambda line: typer.echo(line, err=True)  # noqa: E731
    if trace is None:
        run = Chaos(settings, options, say)
    else:
        from varuna_capslog.planning.trace_replay import read_trace
        from varuna_capslog.rig.preemptions import Preemptions, rents

        span = None if duration is None else units.parse_seconds(duration, "duration")
        rented = rents(read_trace(trace), workers, scale, span)
        run = Preemptions(settings, options, rented, scale, units.parse_seconds(notice, "notice"), say)
    outcome = run.run()
    found = outcome.to_json() | run.summary()
    if trace is not None:
        found |= {"trace": trace.name}
    if results is not None:
        files.append_jsonl(results, found)
    if output is None and outcome.passed:
        shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        print_json(found)
    else:
        _print(outcome, found)
    if not outcome.passed:
        raise CapslogError(f"the run failed: {outcome.breaches[0]}; everything it wrote is in {folder}")


def _settings(config: str | None, overrides: list[str], folder: Path, devices: int) -> Config:
    from varuna_capslog.config.reading import load_config
    from varuna_capslog.rig.chaos import toy_config

    forced = [f"run_dir={folder}", f"pipeline.devices={devices}", "elastic.enabled=true"]
    if config is None:
        return toy_config(folder, [*forced, *overrides])
    return load_config(Path(config), [*forced, *overrides])


def _print(outcome: Outcome, found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("fault", "count", "next step: p50", "p90", "max", "gap: p50", "p90", "max"):
        table.add_column(name, justify="left" if name == "fault" else "right", no_wrap=True)
    for row in found["classes"]:
        cells = [row["kind"], str(row["count"])]
        for name in ("recovered_seconds", "gap_seconds"):
            times = row.get(name)
            cells += ["-"] * 3 if times is None else [f"{times[key]:.2f} s" for key in ("p50", "p90", "max")]
        table.add_row(*cells)
    console = Console()
    console.print(table)
    console.print(
        f"seed {found['seed']}: {found['outcome']}; {found['faults']} faults, {found['joins']} joins, "
        f"{found['generations']} generations of {'/'.join(map(str, found['layouts']))} members, {found['steps']} steps "
        f"({found['steps_made_again']} made again) in {found['seconds']:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    if "share_of_ideal" in found:
        console.print(
            f"{found['trace']} at {found['scale']:g} times its pace: {found['changes']} changes, {found['lost_nodes']} "
            f"nodes lost, {100 * found['share_of_ideal']:.1f} % of the steps of a run that changes in no time "
            f"({found['lost_seconds']:.1f} s of {found['seconds']:.0f} s lost)",
            highlight=False,
            soft_wrap=True,
        )
    for breach in outcome.breaches:
        console.print(f"  {breach}", highlight=False, soft_wrap=True, markup=False)
